// Products of float32 rows with a weight in bf16, for CPUs with AVX2.
//
// Few rows wait for memory, so reading 2 bytes for each number of the weight instead of 4 takes half
// of their time; the arithmetic is float32's.
//
// A row's sum for an output has an order of its own: two sums of 8 lanes each, whatever the number of
// rows and threads.
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
    static constexpr int OUTPUTS[] = {4, 2, 2, 1};

    struct Step {
        __m256 first, second;
    };
    static Step load(const bf16* from) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
    }

    struct Sum {
        __m256 first, second;

        void add(const Step& step, const float* x) {
            first = _mm256_fmadd_ps(step.first, _mm256_loadu_ps(x), first);
            second = _mm256_fmadd_ps(step.second, _mm256_loadu_ps(x + 8), second);
        }
        float total() const { return headstart::total(_mm256_add_ps(first, second)); }
    };
};

// The rows in steps of 16 inputs, in the order of the weight's lanes; zeros at their ends.
std::unique_ptr<float[]> split(const float* x, int64_t rows, int64_t inputs) {
    const int64_t width = steps_of(inputs) * STEP;
    std::unique_ptr<float[]> out(new float[rows * width]());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inputs; i++)
            out[r * width + i / STEP * STEP + i % 2 * 8 + i % STEP / 2] = x[r * inputs + i];
    return out;
}

}  // namespace

void headstart::multiply_half(const Weight& weight, const float* x, int64_t rows, float* out,
                              int threads) {
    const int64_t outputs = weight.outputs;
    const auto splits = split(x, rows, weight.inputs);
    multiply_rows<Half>(
        static_cast<const bf16*>(weight.panels), outputs, weight.inputs, splits.get(), rows, threads,
        [&](int64_t row, int64_t output, float sum) { out[row * outputs + output] = sum; });
}
