// Reads memory as fast as the CPUs can, for the probe of read bandwidth: a library of its own, which needs no engine.
//
// Several streams are read at once, since one alone does not use up the memory everywhere (measured, Zen 3: 18 GB/s of
// one stream with two cores, 26 of four). How many are best differs from CPU to CPU: each number is tried for a moment.
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr size_t huge_page = size_t{2} << 20;
constexpr size_t chunk = size_t{1} << 20;  // between two looks at the clock
constexpr double warm_up = 0.06, trial = 0.04;  // seconds

using Words = uint64_t __attribute__((vector_size(32)));
using Scan = uint64_t (*)(const char* from);

// Ors a chunk together, in as many streams side by side.
template <int streams> uint64_t scan(const char* from) {
    constexpr size_t part = chunk / streams, step = 256;
    Words sums[step / sizeof(Words)] = {};
    for (size_t at = 0; at < part; at += step) {
        for (int stream = 0; stream < streams; stream++) {
            const Words* words = reinterpret_cast<const Words*>(from + stream * part + at);
            for (Words& sum : sums) sum |= *words++;
        }
    }
    for (Words& sum : sums) sums[0] |= sum;
    return sums[0][0] | sums[0][1] | sums[0][2] | sums[0][3];
}
constexpr Scan scans[] = {scan<1>, scan<2>, scan<4>, scan<8>};

double seconds_of(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Reader {
    int cpu;
    char* mapped = nullptr;
    char* memory = nullptr;
    size_t offset = 0;
    bool is_started = true, is_pinned = true;
    std::vector<double> rates{}, shares{};  // of each window: bytes a second, and the part of the CPU that it got
    uint64_t seen = 0;                      // without which nothing need be read

    void pin() {
#if defined(__linux__)
        std::vector<cpu_set_t> set(cpu / CPU_SETSIZE + 1);
        const size_t size = set.size() * sizeof(cpu_set_t);
        CPU_SET_S(cpu, size, set.data());
        is_pinned = pthread_setaffinity_np(pthread_self(), size, set.data()) == 0;
#endif
    }
    // The pages lie where the memory policy of this process puts those of this thread.
    void fill(size_t size) {
        void* found = mmap(nullptr, size + huge_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) return;
        mapped = static_cast<char*>(found);
        memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(found) + huge_page - 1) / huge_page * huge_page);
#if defined(MADV_HUGEPAGE)
        madvise(memory, size, MADV_HUGEPAGE);
#endif
        memset(memory, 1, size);
    }
    // Windows of equal length, the same for all threads; what is read before `start` is not counted.
    void read_windows(size_t size, const std::vector<Scan>& windows, double start, double seconds) {
        double now = seconds_of(CLOCK_MONOTONIC);
        auto bytes_until = [&](double end, Scan scan) {
            double bytes = 0;
            for (; now < end; now = seconds_of(CLOCK_MONOTONIC), bytes += chunk) {
                seen |= scan(memory + offset);
                offset = (offset + chunk) % size;
            }
            return bytes;
        };
        rates.clear(), shares.clear();
        bytes_until(start, windows[0]);
        for (Scan scan : windows) {
            const double begin = now, computed = seconds_of(CLOCK_THREAD_CPUTIME_ID);
            const double bytes = bytes_until(start += seconds, scan), took = now - begin;
            rates.push_back(took > 0 ? bytes / took : 0);
            shares.push_back(took > 0 ? (seconds_of(CLOCK_THREAD_CPUTIME_ID) - computed) / took : 0);
        }
    }
};

// Each reader does it in a thread of its own, on its CPU.
void in_threads(std::vector<Reader>& readers, const std::function<void(Reader&)>& what) {
    std::vector<std::thread> threads;
    for (Reader& reader : readers) {
        try {
            threads.emplace_back([&] {
                reader.pin();
                if (reader.is_pinned) what(reader);
            });
        } catch (const std::system_error&) {
            reader.is_started = false;
        }
    }
    for (std::thread& thread : threads) thread.join();
}

double rate_of(const std::vector<Reader>& readers, size_t window) {
    double sum = 0;
    for (const Reader& reader : readers) sum += reader.rates[window];
    return sum;
}

}  // namespace

// Read `bytes` (a multiple of 2 MiB) a thread, pinned to each of `n` CPUs, in `n_windows` windows of `seconds`. Writes
// bytes a second of all threads, and the part of its CPU that the thread got which got least, for each window. Returns
// 0; 1 + i if CPU i may not be used, -(1 + i) if there is no memory for it, -(1 + i + n) if no thread.
extern "C" __attribute__((visibility("default"))) int cpuchat_read(
    const int* cpus, int n, size_t bytes, double seconds, int n_windows, double* rates, double* shares) {
    std::vector<Reader> readers;
    for (int i = 0; i < n; i++) readers.push_back(Reader{cpus[i]});
    auto in_all = [&](auto what) {
        in_threads(readers, what);
        for (int i = 0; i < n; i++) {
            if (!readers[i].is_started) return -1 - i - n;
            if (!readers[i].is_pinned) return 1 + i;
            if (!readers[i].memory) return -1 - i;
        }
        return 0;
    };
    auto measure = [&](const std::vector<Scan>& windows, double each) {
        const double start = seconds_of(CLOCK_MONOTONIC) + warm_up;
        return in_all([&](Reader& reader) { reader.read_windows(bytes, windows, start, each); });
    };
    const std::vector<Scan> all(std::begin(scans), std::end(scans));
    int failed = in_all([&](Reader& reader) { reader.fill(bytes); });
    failed = failed ? failed : measure(all, trial);
    if (!failed) {
        size_t best = 0;
        for (size_t i = 1; i < all.size(); i++) best = rate_of(readers, i) > rate_of(readers, best) ? i : best;
        failed = measure(std::vector<Scan>(n_windows, all[best]), seconds);
    }
    for (int window = 0; !failed && window < n_windows; window++) {
        rates[window] = rate_of(readers, window);
        shares[window] = 1;
        for (const Reader& reader : readers) shares[window] = std::min(shares[window], reader.shares[window]);
    }
    for (const Reader& reader : readers) failed = reader.seen & ~uint64_t{0x0101010101010101} ? -1 : failed;
    for (const Reader& reader : readers) {
        if (reader.mapped) munmap(reader.mapped, bytes + huge_page);
    }
    return failed;
}
