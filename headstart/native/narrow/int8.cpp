// Products of float32 rows with a weight in int8, for CPUs with AVX2.
//
// A row becomes whole numbers of 15 bits, of fewer where a lane's sum would not fit into 32: of 13 for
// 16,384 inputs. They are faster than floats for any number of rows: 16 products take two
// instructions, and 16 weights one to widen them. A row's sum for an output is 8 exact sums that are
// added in one order, so a row has the same bits alone, in any batch and on any number of threads.
#include "../weight.h"

#pragma GCC target("avx2,fma")

#include "tiles.h"

using namespace headstart;

namespace {

constexpr int64_t MOST_WEIGHT = 128;

// Rows as whole numbers, in whole steps; zeros at their ends.
struct Rows {
    int64_t steps;
    int64_t top;
    int16_t* numbers;
    float* scales;

    Rows(int64_t rows, int64_t inputs)
        : steps(steps_of(inputs)),
          // A lane sums two products a step.
          top(std::min<int64_t>(32767, (int64_t{1} << 31) / (2 * MOST_WEIGHT * steps) - 1)) {
        static thread_local Scratch number_memory, scale_memory;
        numbers = number_memory.take<int16_t>(rows * steps * STEP);
        scales = scale_memory.take<float>(rows);
    }

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
        int16_t* out = numbers + row * steps * STEP;
        for (int64_t k = 0; k < steps * STEP; k += STEP) {
            const __m256i pairs = _mm256_packs_epi32(round(read(k), grid.inverse),
                                                     round(read(k) + 8, grid.inverse));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k),
                                _mm256_permute4x64_epi64(pairs, 0xd8));
        }
    }
};

struct Int8 {
    using Number = int8_t;
    using Input = int16_t;
    static constexpr int OUTPUTS[] = {4, 4, 3, 2}, PARTS = 1;
    using Vector = __m256i;

    static __m256i load(const int8_t* from, int) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }

    struct Sum {
        __m256i lanes;

        void add(__m256i weight, __m256i row) {
            lanes = _mm256_add_epi32(lanes, _mm256_madd_epi16(weight, row));
        }
        float total() const { return headstart::total(_mm256_cvtepi32_ps(lanes)); }
    };
};

}  // namespace

void headstart::multiply_int8(const Weight& weight, const float* x, int64_t rows, float* out,
                              int threads) {
    const int64_t outputs = weight.outputs, inputs = weight.inputs;
    Rows numbers(rows, inputs);
    parallel_each(rows < MOST_ROWS ? 1 : threads, rows,
                  [&](int64_t r) { numbers.fill(r, x + r * inputs, inputs); });
    multiply_rows<Int8>(static_cast<const int8_t*>(weight.panels), outputs, inputs,
                        numbers.numbers, rows, threads,
                        [&](int64_t row, int64_t output, float sum) {
                            out[row * outputs + output] =
                                sum * (weight.scales[output] * numbers.scales[row]);
                        });
}
