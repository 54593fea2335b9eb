/* Reads memory as fast as a compiled program can, for comparison with the probe, which has no compiler.

   read_kernel CPU,CPU,... BYTES SECONDS ROUNDS

   One pinned thread per CPU fills BYTES of its own (huge pages) and ORs them together, over and over, in windows of
   SECONDS that are the same for all threads. Prints bytes per second of all threads together, one line per window. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define MOST_CPUS 1024
#define MOST_ROUNDS 64
#define HUGE_PAGE (2u << 20)
#define CALL (1u << 20)

static size_t size;
static double seconds, start;
static int rounds;
static pthread_barrier_t ready;

struct thread {
    pthread_t id;
    int cpu;
    double rates[MOST_ROUNDS];
    uint64_t sum; /* so that the reads are not compiled away */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* n: a multiple of 512 */
static uint64_t scan(const char *p, size_t n) {
#if defined(__AVX512F__)
    __m512i a[8];
    for (int i = 0; i < 8; i++) a[i] = _mm512_setzero_si512();
    for (const char *end = p + n; p < end; p += 512)
        for (int i = 0; i < 8; i++) a[i] = _mm512_or_si512(a[i], _mm512_load_si512((const void *)(p + 64 * i)));
    for (int i = 1; i < 8; i++) a[0] = _mm512_or_si512(a[0], a[i]);
    return (uint64_t)_mm512_reduce_or_epi64(a[0]);
#elif defined(__AVX2__)
    __m256i a[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_setzero_si256();
    for (const char *end = p + n; p < end; p += 256)
        for (int i = 0; i < 8; i++) a[i] = _mm256_or_si256(a[i], _mm256_load_si256((const __m256i *)(p + 32 * i)));
    for (int i = 1; i < 8; i++) a[0] = _mm256_or_si256(a[0], a[i]);
    uint64_t out[4];
    _mm256_storeu_si256((__m256i *)out, a[0]);
    return out[0] | out[1] | out[2] | out[3];
#else
    uint64_t a[8] = {0};
    for (const char *end = p + n; p < end; p += 64)
        for (int i = 0; i < 8; i++) a[i] |= ((const uint64_t *)p)[i];
    return a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7];
#endif
}

static void *work(void *argument) {
    struct thread *self = argument;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(self->cpu, &set);
    if (pthread_setaffinity_np(pthread_self(), sizeof set, &set)) {
        fprintf(stderr, "CPU %d cannot be used\n", self->cpu);
        exit(1);
    }
    char *memory = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    madvise(memory, size + HUGE_PAGE, MADV_HUGEPAGE);
    memory = (char *)(((uintptr_t)memory + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    memset(memory, 1, size);
    if (pthread_barrier_wait(&ready) == PTHREAD_BARRIER_SERIAL_THREAD) start = now() + 0.06;
    pthread_barrier_wait(&ready);

    size_t offset = 0;
    double t = now();
    for (int window = 0; window <= rounds; window++) {
        double begin = t, end = start + window * seconds, bytes = 0;
        while (t < end) {
            self->sum |= scan(memory + offset, CALL);
            offset = (offset + CALL) % size;
            bytes += CALL;
            t = now();
        }
        if (window) self->rates[window - 1] = bytes / (t - begin);
    }
    return NULL;
}

int main(int argc, char **argv) {
    static struct thread threads[MOST_CPUS];
    int n = 0;
    if (argc != 5) {
        fprintf(stderr, "usage: read_kernel CPU,CPU,... BYTES SECONDS ROUNDS\n");
        return 2;
    }
    for (char *word = strtok(argv[1], ","); word && n < MOST_CPUS; word = strtok(NULL, ",")) threads[n++].cpu = atoi(word);
    size = strtoull(argv[2], NULL, 10) / HUGE_PAGE * HUGE_PAGE;
    seconds = atof(argv[3]);
    rounds = atoi(argv[4]);
    if (!n || !size || seconds <= 0 || rounds < 1 || rounds > MOST_ROUNDS) return 2;
    pthread_barrier_init(&ready, NULL, n);
    for (int i = 0; i < n; i++)
        if (pthread_create(&threads[i].id, NULL, work, &threads[i])) return 1;
    for (int i = 0; i < n; i++) pthread_join(threads[i].id, NULL);
    for (int window = 0; window < rounds; window++) {
        double sum = 0;
        for (int i = 0; i < n; i++) sum += threads[i].rates[window];
        printf("%.0f\n", sum);
    }
    for (int i = 0; i < n; i++)
        if (threads[i].sum != 0x0101010101010101ull) return 3;
    return 0;
}
