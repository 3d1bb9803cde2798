// Rows of K or V in 8 bits, with the same bits as quantize_rows in headstart/attention/memory.py;
// include it after the pragma.
#pragma once

#include "../narrow/digits.h"
#include "avx2.h"

namespace headstart {

// Loads up to 8 integers, padded with zeros.
inline __m256 load(const int8_t* from, int count) {
    int64_t bytes = 0;
    if (count >= LANES)
        std::memcpy(&bytes, from, LANES);
    else
        std::memcpy(&bytes, from, std::max(count, 0));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
}

constexpr float LARGEST_STEP = 0x1.020406p+121f;  // 127 times the next number is infinite

// Writes a head's integers and its scale: the largest magnitude over 127, NaN if a number is not
// finite, 0 instead of a subnormal scale. Returns true if a number is not finite.
inline bool write_int8_row(int8_t* to, float* scale, const float* from, int dim) {
    __m256i most = _mm256_setzero_si256();
    for (int d = 0; d < dim; d += LANES)
        most = _mm256_max_epi32(most, magnitude(load(from + d, dim - d)));
    const int32_t bits = largest(most);
    float step;
    std::memcpy(&step, &bits, sizeof step);
    const bool is_finite = bits < 0x7f800000;
    step = is_finite ? step / 127.0f : std::numeric_limits<float>::quiet_NaN();
    if (step < std::numeric_limits<float>::min()) step = 0.0f;
    if (step > LARGEST_STEP) step = LARGEST_STEP;
    *scale = step;
    if (!(step > 0.0f)) {
        std::memset(to, 0, dim);
        return !is_finite;
    }
    for (int d = 0; d < dim; d += LANES) {
        const __m256i integers =
            _mm256_cvtps_epi32(_mm256_div_ps(load(from + d, dim - d), _mm256_set1_ps(step)));
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(integers),
                                              _mm256_extracti128_si256(integers, 1));
        const int64_t bytes = _mm_cvtsi128_si64(_mm_packs_epi16(words, words));
        std::memcpy(to + d, &bytes, std::min(LANES, dim - d));
    }
    return false;
}

}  // namespace headstart
