// Products of float32 rows with a bfloat16 weight, for CPUs with AVX2 and without products of bf16.
//
// Few rows wait for memory, so reading 2 bytes for each number of the weight instead of 4 halves
// their time; the arithmetic is float32's. A bf16 number is the upper half of a float: of two
// neighbours in a 32-bit lane, one is the lane shifted up, and one is the lane with its lower half
// cleared. So the rows are split once into numbers of even and of odd place, and no weight is ever
// moved between lanes.
//
// A row's sum for an output has an order of its own: two sums of 8 lanes, of even and odd places,
// whatever the number of rows and threads.
#include "native.h"

#include <algorithm>
#include <cstring>
#include <memory>

#pragma GCC target("avx2,fma")

namespace {

constexpr int64_t STEP = 16;     // inputs
constexpr int64_t TILE = 1 << 15;  // numbers of the weight that stay in the second cache
constexpr int MOST = 4;          // rows whose sums fit in registers, with their weights

inline __m256 upper(__m256i pairs) {  // numbers of odd place
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

inline __m256 lower(__m256i pairs) {  // numbers of even place
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

inline float sum(__m256 even, __m256 odd) {
    const __m256 all = _mm256_add_ps(even, odd);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// OUTPUTS rows of the weight times ROWS split rows, `steps` steps each; the last step of the
// weight, if it is not a whole one, comes from `tail`.
template <int OUTPUTS, int ROWS>
void multiply(const uint16_t* weight, int64_t inputs, const uint16_t* tail, const float* rows,
              int64_t steps, const float* bias, float* out, int64_t outputs) {
    __m256 even[OUTPUTS][ROWS], odd[OUTPUTS][ROWS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++) even[o][r] = odd[o][r] = _mm256_setzero_ps();
    const auto step = [&](int64_t at, int o, const uint16_t* from) __attribute__((always_inline)) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256 low = lower(pairs), high = upper(pairs);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const float* x = rows + (r * steps + at) * STEP;
            even[o][r] = _mm256_fmadd_ps(low, _mm256_loadu_ps(x), even[o][r]);
            odd[o][r] = _mm256_fmadd_ps(high, _mm256_loadu_ps(x + 8), odd[o][r]);
        }
    };
    const int64_t whole = inputs / STEP;
    for (int64_t at = 0; at < whole; at++)
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) step(at, o, weight + o * inputs + at * STEP);
    if (whole < steps)
        for (int o = 0; o < OUTPUTS; o++) step(whole, o, tail + o * STEP);
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++)
            out[r * outputs + o] = sum(even[o][r], odd[o][r]) + (bias == nullptr ? 0 : bias[o]);
}

using Multiply = void (*)(const uint16_t*, int64_t, const uint16_t*, const float*, int64_t,
                          const float*, float*, int64_t);

// Outputs together, by the number of rows: sums and weights fit in 16 registers.
constexpr Multiply ONE_OUTPUT[] = {multiply<1, 1>, multiply<1, 2>, multiply<1, 3>, multiply<1, 4>};
constexpr Multiply MORE_OUTPUTS[] = {multiply<4, 1>, multiply<2, 2>, multiply<2, 3>,
                                     multiply<1, 4>};
constexpr int TOGETHER[] = {4, 2, 2, 1};

// Splits a row of inputs into steps of 8 numbers of even and 8 of odd place; zeros at its end.
void split(const float* row, int64_t inputs, int64_t steps, float* out) {
    for (int64_t k = 0; k < steps * STEP; k++) {
        const int64_t place = k / STEP * STEP + (k % STEP < 8 ? 2 * (k % 8) : 2 * (k % 8) + 1);
        out[k] = place < inputs ? row[place] : 0;
    }
}

}  // namespace

extern "C" {

// out float [rows, outputs] = x float [rows, inputs] times weight bf16 [outputs, inputs], plus
// bias float [outputs] or null; all contiguous.
void headstart_half_linear(const uint16_t* weight, const float* bias, int64_t outputs,
                           int64_t inputs, const float* x, int64_t rows, float* out, int threads) {
    const int64_t steps = (inputs + STEP - 1) / STEP;
    const std::unique_ptr<float[]> splits(new float[rows * steps * STEP]);
    for (int64_t r = 0; r < rows; r++)
        split(x + r * inputs, inputs, steps, splits.get() + r * steps * STEP);
    const int64_t tile = std::max<int64_t>(4, TILE / inputs / 4 * 4);
    headstart::parallel(threads, [&](int thread, int all) {
        const int64_t end = outputs * (thread + 1) / all;
        for (int64_t from = outputs * thread / all; from < end; from += tile) {
            const int64_t to = std::min(end, from + tile);
            for (int64_t first = 0; first < rows; first += MOST) {
                const int kind = static_cast<int>(std::min<int64_t>(MOST, rows - first)) - 1;
                for (int64_t o = from; o < to;) {
                    const bool one = to - o < TOGETHER[kind];
                    const int count = one ? 1 : TOGETHER[kind];
                    uint16_t tail[4 * STEP] = {};
                    for (int t = 0; t < count; t++)
                        std::memcpy(tail + t * STEP, weight + (o + t) * inputs + inputs / STEP * STEP,
                                    inputs % STEP * sizeof(uint16_t));
                    (one ? ONE_OUTPUT : MORE_OUTPUTS)[kind](
                        weight + o * inputs, inputs, tail, splits.get() + first * steps * STEP,
                        steps, bias == nullptr ? nullptr : bias + o, out + first * outputs + o,
                        outputs);
                    o += count;
                }
            }
        }
    });
}

}  // extern "C"
