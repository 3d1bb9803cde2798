// Products of float32 rows with a bf16 weight, stored row by row, for CPUs with AVX2.
//
// With few rows a product is limited by memory, so reading 2 bytes per number of the weight instead
// of 4 takes half the time. Arithmetic is in float32. Each sum is computed in 8 lanes that are
// added at the end, in the same order for any number of rows and threads.
#include "../weight.h"

#pragma GCC target("avx2,fma")

#include "digits.h"

using namespace headstart;

namespace {

constexpr int64_t STEP = 16;        // inputs
constexpr int64_t TILE = 1 << 16;   // bytes of the weight that fit in the L2 cache
constexpr int64_t WHOLE = 12;       // outputs; a tile has a multiple of this, and so of 1 to 4
constexpr int64_t MOST_ROWS = 64;   // rows that fit there too
constexpr int TOGETHER = 4;         // most outputs, and most rows, that are summed at the same time
constexpr size_t LONG_ROW = 12288;  // bytes; four longer rows do not fit in the L1 cache

// Outputs that are summed at the same time, for 1 to 4 rows, so that sums, weights and a vector of
// a row fit in 16 registers.
constexpr int OUTPUTS_OF[] = {4, 4, 3, 2};

inline int64_t steps_of(int64_t inputs) { return (inputs + STEP - 1) / STEP; }

// A bf16 number is the upper half of a float. Of the two numbers in a 32-bit lane, the first is the
// lane shifted left, and the second is the lane with its lower half cleared. `half` chooses the
// first or the second numbers, and no number is moved between lanes.
inline __m256 load(const bf16* from, int half) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_castsi256_ps(half == 0 ? _mm256_slli_epi32(pairs, 16)
                                         : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

// Copies rows in steps of 16 inputs, in the order of the weight's lanes, padded with zeros.
const float* split(const float* x, int64_t rows, int64_t inputs) {
    static thread_local Scratch memory;
    const int64_t width = steps_of(inputs) * STEP, whole = inputs / STEP * STEP;
    float* const out = memory.take<float>(rows * width);
    float* to = out;
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        float end[STEP] = {};
        std::memcpy(end, x + whole, (inputs - whole) * sizeof(float));
        for (int64_t k = 0; k < width; k += STEP, to += STEP) {
            const float* from = k < whole ? x + k : end;
            for (int i = 0; i < STEP / 2; i++) to[i] = from[2 * i], to[8 + i] = from[2 * i + 1];
        }
    }
    return out;
}

// sums[row][output] = ROWS rows times OUTPUTS rows of the weight, from `weight` on. An incomplete
// last step of the weight is copied, since the next row follows it in memory.
template <int OUTPUTS, int ROWS>
void multiply(const bf16* weight, int64_t inputs, const float* rows, float (*sums)[TOGETHER],
              int64_t ahead) {
    const int64_t whole = inputs / STEP, steps = steps_of(inputs);
    __m256 sum[OUTPUTS][ROWS] = {};
    const auto step = [&](int64_t at, const bf16* from,
                          int64_t next) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256 weights[OUTPUTS];
#pragma GCC unroll 4
            for (int o = 0; o < OUTPUTS; o++) weights[o] = load(from + o * next, half);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                __m256 row = _mm256_load_ps(rows + (r * steps + at) * STEP + 8 * half);
                asm("" : "+x"(row));  // keep it in a register, or every product loads it again
#pragma GCC unroll 4
                for (int o = 0; o < OUTPUTS; o++)
                    sum[o][r] = _mm256_fmadd_ps(weights[o], row, sum[o][r]);
            }
        }
    };
    // Rows of a weight are too short for the hardware prefetcher. So the numbers `ahead` further on
    // are prefetched into the L2 cache, which can wait for more lines than the L1 cache.
    for (int64_t at = 0; at < whole; at++) {
        const bf16* now = weight + at * STEP;
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++)
            _mm_prefetch(reinterpret_cast<const char*>(now + o * inputs + ahead), _MM_HINT_T1);
        step(at, now, inputs);
    }
    if (whole < steps) {
        bf16 tails[OUTPUTS][STEP] = {};
        for (int o = 0; o < OUTPUTS; o++)
            std::memcpy(tails[o], weight + o * inputs + whole * STEP, inputs % STEP * sizeof(bf16));
        step(whole, tails[0], STEP);
    }
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[r][o] = total(sum[o][r]);
}

}  // namespace

void headstart::multiply_half(const Product* products, int count, const float* x, int64_t rows,
                              int threads) {
    const int64_t inputs = products->weight->inputs;
    const float* splits = split(x, rows, inputs);
    const auto multiply_some = [&](const Product& product, int64_t row, auto height, int64_t from,
                                   int64_t to, int64_t ahead) {
        const int64_t outputs = product.weight->outputs;
        const auto* numbers = static_cast<const bf16*>(product.weight->panels);
        constexpr int ROWS = height.value, OUTPUTS = OUTPUTS_OF[ROWS - 1];
        for (int64_t output = from; output < to;) {
            const int some = to - output < OUTPUTS ? 1 : OUTPUTS;
            float sums[ROWS][TOGETHER];
            (some == 1 ? multiply<1, ROWS>
                       : multiply<OUTPUTS, ROWS>)(numbers + output * inputs, inputs,
                                                  splits + row * steps_of(inputs) * STEP, sums,
                                                  ahead * inputs);
            for (int r = 0; r < ROWS; r++)
                std::memcpy(product.out + (row + r) * outputs + output, sums[r],
                            some * sizeof(float));
            output += some;
        }
    };
    const int64_t width = inputs * sizeof(bf16);
    const int64_t tall = inputs * sizeof(float) > LONG_ROW ? TOGETHER / 2 : TOGETHER;
    const int64_t tile = std::max<int64_t>(WHOLE, TILE / width / WHOLE * WHOLE);
    const auto multiply_part = [&](const Product& product, int64_t begin, int64_t end) {
        for (int64_t block = 0; block < rows; block += MOST_ROWS)
            for (int64_t from = begin; from < end; from += tile) {
                const int64_t last = std::min(rows, block + MOST_ROWS);
                for (int64_t row = block; row < last; row += tall)
                    with_count<TOGETHER>(std::min(tall, last - row), [&](auto height) {
                        multiply_some(product, row, height, from, std::min(end, from + tile),
                                      row == block ? TOGETHER : tile);
                    });
            }
    };
    parallel(threads, [&](int thread, int all) {
        for (const Product* p = products; p < products + count; p++) {
            const int64_t outputs = p->weight->outputs;
            multiply_part(*p, outputs * thread / all, outputs * (thread + 1) / all);
        }
    });
}
