// The product of integers.cpp with AVX-VNNI, for CPUs without AVX-512.
#include "integers.h"

#ifndef HEADSTART_EMULATED
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

#include "integers_avx2.h"

using namespace headstart;

namespace {

struct AvxVnni : integers::Avx2Vectors {
    struct Sum {
        __m256i lanes;

        static Sum of(int32_t middle) { return {_mm256_set1_epi32(middle)}; }
        void add(__m256i bytes, __m256i numbers) {
            lanes = _mm256_dpbusd_avx_epi32(lanes, bytes, numbers);
        }
        void add(__m256i first, __m256i low, __m256i second, __m256i high) {
            add(first, low);
            add(second, high);
        }
        void widen() {}
        __m256 total() const { return _mm256_cvtepi32_ps(lanes); }
    };
};

}  // namespace

void headstart::multiply_integers_vnni(const Product* products, int count, const float* x,
                                       int64_t rows, int threads) {
    integers::multiply<AvxVnni>(products, count, x, rows, threads);
}
