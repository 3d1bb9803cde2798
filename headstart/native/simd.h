// Small AVX-512 functions that several kernels use.
#pragma once

#include "native.h"

namespace headstart {

// 2^x for x below 128, with a relative error of 4e-6; 0 below -150.
// 2^x = 2^n * 2^f with n the nearest integer. A minimax polynomial on [-0.5, 0.5] gives 2^f.
inline __m512 power(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = x - n;
    __m512 y = _mm512_set1_ps(9.5788297e-3f);
#pragma GCC unroll 4
    for (const float term : {5.5907100e-2f, 2.4023619e-1f, 6.9313675e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(term));
    return _mm512_scalef_ps(y, n);
}

// Lane i becomes the bf16 pair (even[i], odd[i]), rounded to nearest.
inline __m512i pair_bf16(__m512 even, __m512 odd) {
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    return _mm512_permutexvar_epi16(interleave, halves);
}

// Transposes the 16 x 16 matrix of 32-bit numbers in r.
inline void transpose16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

inline __mmask16 first_lanes(int64_t count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
}

inline __mmask32 first_halves(int64_t count) {
    return count >= 32 ? 0xffffffffu : (1u << count) - 1;
}

inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m256i narrow(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

// Floats rounded to bf16 and widened again.
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

// Loads `count` numbers, at most 16; uses no mask for 16.
inline __m512 load(const bf16* from, int64_t count) {
    if (count >= 16) return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return widen(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}

inline void store(bf16* to, int64_t count, __m512 x) {
    if (count >= 16) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x));
    _mm256_mask_storeu_epi16(to, first_lanes(count), narrow(x));
}

// Loads up to 32 numbers unconverted, as pairs.
inline __m512i load_pairs(const bf16* from, int64_t count) {
    if (count >= 32) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16(first_halves(count), from);
}

inline void store_pairs(bf16* to, int64_t count, __m512i pairs) {
    if (count >= 32) return _mm512_storeu_si512(to, pairs);
    _mm512_mask_storeu_epi16(to, first_halves(count), pairs);
}

// The first and the second number of each pair; the inverse of pair_bf16().
struct Halves {
    __m512 even, odd;

    explicit Halves(__m512i pairs)
        : even(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))),
          odd(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))) {}
};

}  // namespace headstart
