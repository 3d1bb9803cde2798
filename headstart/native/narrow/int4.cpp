// Products of float32 rows with a weight of 4 or 5 bits, for CPUs with AVX2.
#include "int4.h"

#pragma GCC target("avx2,fma,f16c")

#include "digits.h"

using namespace headstart;
using namespace headstart::int4;

namespace {

constexpr float TOP = 127;  // a lane of 16 bits takes 8 pairs of products with 15, 4 with 31

// One group of a row; `columns` may be null.
void round_group(const float* x, const float* columns, int64_t count, int8_t* numbers, float* step,
                 float* sum) {
    alignas(32) float scaled[GROUP] = {};
    std::memcpy(scaled, x, count * sizeof(float));
    for (int64_t k = 0; columns != nullptr && k < count; k++) scaled[k] *= columns[k];
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
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers),
                        _mm256_permutevar8x32_epi32(packed, order));
    *step = grid.step;
    *sum = grid.step * static_cast<float>(total(added));
}

// The steps, or in other units the starts, of 8 outputs from `first` on.
template <class Form>
inline __m256 grid(const uint8_t* from, int first) {
    if constexpr (Form::IN_BYTES) {
        const auto* bytes = reinterpret_cast<const __m128i*>(from + first);
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)));
    }
    const auto* halves = reinterpret_cast<const __m128i*>(from + 2 * first);
    return _mm256_cvtph_ps(_mm_loadu_si128(halves));
}

// Four bits of 32 values, and the fifth bit of each, which is `bit` of a byte.
template <class Form>
inline __m256i values(__m256i four, __m256i fifths, int bit) {
    const __m256i value = _mm256_and_si256(four, _mm256_set1_epi8(15));
    if constexpr (!Form::FIVE) return value;
    const __m256i moved =
        bit < 4 ? _mm256_slli_epi16(fifths, 4 - bit) : _mm256_srli_epi16(fifths, bit - 4);
    return _mm256_or_si256(value, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
}

inline __m256i four(const int8_t* from) {
    int bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm256_set1_epi32(bits);
}

template <class Form, int ROWS>
void product(const uint8_t* block, int64_t groups, Slice rows, float (*sums)[PANEL],
             int64_t ahead) {
    const __m256i ones = _mm256_set1_epi16(1);
    constexpr int64_t BLOCK = Form::BYTES_OF_BLOCK;
    __m256 sum[ROWS][2];
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++, block += BLOCK) {
        for (int64_t line = 0; line < BLOCK; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(block + ahead + line), _MM_HINT_T0);
        __m256i narrow[ROWS][2];  // of 16 bits
        __m256i exact[ROWS][2];   // of 32
        for (int r = 0; r < ROWS; r++)
            narrow[r][0] = narrow[r][1] = exact[r][0] = exact[r][1] = _mm256_setzero_si256();
        const auto* fifths = reinterpret_cast<const __m256i*>(block + Form::FIFTHS);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const auto* from = reinterpret_cast<const __m256i*>(block + Form::VALUES + 64 * v);
            __m256i first[2], second[2];
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const __m256i bytes = _mm256_loadu_si256(from + h);
                const __m256i fifth = Form::FIVE ? _mm256_loadu_si256(fifths + h) : bytes;
                first[h] = values<Form>(bytes, fifth, 2 * v);
                second[h] = values<Form>(_mm256_srli_epi16(bytes, 4), fifth, 2 * v + 1);
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const int8_t* x = rows.numbers + (r * groups + g) * GROUP + 4 * v;
                const __m256i low = four(x), high = four(x + 16);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++)
                    narrow[r][h] = _mm256_add_epi16(
                        narrow[r][h], _mm256_add_epi16(_mm256_maddubs_epi16(first[h], low),
                                                       _mm256_maddubs_epi16(second[h], high)));
            }
            if (v == 3 || (Form::FIVE && v == 1))
                for (int r = 0; r < ROWS; r++)
                    for (int h = 0; h < 2; h++) {
                        const __m256i wide = _mm256_madd_epi16(narrow[r][h], ones);
                        exact[r][h] = _mm256_add_epi32(exact[r][h], wide);
                        narrow[r][h] = _mm256_setzero_si256();
                    }
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m256 steps = grid<Form>(block, 8 * h);
            __m256 starts = grid<Form>(block + Form::STARTS, 8 * h);
            if constexpr (Form::IN_BYTES)
                starts = _mm256_mul_ps(starts, _mm256_set1_ps(Form::START_UNIT));
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const int64_t at = r * groups + g;
                const __m256 products = _mm256_cvtepi32_ps(exact[r][h]);
                const __m256 step = _mm256_mul_ps(steps, _mm256_set1_ps(rows.steps[at]));
                sum[r][h] = _mm256_fmadd_ps(products, step, sum[r][h]);
                sum[r][h] = _mm256_fmadd_ps(starts, _mm256_set1_ps(rows.sums[at]), sum[r][h]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(sums[r] + 8 * h, sum[r][h]);
}

template <class Form>
constexpr Table<4> TABLE = {
    Form::BYTES_OF_BLOCK,
    {product<Form, 1>, product<Form, 2>, product<Form, 3>, product<Form, 4>}};
constexpr const Table<4>* TABLES[] = {&TABLE<Form<false, false>>, &TABLE<Form<false, true>>,
                                      &TABLE<Form<true, false>>, &TABLE<Form<true, true>>};

}  // namespace

Rows int4::round_rows(const float* x, int64_t rows, const Weight& weight, int threads) {
    Rows out(rows, weight.groups());
    parallel(rows < MOST_ROWS ? 1 : threads, [&](int thread, int all) {
        for (int64_t r = rows * thread / all; r < rows * (thread + 1) / all; r++)
            for (int64_t g = 0; g < out.groups; g++) {
                const int64_t from = g * GROUP, at = r * out.groups + g;
                round_group(x + r * weight.inputs + from,
                            weight.columns == nullptr ? nullptr : weight.columns + from,
                            std::min(GROUP, weight.inputs - from), out.numbers.get() + at * GROUP,
                            &out.steps[at], &out.sums[at]);
            }
    });
    return out;
}

extern "C" {

// out float [rows, outputs] = x float [rows, inputs] times a weight, see int4.h; all contiguous.
void headstart_int4_linear(const uint8_t* blocks, const float* scales, const float* columns,
                           int64_t outputs, int64_t inputs, int form, const float* x,
                           int64_t rows, float* out, int threads) {
    multiply({blocks, scales, columns, outputs, inputs}, x, rows, out, threads, *TABLES[form]);
}

}  // extern "C"
