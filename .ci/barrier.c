// Written into ggml-cpu.c by engine.cmake, before ggml_barrier.

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
static atomic_int cpuchat_sleepers;
#endif

// Waits until `passed` is no longer `n`: spins as before, and sleeps once it has waited for 100 us. Nobody waits for so
// long while each thread has a CPU; a thread whose CPU another program has is away for a time slice, some ms, and the
// others would spend their own shares on spinning.
static void cpuchat_barrier_wait(atomic_int * passed, int n) {
    int64_t until = 0;
    for (unsigned i = 1; atomic_load_explicit(passed, memory_order_relaxed) == n; i++) {
        ggml_thread_cpu_relax();
        if (i % 256) {
            continue;
        }
        const int64_t now = ggml_time_us();
        if (until == 0) {
            until = now + 100;
        } else if (now > until) {
#if defined(__linux__)
            atomic_fetch_add(&cpuchat_sleepers, 1);
            syscall(SYS_futex, (int *) passed, FUTEX_WAIT_PRIVATE, n, NULL, NULL, 0);  // returns if it is not n
            atomic_fetch_sub(&cpuchat_sleepers, 1);
#else
            sched_yield();
#endif
        }
    }
}

static void cpuchat_barrier_wake(atomic_int * passed) {
#if defined(__linux__)
    if (atomic_load(&cpuchat_sleepers)) {
        syscall(SYS_futex, (int *) passed, FUTEX_WAKE_PRIVATE, GGML_MAX_N_THREADS, NULL, NULL, 0);
    }
#else
    (void) passed;
#endif
}

