// Products of float32 rows with a weight in bf16, for CPUs with AVX2.
//
// Few rows wait for memory, so reading 2 bytes for each number of the weight instead of 4 takes half
// of their time; the arithmetic is float32's.
//
// A row's sum for an output has an order of its own: two sums of 8 lanes each, whatever the number of
// rows and threads.
#include "../native.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#pragma GCC target("avx2,fma")

#include "digits.h"

namespace {

constexpr int64_t STEP = 16;       // inputs
constexpr int64_t TILE = 1 << 16;  // bytes of the weight that stay in the second cache
constexpr int MOST = 4;            // rows whose sums fit in registers, with their weights

struct Numbers {
    __m256 first, second;
};

// A bf16 number is the upper half of a float: of two neighbours in a 32-bit lane, one is the lane
// shifted up, and one is the lane with its lower half cleared. So the first 8 numbers of a step are
// those of even place, and no number is moved between lanes.
constexpr int64_t place(int64_t k) { return k < 8 ? 2 * k : 2 * (k - 8) + 1; }
inline Numbers load(const uint16_t* from) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
}

// A weight [outputs, inputs]; the bias [outputs] may be null.
struct Weight {
    const uint16_t* numbers;
    const float* bias;
    int64_t outputs;
    int64_t inputs;

    const uint16_t* row(int64_t output) const { return numbers + output * inputs; }
    float finish(int64_t output, float total) const {
        return bias == nullptr ? total : total + bias[output];
    }
};

// OUTPUTS rows of the weight, from `output` on, times ROWS rows in `steps` steps each. The last
// step of the weight, if it is not a whole one, comes from `tail`.
template <int OUTPUTS, int ROWS>
void multiply(const Weight& weight, int64_t output, const uint16_t* tail, const float* rows,
              int64_t steps, float* out) {
    __m256 first[OUTPUTS][ROWS], second[OUTPUTS][ROWS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++) first[o][r] = second[o][r] = _mm256_setzero_ps();
    const auto step = [&](int64_t at, int o, const uint16_t* from) __attribute__((always_inline)) {
        const Numbers numbers = load(from);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const float* x = rows + (r * steps + at) * STEP;
            first[o][r] = _mm256_fmadd_ps(numbers.first, _mm256_loadu_ps(x), first[o][r]);
            second[o][r] = _mm256_fmadd_ps(numbers.second, _mm256_loadu_ps(x + 8), second[o][r]);
        }
    };
    const int64_t whole = weight.inputs / STEP;
    const uint16_t* from = weight.row(output);
    // Rows of a weight are short: the hardware would find each anew. So the next rows are fetched
    // while these are multiplied.
    const int64_t ahead = OUTPUTS * weight.inputs;
    for (int64_t at = 0; at < whole; at++)
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) {
            const uint16_t* now = from + o * weight.inputs + at * STEP;
            _mm_prefetch(reinterpret_cast<const char*>(now + ahead), _MM_HINT_T0);
            step(at, o, now);
        }
    if (whole < steps)
        for (int o = 0; o < OUTPUTS; o++) step(whole, o, tail + o * STEP);
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++)
            out[r * weight.outputs + o] =
                weight.finish(output + o, headstart::total(_mm256_add_ps(first[o][r], second[o][r])));
}

using Multiply = void (*)(const Weight&, int64_t, const uint16_t*, const float*, int64_t, float*);

// Outputs together, by the number of rows: sums and weights fit in 16 registers.
constexpr int TOGETHER[] = {4, 2, 2, 1};
constexpr Multiply ONE_OUTPUT[] = {multiply<1, 1>, multiply<1, 2>, multiply<1, 3>, multiply<1, 4>};
constexpr Multiply MORE_OUTPUTS[] = {multiply<4, 1>, multiply<2, 2>, multiply<2, 3>,
                                     multiply<1, 4>};

// The rows in steps of 16 inputs, in the order of the weight's lanes; zeros at their ends.
std::unique_ptr<float[]> split(const float* x, int64_t rows, int64_t inputs, int64_t steps) {
    std::unique_ptr<float[]> out(new float[rows * steps * STEP]());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t k = 0; k < STEP; k++) {
                const int64_t input = step * STEP + place(k);
                if (input < inputs) out[(r * steps + step) * STEP + k] = x[r * inputs + input];
            }
    return out;
}

}  // namespace

extern "C" {

// out float [rows, outputs] = x float [rows, inputs] times weight bf16 [outputs, inputs], plus
// bias float [outputs] or null; all contiguous.
void headstart_half_linear(const uint16_t* numbers, const float* bias, int64_t outputs,
                           int64_t inputs, const float* x, int64_t rows, float* out, int threads) {
    const Weight weight{numbers, bias, outputs, inputs};
    const int64_t steps = (inputs + STEP - 1) / STEP;
    const auto splits = split(x, rows, inputs, steps);
    const int64_t tile = std::max<int64_t>(4, TILE / (2 * inputs) / 4 * 4);
    headstart::parallel(threads, [&](int thread, int all) {
        const int64_t end = outputs * (thread + 1) / all;
        for (int64_t from = outputs * thread / all; from < end; from += tile) {
            const int64_t to = std::min(end, from + tile);
            for (int64_t row = 0; row < rows; row += MOST) {
                const int kind = static_cast<int>(std::min<int64_t>(MOST, rows - row)) - 1;
                for (int64_t o = from; o < to;) {
                    const bool one = to - o < TOGETHER[kind];
                    const int count = one ? 1 : TOGETHER[kind];
                    uint16_t tail[4 * STEP] = {};
                    for (int t = 0; t < count; t++)
                        std::memcpy(tail + t * STEP, weight.row(o + t) + inputs / STEP * STEP,
                                    2 * (inputs % STEP));
                    (one ? ONE_OUTPUT : MORE_OUTPUTS)[kind](weight, o, tail,
                                                            splits.get() + row * steps * STEP,
                                                            steps, out + row * outputs + o);
                    o += count;
                }
            }
        }
    });
}

}  // extern "C"
