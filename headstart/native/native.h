// Shared by every kernel file: standard headers, threads, and the version of this interface.
//
// Kernels are `extern "C"` functions, called by ctypes, so building needs a compiler but no headers
// of Python or torch. Most files need AVX-512 with bf16 (avx512.h). Most files of narrow/,
// recurrent.cpp and attention/float32.cpp need AVX2. headstart_native_level() returns which files
// this CPU can run.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

// Increase this when an exported signature changes. headstart/native/__init__.py has the same
// number, so that a library built from other sources is not used. bindings.py declares signatures
// and structs.
constexpr int HEADSTART_NATIVE_INTERFACE = 25;

namespace headstart {

using bf16 = uint16_t;

// True if kernels multiply bf16 with AMX. Set once, before a kernel runs, because sums of AMX and
// of AVX-512 differ in their last bits.
extern bool use_amx;

// Instructions that multiply bytes: 0 AVX2, 1 AVX-VNNI, 2 AVX-512 VNNI. All give the same bits.
extern int vnni;

// Releases this thread's tiles, so that the system need not save them when it switches threads.
void release_tiles();

// Runs body(thread, threads) on `threads` threads at once and waits for all of them. The threads
// are those of torch's OpenMP library, so that two pools never compete for the cores. Without this
// library, or with one thread, the caller does all the work. The body must not throw.
using Body = void (*)(void* data, int thread, int threads);
void run_parallel(Body body, void* data, int threads);

template <class Function>
void parallel(int threads, Function&& function) {
    if (threads <= 1) {
        function(0, 1);
        return;
    }
    run_parallel(
        [](void* data, int thread, int count) { (*static_cast<Function*>(data))(thread, count); },
        &function, threads);
}

// Calls function(i) for each i below `count`, in a contiguous range for each of `threads` threads.
template <class Function>
void parallel_each(int threads, int64_t count, const Function& function) {
    parallel(threads, [&](int thread, int all) {
        for (int64_t i = count * thread / all; i < count * (thread + 1) / all; i++) function(i);
    });
}

// Calls function(std::integral_constant<int, N>()) with N = min(count, MOST), at least 1.
template <int MOST, class Function>
__attribute__((always_inline)) inline void with_count(int64_t count, const Function& function) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, function);
    function(std::integral_constant<int, MOST>());
}

// Memory that a thread retains between calls; it only grows.
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }
    template <class T>
    T* take(int64_t count) {
        const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size_) {
            std::free(memory_);
            memory_ = std::aligned_alloc(4096, bytes);
            if (memory_ == nullptr) std::abort();  // cannot be reported from here
            size_ = bytes;
        }
        return static_cast<T*>(memory_);
    }

  private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

// The work of one parallel() call, in consecutive stages.
//
// A stage is a number of units. Threads take a few at a time, so a thread that loses its core for a
// while does not delay the others. There is a barrier between stages. Waking a sleeping thread
// takes longer than a stage, so threads spin at the barrier. They spin only for a short time, since
// the last thread may need this core.
class Stages {
  public:
    // Reserves `count` units for the caller and returns the first, which may be beyond the stage's
    // end.
    int64_t take(int64_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }

    // Waits until all `threads` threads have called this; then the next stage begins.
    void finish(int threads) {
        const int stage = stage_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            stage_.store(stage + 1, std::memory_order_release);
            return;
        }
        for (int spin = 0; stage_.load(std::memory_order_acquire) == stage; spin++) {
            if (spin < 2000) {
                _mm_pause();
            } else {
                std::this_thread::yield();
            }
        }
    }

  private:
    std::atomic<int64_t> next_{0};
    std::atomic<int> arrived_{0};
    std::atomic<int> stage_{0};
};

}  // namespace headstart
