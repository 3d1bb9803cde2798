// Products of float32 rows with a weight of 4, 5 or 8 bits, for CPUs with AVX2.
#include "integers.h"

#pragma GCC target("avx2,fma,f16c")

#include "digits.h"
#include "integers_avx2.h"

using namespace headstart;
using namespace headstart::integers;

namespace {

// The largest integer of a row. A 16-bit lane can then add 16 products with values up to 15, 8 with
// values up to 31, or 2 with values up to 128.
constexpr float TOP = 127;

// Rounds group `g` of the row x.
void round_group(const float* x, const Weight& weight, int64_t g, Group& out) {
    float copy[GROUP];
    const float* scaled = x + g * GROUP;
    const int64_t count = std::min(GROUP, weight.inputs - g * GROUP);
    if (count < GROUP || weight.columns != nullptr) {
        for (int64_t k = 0; k < GROUP; k++) copy[k] = k < count ? scaled[k] : 0.0f;
        for (int64_t k = 0; weight.columns != nullptr && k < count; k++)
            copy[k] *= weight.columns[g * GROUP + k];
        scaled = copy;
    }
    __m256i most = _mm256_setzero_si256(), added = most, parts[4];
    for (int k = 0; k < 4; k++)
        most = _mm256_max_epi32(most, magnitude(_mm256_loadu_ps(scaled + 8 * k)));
    const Grid grid(largest(most), TOP);
    for (int k = 0; k < 4; k++) {
        parts[k] = round(scaled + 8 * k, grid.inverse);
        added = _mm256_add_epi32(added, parts[k]);
    }
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]),
                                              _mm256_packs_epi32(parts[2], parts[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.numbers),
                        _mm256_permutevar8x32_epi32(packed, order));
    const int32_t sum = total(added);
    out.step = grid.step;
    out.sum = grid.step * static_cast<float>(sum);
    out.middle = sum * -128u;  // unsigned: `sum` is the lowest integer if x is not finite
}

struct Avx2 : Avx2Vectors {
    struct Sum {
        __m256i narrow, exact;  // lanes of 16 and of 32 bits

        static Sum of(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
        // The instruction's first operand is unsigned, so the weight's sign moves to the row's
        // number.
        void add(__m256i bytes, __m256i numbers) {
            const __m256i weight = bytes ^ _mm256_set1_epi8(-128);
            narrow =
                _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(numbers, weight));
            widen();
        }
        void add(__m256i first, __m256i low, __m256i second, __m256i high) {
            const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(first, low),
                                                      _mm256_maddubs_epi16(second, high));
            narrow = _mm256_add_epi16(narrow, products);
            asm("" : "+x"(narrow));  // otherwise the compiler stores all products, and adds later
        }
        void widen() {
            exact = _mm256_add_epi32(exact, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
            asm("" : "+x"(exact));  // otherwise the compiler delays all additions
            narrow = _mm256_setzero_si256();
        }
        __m256 total() const { return _mm256_cvtepi32_ps(exact); }
    };
};

}  // namespace

Group* integers::take_groups(int64_t count) {
    static thread_local Scratch memory;
    return memory.take<Group>(count);
}

void integers::round_groups(const float* x, const Weight& weight, int64_t first, int64_t last,
                            Group* out) {
    const int64_t groups = groups_of(weight);
    for (int64_t i = first; i < last; i++)
        round_group(x + i / groups * weight.inputs, weight, i % groups, out[i]);
}

void headstart::multiply_integers(const Product* products, int count, const float* x, int64_t rows,
                                  int threads) {
    integers::multiply<Avx2>(products, count, x, rows, threads);
}

// Packs 8-bit values [outputs, inputs] into panels, padded with zeros to whole groups.
extern "C" void headstart_pack_int8(const int8_t* values, int64_t outputs, int64_t inputs,
                                    uint32_t* out, int threads) {
    const int64_t width = (inputs + GROUP - 1) / GROUP * GROUP;
    parallel_each(threads, (outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
        for (int64_t o = 0; o < PANEL; o++) {
            const int64_t output = panel * PANEL + o, some = output < outputs ? inputs : 0;
            const int8_t* from = values + output * inputs;
            uint32_t* to = out + panel * width * PANEL / 4 + o;
            for (int64_t k = 0; k < width; k += 4, to += PANEL) {
                uint32_t four = 0;
                if (k + 4 <= some)
                    std::memcpy(&four, from + k, 4);
                else if (k < some)
                    std::memcpy(&four, from + k, some - k);
                *to = four ^ 0x80808080;
            }
        }
    });
}
