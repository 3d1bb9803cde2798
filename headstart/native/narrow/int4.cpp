// Products of float32 rows with a weight of 4 or 5 bits, for CPUs with AVX2.
#include "int4.h"

#pragma GCC target("avx2,fma,f16c")

#include "digits.h"
#include "int4_product.h"

using namespace headstart;
using namespace headstart::int4;

namespace {

constexpr float TOP = 127;  // a lane of 16 bits takes 8 pairs of products with 15, 4 with 31

// Group `g` of the row x, which is row `r` of `out`.
void round_group(const float* x, const Weight& weight, int64_t r, int64_t g, Rows& out) {
    alignas(32) float scaled[GROUP] = {};
    const int64_t from = g * GROUP, at = r * out.groups + g;
    const int64_t count = std::min(GROUP, weight.inputs - from);
    std::memcpy(scaled, x + from, count * sizeof(float));
    for (int64_t k = 0; weight.columns != nullptr && k < count; k++)
        scaled[k] *= weight.columns[from + k];
    __m256i most = _mm256_setzero_si256(), added = most, parts[4];
    for (int k = 0; k < 4; k++)
        most = _mm256_max_epi32(most, magnitude(_mm256_load_ps(scaled + 8 * k)));
    const Grid grid(largest(most), TOP);
    for (int k = 0; k < 4; k++) {
        parts[k] = round(scaled + 8 * k, grid.inverse);
        added = _mm256_add_epi32(added, parts[k]);
    }
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]),
                                              _mm256_packs_epi32(parts[2], parts[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out.numbers[at * GROUP]),
                        _mm256_permutevar8x32_epi32(packed, order));
    out.steps[at] = grid.step;
    out.sums[at] = grid.step * static_cast<float>(total(added));
}

struct Avx2 {
    static constexpr int PARTS = 2, MOST = 4;
    using Floats = __m256;
    using Integers = __m256i;

    static __m256i load(const uint8_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    static __m256i repeat(int four) { return _mm256_set1_epi32(four); }
    static __m256i right(__m256i x, int bits) { return _mm256_srli_epi16(x, bits); }
    static __m256 from_bytes(const uint8_t* from) {
        const auto* bytes = reinterpret_cast<const __m128i*>(from);
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)));
    }
    static __m256 from_halves(const uint8_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static __m256 fmadd(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }

    struct Sum {
        __m256i narrow, exact;  // of 16 and of 32 bits

        void add(__m256i first, __m256i low, __m256i second, __m256i high) {
            const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(first, low),
                                                      _mm256_maddubs_epi16(second, high));
            narrow = _mm256_add_epi16(narrow, products);
        }
        void widen() {
            exact = _mm256_add_epi32(exact, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
            narrow = _mm256_setzero_si256();
        }
        __m256 total() const { return _mm256_cvtepi32_ps(exact); }
    };
};

}  // namespace

Rows int4::round_rows(const float* x, int64_t rows, const Weight& weight, int threads) {
    static thread_local Scratch number_memory, float_memory;
    const int64_t groups = (weight.inputs + GROUP - 1) / GROUP, count = rows * groups;
    Rows out{groups, number_memory.take<int8_t>(count * GROUP), float_memory.take<float>(2 * count)};
    out.sums = out.steps + count;
    parallel_each(rows < MOST_ROWS ? 1 : threads, rows, [&](int64_t r) {
        for (int64_t g = 0; g < out.groups; g++)
            round_group(x + r * weight.inputs, weight, r, g, out);
    });
    return out;
}

void headstart::multiply_int4(const Weight& weight, const float* x, int64_t rows, float* out,
                              int threads) {
    multiply<Avx2>(weight, x, rows, out, threads);
}
