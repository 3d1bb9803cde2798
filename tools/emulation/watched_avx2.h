// AVX2's masked load in plain C++, so that a sanitizer sees which memory it reads. Included before a
// source, whose other instructions run on the CPU.
#pragma once

#include <immintrin.h>

__attribute__((target("avx2"))) inline __m256 watched_maskload(const float* from, __m256i mask) {
    alignas(32) int32_t kept[8];
    alignas(32) float out[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(kept), mask);
    for (int i = 0; i < 8; i++) out[i] = kept[i] < 0 ? from[i] : 0.0f;
    return _mm256_load_ps(out);
}
#define _mm256_maskload_ps watched_maskload
