// Products of float32 rows with a weight in int8, for CPUs with AVX2.
//
// A row becomes whole numbers of 15 bits, of fewer where a lane's sum would not fit into 32: of 13 for
// 16,384 inputs. They are faster than floats for any number of rows: 16 products take two
// instructions, and 16 weights one to widen them. A row's sum for an output is 8 exact sums that are
// added in one order, so a row has the same bits alone, in any batch and on any number of threads.
#include "../native.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#pragma GCC target("avx2,fma")

#include "digits.h"

using namespace headstart;

namespace {

constexpr int64_t STEP = 16;        // inputs
constexpr int64_t TILE = 1 << 16;   // bytes of the weight that stay in the second cache
constexpr int64_t MOST_ROWS = 64;   // that stay there with them
constexpr int64_t MOST_WEIGHT = 127;
constexpr int TOGETHER = 4;         // outputs, and rows, whose sums are taken together at most

// Rows as whole numbers, in whole steps; zeros at their ends.
struct Rows {
    int64_t steps;
    int64_t top;
    std::unique_ptr<int16_t[]> numbers;
    std::unique_ptr<float[]> scales;

    Rows(int64_t rows, int64_t inputs)
        : steps((inputs + STEP - 1) / STEP),
          // A lane sums two products a step.
          top(std::min<int64_t>(32767, (int64_t{1} << 31) / (2 * MOST_WEIGHT * steps) - 1)),
          numbers(new int16_t[rows * steps * STEP]),
          scales(new float[rows]) {}

    const int16_t* row(int64_t at) const { return numbers.get() + at * steps * STEP; }

    void fill(int64_t row, const float* x, int64_t inputs) {
        float end[STEP] = {};
        const int64_t whole = inputs / STEP * STEP;
        std::memcpy(end, x + whole, (inputs - whole) * sizeof(float));
        __m256i most = _mm256_setzero_si256();
        const auto read = [&](int64_t k) { return k < whole ? x + k : end; };
        for (int64_t k = 0; k < steps * STEP; k += STEP)
            for (int half = 0; half < 16; half += 8)
                most = _mm256_max_epi32(most, magnitude(_mm256_loadu_ps(read(k) + half)));
        const Grid grid(largest(most), static_cast<float>(top));
        scales[row] = grid.step;
        int16_t* out = numbers.get() + row * steps * STEP;
        for (int64_t k = 0; k < steps * STEP; k += STEP) {
            const __m256i pairs = _mm256_packs_epi32(round(read(k), grid.inverse),
                                                     round(read(k) + 8, grid.inverse));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k),
                                _mm256_permute4x64_epi64(pairs, 0xd8));
        }
    }
};

struct Weight {
    const int8_t* numbers;
    int64_t inputs;
};

// OUTPUTS rows of the weight, the first at `weight`, times ROWS rows: sums[row][output]. The last
// step of the weight, if it is not a whole one, comes from `tail`.
template <int OUTPUTS, int ROWS>
void multiply(Weight weight, const int8_t* tail, const int16_t* rows, int64_t steps,
              float (*sums)[TOGETHER]) {
    __m256i sum[OUTPUTS][ROWS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++) sum[o][r] = _mm256_setzero_si256();
    const auto step = [&](int64_t at, int o, const int8_t* from) __attribute__((always_inline)) {
        const __m256i wide =
            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const auto* x = reinterpret_cast<const __m256i*>(rows + (r * steps + at) * STEP);
            sum[o][r] = _mm256_add_epi32(sum[o][r],
                                         _mm256_madd_epi16(wide, _mm256_loadu_si256(x)));
        }
    };
    // The next rows of the weight are fetched while these are multiplied: they are too short for
    // the hardware to see.
    const int64_t whole = weight.inputs / STEP, ahead = OUTPUTS * weight.inputs;
    for (int64_t at = 0; at < whole; at++)
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) {
            const int8_t* now = weight.numbers + o * weight.inputs + at * STEP;
            _mm_prefetch(reinterpret_cast<const char*>(now + ahead), _MM_HINT_T0);
            step(at, o, now);
        }
    if (whole < steps)
        for (int o = 0; o < OUTPUTS; o++) step(whole, o, tail + o * STEP);
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++) sums[r][o] = total(_mm256_cvtepi32_ps(sum[o][r]));
}

using Multiply = void (*)(Weight, const int8_t*, const int16_t*, int64_t, float (*)[TOGETHER]);

// By the number of rows: sums and weights fit in 16 registers.
constexpr int OUTPUTS[] = {4, 4, 2, 2};
constexpr Multiply ONE_OUTPUT[] = {multiply<1, 1>, multiply<1, 2>, multiply<1, 3>, multiply<1, 4>};
constexpr Multiply MORE_OUTPUTS[] = {multiply<4, 1>, multiply<4, 2>, multiply<2, 3>,
                                     multiply<2, 4>};

}  // namespace

extern "C" {

// out float [rows, outputs] = x float [rows, inputs] times weight int8 [outputs, inputs] times scales
// float [outputs]; all contiguous. Weights lie in -127 .. 127.
void headstart_int8_linear(const int8_t* weight, const float* scales, int64_t outputs,
                           int64_t inputs, const float* x, int64_t rows, float* out, int threads) {
    Rows numbers(rows, inputs);
    parallel(rows < MOST_ROWS ? 1 : threads, [&](int thread, int all) {
        for (int64_t r = rows * thread / all; r < rows * (thread + 1) / all; r++)
            numbers.fill(r, x + r * inputs, inputs);
    });
    const int64_t tile = std::max<int64_t>(TOGETHER, TILE / inputs / TOGETHER * TOGETHER);
    const auto multiply_some = [&](int64_t row, int64_t count, int64_t from, int64_t to) {
        for (int64_t o = from; o < to;) {
            const int together = to - o < OUTPUTS[count - 1] ? 1 : OUTPUTS[count - 1];
            int8_t tail[TOGETHER * STEP] = {};
            for (int t = 0; t < together; t++)
                std::memcpy(tail + t * STEP, weight + (o + t) * inputs + inputs / STEP * STEP,
                            inputs % STEP);
            float sums[TOGETHER][TOGETHER];
            (together == 1 ? ONE_OUTPUT : MORE_OUTPUTS)[count - 1](
                {weight + o * inputs, inputs}, tail, numbers.row(row), numbers.steps, sums);
            for (int64_t r = 0; r < count; r++)
                for (int t = 0; t < together; t++)
                    out[(row + r) * outputs + o + t] =
                        sums[r][t] * (scales[o + t] * numbers.scales[row + r]);
            o += together;
        }
    };
    parallel(threads, [&](int thread, int all) {
        const int64_t begin = outputs * thread / all, end = outputs * (thread + 1) / all;
        for (int64_t block = 0; block < rows; block += MOST_ROWS)
            for (int64_t from = begin; from < end; from += tile)
                for (int64_t row = block; row < std::min(rows, block + MOST_ROWS); row += TOGETHER)
                    multiply_some(row,
                                  std::min<int64_t>(TOGETHER, std::min(rows, block + MOST_ROWS) - row),
                                  from, std::min(end, from + tile));
    });
}

}  // extern "C"
