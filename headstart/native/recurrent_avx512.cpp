// Recurrent layers for CPUs with AVX-512, with or without bf16 instructions.
#include "recurrent.h"

#ifndef HEADSTART_EMULATED
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

#include "recurrent_kernels.h"

namespace headstart {
namespace {

struct Avx512 {
    using Floats = __m512;
    static constexpr int COLUMNS = 2, STATE = 8;

    static Floats set(float x) { return _mm512_set1_ps(x); }
    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
    static Floats add(Floats a, Floats b) { return a + b; }
    static Floats multiply(Floats a, Floats b) { return a * b; }
    static Floats divide(Floats a, Floats b) { return a / b; }
    static Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats round(Floats x) {
        return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
};

}  // namespace

void causal_conv_avx512(const Sequences& sequences, const ConvCall& call, int threads) {
    run_conv<Avx512>(sequences, call, threads);
}

void gated_delta_rule_avx512(const Sequences& sequences, const DeltaCall& call, int threads) {
    run_delta<Avx512>(sequences, call, threads);
}

void mamba2_scan_avx512(const Sequences& sequences, const ScanCall& call, int threads) {
    run_scan<Avx512>(sequences, call, threads);
}

}  // namespace headstart
