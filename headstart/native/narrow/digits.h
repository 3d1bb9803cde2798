// Small AVX2 functions for rounding rows to integers; include it after the pragma.
#pragma once

namespace headstart {

// The largest of 8 integers.
inline int32_t largest(__m256i x) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}

// The sum of 8 numbers.
inline int32_t total(__m256i x) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

inline float total(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// The bits of |x|. As integers they have the order of |x|, with infinity and then NaN last.
inline __m256i magnitude(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

// x ~ step * integer, integer = round(x * inverse). `most` has the bits of the largest |x|, which
// is rounded to `top`. If x is not finite the step is NaN, and so is any product.
struct Grid {
    float step, inverse;

    Grid(int32_t most, float top) {
        constexpr float TINY = 1e-30f;  // its inverse is finite
        float value;
        std::memcpy(&value, &most, sizeof value);
        step = std::isfinite(value) ? value / top : std::numeric_limits<float>::quiet_NaN();
        inverse = std::isfinite(value) && value > TINY ? top / value : 0.0f;
    }
};

// 8 floats as integers of a grid.
inline __m256i round(const float* x, float inverse) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(inverse)));
}

}  // namespace headstart
