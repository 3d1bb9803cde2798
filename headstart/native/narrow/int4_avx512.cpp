// The product of int4.cpp by AVX-512 with VNNI, which adds four products in one instruction.
#include "int4.h"  // before the pragma: int4.cpp has its inline functions too

#include "../avx512.h"

#include "int4_product.h"

using namespace headstart;

namespace {

struct Avx512 {
    static constexpr int PARTS = 1, MOST = 8;
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

        void add(__m512i first, __m512i low, __m512i second, __m512i high) {
            lanes = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(lanes, first, low), second, high);
        }
        void widen() {}
        __m512 total() const { return _mm512_cvtepi32_ps(lanes); }
    };
};

}  // namespace

extern "C" {

// As headstart_int4_linear; for CPUs that have all that avx512.h names.
void headstart_int4_linear_avx512(const uint8_t* blocks, const float* scales, const float* columns,
                                  int64_t outputs, int64_t inputs, int form, const float* x,
                                  int64_t rows, float* out, int threads) {
    int4::multiply<Avx512>({blocks, scales, columns, outputs, inputs}, form, x, rows, out, threads);
}

}  // extern "C"
