// AVX2 vectors for two Kinds of integers_product.h; include it after the pragma.
#pragma once

#include "integers_product.h"

namespace headstart::integers {
namespace {

struct Avx2Vectors {
    static constexpr int LANES = 8, MOST = 4;
    using Floats = __m256;
    using Integers = __m256i;

    static __m256i load(const uint8_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    static __m256i repeat(int four) { return _mm256_set1_epi32(four); }
    static __m256i right(__m256i x, int bits) { return _mm256_srli_epi16(x, bits); }
    static __m256 from_bytes(const uint8_t* from) {
        const auto* bytes = reinterpret_cast<const __m128i*>(from);
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)));
    }
    static __m256 from_halves(const uint8_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static __m256 fmadd(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace headstart::integers
