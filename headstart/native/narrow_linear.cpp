// Products of float32 rows with a weight of 16 or 8 bits, for CPUs with AVX2.
//
// Few rows wait for memory, so reading 2 bytes or 1 for each number of the weight instead of 4 takes
// a half or a quarter of their time; the arithmetic is float32's.
//
// A row's sum for an output has an order of its own: two sums of 8 lanes each, whatever the number of
// rows and threads.
#include "native.h"

#include <algorithm>
#include <cstring>
#include <memory>

#pragma GCC target("avx2,fma")

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
struct Bf16 {
    using Number = uint16_t;
    static constexpr int64_t place(int64_t k) { return k < 8 ? 2 * k : 2 * (k - 8) + 1; }
    static Numbers load(const uint16_t* from) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
    }
};

struct Int8 {
    using Number = int8_t;
    static constexpr int64_t place(int64_t k) { return k; }
    static Numbers load(const int8_t* from) {
        const auto* halves = reinterpret_cast<const __m128i*>(from);
        const auto* upper = reinterpret_cast<const __m128i*>(from + 8);
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(halves))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(upper)))};
    }
};

inline float sum(__m256 first, __m256 second) {
    const __m256 all = _mm256_add_ps(first, second);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// A weight [outputs, inputs]; scales or bias [outputs] may be null.
template <class Kind>
struct Weight {
    const typename Kind::Number* numbers;
    const float* scales;
    const float* bias;
    int64_t outputs;
    int64_t inputs;

    const typename Kind::Number* row(int64_t output) const { return numbers + output * inputs; }
    float finish(int64_t output, float total) const {
        if (scales != nullptr) total *= scales[output];
        return bias == nullptr ? total : total + bias[output];
    }
};

// OUTPUTS rows of the weight, from `output` on, times ROWS rows in `steps` steps each. The last
// step of the weight, if it is not a whole one, comes from `tail`.
template <class Kind, int OUTPUTS, int ROWS>
void multiply(const Weight<Kind>& weight, int64_t output, const typename Kind::Number* tail,
              const float* rows, int64_t steps, float* out) {
    __m256 first[OUTPUTS][ROWS], second[OUTPUTS][ROWS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++) first[o][r] = second[o][r] = _mm256_setzero_ps();
    const auto step = [&](int64_t at, int o, const typename Kind::Number* from)
                          __attribute__((always_inline)) {
        const Numbers numbers = Kind::load(from);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const float* x = rows + (r * steps + at) * STEP;
            first[o][r] = _mm256_fmadd_ps(numbers.first, _mm256_loadu_ps(x), first[o][r]);
            second[o][r] = _mm256_fmadd_ps(numbers.second, _mm256_loadu_ps(x + 8), second[o][r]);
        }
    };
    const int64_t whole = weight.inputs / STEP;
    const auto* from = weight.row(output);
    // Rows of a weight are short: the hardware would find each anew. So the next rows are fetched
    // while these are multiplied.
    const int64_t ahead = OUTPUTS * weight.inputs;
    for (int64_t at = 0; at < whole; at++)
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++) {
            const auto* now = from + o * weight.inputs + at * STEP;
            _mm_prefetch(reinterpret_cast<const char*>(now + ahead), _MM_HINT_T0);
            step(at, o, now);
        }
    if (whole < steps)
        for (int o = 0; o < OUTPUTS; o++) step(whole, o, tail + o * STEP);
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < ROWS; r++)
            out[r * weight.outputs + o] =
                weight.finish(output + o, sum(first[o][r], second[o][r]));
}

template <class Kind>
using Multiply = void (*)(const Weight<Kind>&, int64_t, const typename Kind::Number*, const float*,
                          int64_t, float*);

// Outputs together, by the number of rows: sums and weights fit in 16 registers.
constexpr int TOGETHER[] = {4, 2, 2, 1};
template <class Kind>
constexpr Multiply<Kind> ONE_OUTPUT[] = {multiply<Kind, 1, 1>, multiply<Kind, 1, 2>,
                                         multiply<Kind, 1, 3>, multiply<Kind, 1, 4>};
template <class Kind>
constexpr Multiply<Kind> MORE_OUTPUTS[] = {multiply<Kind, 4, 1>, multiply<Kind, 2, 2>,
                                           multiply<Kind, 2, 3>, multiply<Kind, 1, 4>};

// The rows in steps of 16 inputs, in the order of the weight's lanes; zeros at their ends.
template <class Kind>
std::unique_ptr<float[]> split(const float* x, int64_t rows, int64_t inputs, int64_t steps) {
    std::unique_ptr<float[]> out(new float[rows * steps * STEP]());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t k = 0; k < STEP; k++) {
                const int64_t place = step * STEP + Kind::place(k);
                if (place < inputs)
                    out[(r * steps + step) * STEP + k] = x[r * inputs + place];
            }
    return out;
}

template <class Kind>
void multiply_rows(const Weight<Kind>& weight, const float* x, int64_t rows, float* out,
                   int threads) {
    using Number = typename Kind::Number;
    const int64_t inputs = weight.inputs, steps = (inputs + STEP - 1) / STEP;
    const auto splits = split<Kind>(x, rows, inputs, steps);
    const int64_t bytes = inputs * static_cast<int64_t>(sizeof(Number));
    const int64_t tile = std::max<int64_t>(4, TILE / bytes / 4 * 4);
    headstart::parallel(threads, [&](int thread, int all) {
        const int64_t end = weight.outputs * (thread + 1) / all;
        for (int64_t from = weight.outputs * thread / all; from < end; from += tile) {
            const int64_t to = std::min(end, from + tile);
            for (int64_t row = 0; row < rows; row += MOST) {
                const int kind = static_cast<int>(std::min<int64_t>(MOST, rows - row)) - 1;
                for (int64_t o = from; o < to;) {
                    const bool one = to - o < TOGETHER[kind];
                    const int count = one ? 1 : TOGETHER[kind];
                    Number tail[4 * STEP] = {};
                    for (int t = 0; t < count; t++)
                        std::memcpy(tail + t * STEP, weight.row(o + t) + inputs / STEP * STEP,
                                    inputs % STEP * sizeof(Number));
                    (one ? ONE_OUTPUT<Kind> : MORE_OUTPUTS<Kind>)[kind](
                        weight, o, tail, splits.get() + row * steps * STEP, steps,
                        out + row * weight.outputs + o);
                    o += count;
                }
            }
        }
    });
}

}  // namespace

extern "C" {

// out float [rows, outputs] = x float [rows, inputs] times weight bf16 [outputs, inputs], plus
// bias float [outputs] or null; all contiguous.
void headstart_half_linear(const uint16_t* weight, const float* bias, int64_t outputs,
                           int64_t inputs, const float* x, int64_t rows, float* out, int threads) {
    multiply_rows(Weight<Bf16>{weight, nullptr, bias, outputs, inputs}, x, rows, out, threads);
}

// The same for a weight int8 [outputs, inputs] times scales float [outputs], without a bias.
void headstart_int8_linear(const int8_t* weight, const float* scales, int64_t outputs,
                           int64_t inputs, const float* x, int64_t rows, float* out, int threads) {
    multiply_rows(Weight<Int8>{weight, scales, nullptr, outputs, inputs}, x, rows, out, threads);
}

}  // extern "C"
