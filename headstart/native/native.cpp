// Whether this machine can run the kernels, and the threads that they run on.
#include "native.h"

#include <atomic>

namespace {

using GompParallel = void (*)(void (*function)(void*), void* data, unsigned threads,
                              unsigned flags);
using GompNumber = int (*)();

GompParallel gomp_parallel = nullptr;
GompNumber gomp_thread = nullptr;
GompNumber gomp_threads = nullptr;

struct Region {
    headstart::Body body;
    void* data;
};

void enter(void* region) {
    const Region& r = *static_cast<Region*>(region);
    r.body(r.data, gomp_thread(), gomp_threads());
}

}  // namespace

void headstart::run_parallel(Body body, void* data, int threads) {
    if (threads <= 1 || gomp_parallel == nullptr) {
        body(data, 0, 1);
        return;
    }
    Region region{body, data};
    gomp_parallel(enter, &region, static_cast<unsigned>(threads), 0);
}

extern "C" {

int headstart_native_interface() { return HEADSTART_NATIVE_INTERFACE; }

// Whether this CPU has what all files here are compiled for.
int headstart_native_usable() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// Addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads, given once.
void headstart_native_threads(void* parallel, void* thread, void* threads) {
    gomp_parallel = reinterpret_cast<GompParallel>(parallel);
    gomp_thread = reinterpret_cast<GompNumber>(thread);
    gomp_threads = reinterpret_cast<GompNumber>(threads);
}

// Adds up 0 .. count - 1 on `threads` threads; `ran` says how many there were. For tests.
int64_t headstart_native_sum(int64_t count, int threads, int* ran) {
    std::atomic<int64_t> total{0};
    headstart::parallel(threads, [&](int thread, int all) {
        int64_t mine = 0;
        for (int64_t i = thread; i < count; i += all) mine += i;
        total += mine;
        if (thread == 0) *ran = all;
    });
    return total;
}

}  // extern "C"
