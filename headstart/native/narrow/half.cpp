// Products of float32 rows with a weight in bf16, for CPUs with AVX2.
//
// Few rows wait for memory, so reading 2 bytes for each number of the weight instead of 4 takes half
// of their time; the arithmetic is float32's.
//
// A row's sum for an output has an order of its own, 8 lanes that are added at the end, whatever the
// number of rows and threads.
#include "../weight.h"

#pragma GCC target("avx2,fma")

#include "tiles.h"

using namespace headstart;

namespace {

// A bf16 number is the upper half of a float: of two neighbours in a 32-bit lane, one is the lane
// shifted up, and one is the lane with its lower half cleared. So the first 8 numbers of a step are
// those of even place, and no number is moved between lanes.
struct Half {
    using Number = bf16;
    using Input = float;
    static constexpr int OUTPUTS[] = {4, 4, 3, 2}, PARTS = 2;
    using Vector = __m256;

    static __m256 load(const bf16* from, int part) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm256_castsi256_ps(part == 0 ? _mm256_slli_epi32(pairs, 16)
                                             : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
    }

    struct Sum {
        __m256 lanes;

        void add(__m256 weight, __m256 row) { lanes = _mm256_fmadd_ps(weight, row, lanes); }
        float total() const { return headstart::total(lanes); }
    };
};

// The rows in steps of 16 inputs, in the order of the weight's lanes; zeros at their ends.
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

}  // namespace

void headstart::multiply_half(const Weight& weight, const float* x, int64_t rows, float* out,
                              int threads) {
    const int64_t outputs = weight.outputs;
    const float* splits = split(x, rows, weight.inputs);
    multiply_rows<Half>(
        static_cast<const bf16*>(weight.panels), outputs, weight.inputs, splits, rows, threads,
        [&](int64_t row, int64_t output, float sum) { out[row * outputs + output] = sum; });
}
