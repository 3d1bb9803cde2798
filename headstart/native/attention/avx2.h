// Small AVX2 functions over floats; include it after the pragma.
#pragma once

#include "../native.h"

namespace headstart {

constexpr int LANES = 8;

struct Avx2 {
    using Vector = __m256;
};

inline __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Loads `count` numbers, at most 8; uses no mask for 8.
inline __m256 load(const float* from, int count) {
    if (count >= LANES) return _mm256_loadu_ps(from);
    return _mm256_maskload_ps(from, first_lanes(count));
}

// 2^x for x below 128, with a relative error of 1e-7; 0 below -126.5. NaN stays NaN, since the
// second operand of a minimum or maximum is the result if one of them is NaN.
inline __m256 power(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), x));
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 f = x - n;
    __m256 y = _mm256_set1_ps(1.535336188319500e-4f);
#pragma GCC unroll 6
    for (const float term : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
                             2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f})
        y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(term));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

inline __m256 larger(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }

inline float largest_lane(__m256 x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

// True if a number is infinite or NaN: its exponent is all ones.
inline bool has_nonfinite(const float* row, int dim) {
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    __m256i nonfinite = _mm256_setzero_si256();
    for (int d = 0; d < dim; d += LANES) {
        const __m256i bits = _mm256_castps_si256(load(row + d, dim - d)) & exponent;
        nonfinite |= _mm256_cmpeq_epi32(bits, exponent);
    }
    return _mm256_testz_si256(nonfinite, nonfinite) == 0;
}

// Transposes the 8 x 8 matrix in r.
inline void transpose(__m256 r[LANES]) {
    __m256 t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < LANES / 2; ++i) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < LANES; ++i) r[i] = t[i];
}

}  // namespace headstart
