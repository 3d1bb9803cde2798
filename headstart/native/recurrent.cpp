// Recurrent layers for CPUs with AVX2.
#include "recurrent.h"

#pragma GCC target("avx2,fma")

#include "recurrent_kernels.h"

namespace headstart {
namespace {

struct Avx2 {
    struct Floats {
        __m256 low, high;
    };
    static constexpr int COLUMNS = 1, STATE = 4;

    static Floats set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static Floats load(const float* from) {
        return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
    }
    static void store(float* to, Floats x) {
        _mm256_storeu_ps(to, x.low);
        _mm256_storeu_ps(to + 8, x.high);
    }
    static Floats add(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
    static Floats multiply(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
    static Floats divide(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
    static Floats fmadd(Floats a, Floats b, Floats c) {
        return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
    }
    static Floats fnmadd(Floats a, Floats b, Floats c) {
        return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
    }
    static Floats smaller(Floats a, Floats b) {
        return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
    }
    static Floats larger(Floats a, Floats b) {
        return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
    }
    static Floats round(Floats x) { return {round(x.low), round(x.high)}; }
    static Floats times_power(Floats x, Floats n) {
        return {times_power(x.low, n.low), times_power(x.high, n.high)};
    }

  private:
    static __m256 round(__m256 x) {
        return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static __m256 times_power(__m256 x, __m256 n) {
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
};

}  // namespace
}  // namespace headstart

using namespace headstart;

extern "C" void headstart_causal_conv(const Sequences* sequences, const ConvCall* call,
                                      int threads) {
    (has_avx512() ? causal_conv_avx512 : run_conv<Avx2>)(*sequences, *call, threads);
}

extern "C" void headstart_gated_delta_rule(const Sequences* sequences, const DeltaCall* call,
                                           int threads) {
    (has_avx512() ? gated_delta_rule_avx512 : run_delta<Avx2>)(*sequences, *call, threads);
}

extern "C" void headstart_mamba2_scan(const Sequences* sequences, const ScanCall* call,
                                      int threads) {
    (has_avx512() ? mamba2_scan_avx512 : run_scan<Avx2>)(*sequences, *call, threads);
}
