// Products of float32 rows with weights in 8 bits on CPUs with AMX, as integers.
//
// A row is split into two digits of 8 bits, which are two rows of the product:
//
//     x  ~  top / 127 * (high + low / 254)        high, low: whole numbers, -127 .. 127
//
// Weights lie in panels as in linear.h, with four integers of an output in the place of a pair. Sums
// of integers are exact.
#include "../avx512.h"

#include "../linear.h"

using namespace headstart;

namespace {

constexpr float LEVELS = 127.0f;
constexpr float TINY = 1e-30f;  // an all-zero row has no scale

// Writes a row's digits, `width` bytes each; returns what a product of `high` is multiplied by, or
// NaN if the row is not finite.
float split(const float* x, int64_t inputs, int8_t* high, int8_t* low, int64_t width) {
    __m512 most = _mm512_set1_ps(TINY);
    uint32_t odd = 0;
    const auto at = [&](int64_t i) { return _mm512_maskz_loadu_ps(first_lanes(inputs - i), x + i); };
    for (int64_t i = 0; i < inputs; i += 16) {
        const __m512 v = at(i);
        odd |= _mm512_cmp_ps_mask(v - v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
    }
    const float top = _mm512_reduce_max_ps(most);
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 v = at(i) * (LEVELS / top);
        const __m512i whole = _mm512_cvtps_epi32(v);
        const __m512i rest = _mm512_cvtps_epi32((v - _mm512_cvtepi32_ps(whole)) * (2 * LEVELS));
        const __mmask16 there = first_lanes(width - i);
        _mm512_mask_cvtsepi32_storeu_epi8(high + i, there, whole);
        _mm512_mask_cvtsepi32_storeu_epi8(low + i, there, rest);
    }
    return odd != 0 ? std::numeric_limits<float>::quiet_NaN() : top / LEVELS;
}

}  // namespace

extern "C" {

// out float32 [count, outputs] = rows float32 [count, inputs] times the weight: int8 panels, and
// scales [outputs].
void headstart_int8_linear_amx(const uint32_t* panels, const float* scales, int64_t outputs,
                               int64_t inputs, const float* rows, int64_t count, float* out,
                               int threads) {
    static thread_local Scratch digit_memory, unit_memory;
    const int64_t quads = (inputs + 3) / 4, width = 4 * quads;
    const Weight weight{panels, nullptr, 2 * quads, outputs};
    int8_t* digits = digit_memory.take<int8_t>(2 * count * width);
    float* units = unit_memory.take<float>(count);
    Stages stages;
    parallel(threads, [&](int thread, int all) {
        for (int64_t r = count * thread / all; r < count * (thread + 1) / all; r++) {
            int8_t* high = digits + 2 * r * width;
            units[r] = split(rows + r * inputs, inputs, high, high + width, width);
        }
        stages.finish(all);
        multiply<1, 2>(
            2 * count, weight.inputs, weight.count(), all, stages,
            [&](int64_t row, int, int64_t* stride) {
                *stride = weight.inputs;
                return reinterpret_cast<const bf16*>(digits + row * width);
            },
            [&](int64_t group, int) { return weight.panel(group); },
            [&](int64_t group, int64_t row, int64_t two, const float* sums) {
                for (int64_t at = group * PANEL; at < std::min(outputs, (group + 1) * PANEL); at += 16)
                    for (int64_t r = 0; r < two; r += 2) {
                        const float* from = sums + r * PANEL + at % PANEL;
                        const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(from));
                        const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(from + PANEL));
                        const __m512 x = _mm512_fmadd_ps(low, _mm512_set1_ps(0.5f / LEVELS), high);
                        const int64_t number = (row + r) / 2;
                        const __mmask16 there = first_lanes(outputs - at);
                        const __m512 scale = _mm512_maskz_loadu_ps(there, scales + at);
                        _mm512_mask_storeu_ps(out + number * outputs + at, there,
                                              x * (scale * units[number]));
                    }
            },
            amx_int8_products);
    });
}

}  // extern "C"
