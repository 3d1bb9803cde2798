// The product of int4.cpp by AVX-512 with VNNI, which adds four products in one instruction.
#include "int4.h"  // before the pragma: int4.cpp has its inline functions too

#include "../avx512.h"

using namespace headstart;
using namespace headstart::int4;

namespace {

// The steps, or in other units the starts, of 16 outputs.
template <class Form>
inline __m512 grid(const uint8_t* from) {
    if constexpr (Form::IN_BYTES) {
        const auto* bytes = reinterpret_cast<const __m128i*>(from);
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)));
    }
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Four bits of 64 values, and the fifth bit of each, which is `bit` of a byte.
template <class Form>
inline __m512i values(__m512i four, __m512i fifths, int bit) {
    const __m512i value = _mm512_and_si512(four, _mm512_set1_epi32(0x0f0f0f0f));
    if constexpr (!Form::FIVE) return value;
    const __m512i moved =
        bit < 4 ? _mm512_slli_epi32(fifths, 4 - bit) : _mm512_srli_epi32(fifths, bit - 4);
    return _mm512_or_si512(value, _mm512_and_si512(moved, _mm512_set1_epi32(0x10101010)));
}

inline __m512i four(const int8_t* from) {
    int bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm512_set1_epi32(bits);
}

template <class Form, int ROWS>
void product(const uint8_t* block, int64_t groups, Slice rows, float (*sums)[PANEL],
             int64_t ahead) {
    constexpr int64_t BLOCK = Form::BYTES_OF_BLOCK;
    __m512 sum[ROWS];
    for (int r = 0; r < ROWS; r++) sum[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++, block += BLOCK) {
        for (int64_t line = 0; line < BLOCK; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(block + ahead + line), _MM_HINT_T0);
        __m512i exact[ROWS];
        for (int r = 0; r < ROWS; r++) exact[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const __m512i bytes = _mm512_loadu_si512(block + Form::VALUES + 64 * v);
            const __m512i fifths = Form::FIVE ? _mm512_loadu_si512(block + Form::FIFTHS) : bytes;
            const __m512i first = values<Form>(bytes, fifths, 2 * v);
            const __m512i second = values<Form>(_mm512_srli_epi32(bytes, 4), fifths, 2 * v + 1);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const int8_t* x = rows.numbers + (r * groups + g) * GROUP + 4 * v;
                exact[r] = _mm512_dpbusd_epi32(exact[r], first, four(x));
                exact[r] = _mm512_dpbusd_epi32(exact[r], second, four(x + 16));
            }
        }
        const __m512 steps = grid<Form>(block);
        __m512 starts = grid<Form>(block + Form::STARTS);
        if constexpr (Form::IN_BYTES)
            starts = _mm512_mul_ps(starts, _mm512_set1_ps(Form::START_UNIT));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const int64_t at = r * groups + g;
            const __m512 step = _mm512_mul_ps(steps, _mm512_set1_ps(rows.steps[at]));
            sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[r]), step, sum[r]);
            sum[r] = _mm512_fmadd_ps(starts, _mm512_set1_ps(rows.sums[at]), sum[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(sums[r], sum[r]);
}

template <class Form>
constexpr Table<8> TABLE = {
    Form::BYTES_OF_BLOCK,
    {product<Form, 1>, product<Form, 2>, product<Form, 3>, product<Form, 4>, product<Form, 5>,
     product<Form, 6>, product<Form, 7>, product<Form, 8>}};
constexpr const Table<8>* TABLES[] = {&TABLE<Form<false, false>>, &TABLE<Form<false, true>>,
                                      &TABLE<Form<true, false>>, &TABLE<Form<true, true>>};

}  // namespace

extern "C" {

// As headstart_int4_linear; for CPUs that have all that avx512.h names.
void headstart_int4_linear_avx512(const uint8_t* blocks, const float* scales, const float* columns,
                                  int64_t outputs, int64_t inputs, int form, const float* x,
                                  int64_t rows, float* out, int threads) {
    multiply({blocks, scales, columns, outputs, inputs}, x, rows, out, threads, *TABLES[form]);
}

}  // extern "C"
