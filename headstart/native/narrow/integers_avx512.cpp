// The product of integers.cpp with AVX-512 VNNI, which adds four products in one instruction. Also
// converts weights of 4 or 5 bits to bf16, for the products of ../linear.h.
#include "integers.h"  // before the pragma: integers.cpp includes it too

#ifndef HEADSTART_EMULATED  // without bf16, since many CPUs have VNNI but no bf16
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#endif

#include "integers_product.h"

using namespace headstart;

namespace {

struct Avx512 {
    static constexpr int LANES = 16, MOST = 6;
    using Floats = __m512;
    using Integers = __m512i;

    static __m512i load(const uint8_t* from) { return _mm512_loadu_si512(from); }
    static __m512i repeat(int four) { return _mm512_set1_epi32(four); }
    static __m512i right(__m512i x, int bits) { return _mm512_srli_epi32(x, bits); }
    static __m512 from_bytes(const uint8_t* from) {
        const auto* bytes = reinterpret_cast<const __m128i*>(from);
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)));
    }
    static __m512 from_halves(const uint8_t* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static __m512 fmadd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

    struct Sum {
        __m512i lanes;

        static Sum of(int32_t middle) { return {_mm512_set1_epi32(middle)}; }
        void add(__m512i bytes, __m512i numbers) {
            lanes = _mm512_dpbusd_epi32(lanes, bytes, numbers);
        }
        void add(__m512i first, __m512i low, __m512i second, __m512i high) {
            add(first, low);
            add(second, high);
        }
        void widen() {}
        __m512 total() const { return _mm512_cvtepi32_ps(lanes); }
    };
};

// For every four bytes: 128 plus the value in byte `b`, or in the high half of byte `b`.
template <class Form>
inline __m512 number(__m512i bytes, int b, bool high) {
    const int left = 16 - 8 * b - 4 * high;
    const __m512i moved = left >= 0 ? _mm512_slli_epi32(bytes, left) : Avx512::right(bytes, -left);
    const __m512i value = moved & _mm512_set1_epi32(Form::BITS == 5 ? 0x1f0000 : 0xf0000);
    return _mm512_castsi512_ps(value | _mm512_set1_epi32(0x43000000));
}

// Pairs of bf16, rounded to nearest.
inline __m512i pairs_of(__m512 even, __m512 odd) {
    const auto up = [](__m512 x) {
        return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    };
    return _mm512_srli_epi32(up(even), 16) | (up(odd) & _mm512_set1_epi32(-65536));
}

// Converts a block. Prefetches the block eight blocks later, which measured fastest.
template <class Form>
inline void widen_block(const uint8_t* block, const float* columns, uint32_t* out) {
    const __m512 steps = integers::grid<Avx512, Form>(block);
    __m512 starts = integers::grid<Avx512, Form>(block + Form::STARTS);
    if constexpr (Form::IN_BYTES) starts = starts * Form::START_UNIT;
    starts = starts - steps * 128.0f;
    for (int line = 0; line < Form::BYTES_OF_BLOCK; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(block + 8 * Form::BYTES_OF_BLOCK + line),
                     _MM_HINT_T0);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        const __m512i bytes = Avx512::load(block + Form::VALUES + 64 * v);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m512i four = bytes;
            if constexpr (Form::BITS == 5)
                four = integers::values<Avx512, Form>(
                    Avx512::right(bytes, 4 * h), Avx512::load(block + Form::FIFTHS), 2 * v + h);
#pragma GCC unroll 2
            for (int two = 0; two < 2; two++) {
                const int64_t pair = 8 * h + 2 * v + two;
                const auto weight = [&](int b) {
                    const __m512 value = number<Form>(four, 2 * two + b, Form::BITS == 4 && h == 1);
                    return Avx512::fmadd(value, steps, starts) * columns[2 * pair + b];
                };
                _mm512_storeu_si512(out + pair * Weight::PANEL, pairs_of(weight(0), weight(1)));
            }
        }
    }
}

}  // namespace

void headstart::widen(int64_t form, const void* from, const float* columns, int64_t pairs,
                      uint32_t* out) {
    integers::with_form<INT8>(form, [&](auto of) {
        using Form = decltype(of);
        const uint8_t* block = static_cast<const uint8_t*>(from);
        for (int64_t k = 0; k < pairs; k += 16)
            for (int half = 0; half < 2; half++, block += Form::BYTES_OF_BLOCK)
                widen_block<Form>(block, columns + 2 * k, out + k * Weight::PANEL + 16 * half);
    });
}

void headstart::multiply_integers_avx512(const Product* products, int count, const float* x,
                                         int64_t rows, int threads) {
    integers::multiply<Avx512>(products, count, x, rows, threads);
}
