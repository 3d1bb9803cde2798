// The instruction of AVX-VNNI in plain C++. Included before a source, whose other instructions, those
// of AVX2, run on the CPU.
#pragma once

#include <immintrin.h>

#include <cstdint>

inline __m256i dpbusd(__m256i sum, __m256i bytes, __m256i numbers) {
    typedef int32_t Sums __attribute__((vector_size(32)));
    typedef uint8_t Bytes __attribute__((vector_size(32)));
    typedef int8_t Numbers __attribute__((vector_size(32)));
    auto found = reinterpret_cast<Sums>(sum);
    for (int i = 0; i < 32; i++)
        found[i / 4] += int32_t{reinterpret_cast<Bytes>(bytes)[i]} * reinterpret_cast<Numbers>(numbers)[i];
    return reinterpret_cast<__m256i>(found);
}

#define _mm256_dpbusd_avx_epi32 dpbusd
