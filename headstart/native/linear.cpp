// Packed weights: packing and multiplying.
#include "avx512.h"

#include "linear.h"

using namespace headstart;

namespace {

constexpr int TILE = 14;  // rows whose sums fit in registers: 2 x 14 of 32

inline __m512 add_products(__m512 sum, __m512i weights, __m512i row) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(row),
                            reinterpret_cast<__m512bh>(weights));
}

inline __m512i add_products(__m512i sum, __m512i weights, __m512i row) {
    return _mm512_dpbusd_epi32(sum, weights, row);
}

// Multiplies TALL rows by one panel. Sums are floats or integers. FETCH is the number of cache
// lines to prefetch for each pair of inputs:
//
// - 2 for a single tile, which reads the panel from memory. It prefetches the panel AHEAD pairs in
//   advance, and at the end the beginning of `next`.
// - 1 for each of two tiles, which prefetch one half of the next panel each.
// - 0 for other tiles.
template <class Sum, int TALL, int FETCH>
void tile(const uint32_t* rows, const uint32_t* panel, int64_t pairs, float* sums, bool add,
          const char* next) {
    constexpr int64_t AHEAD = 96;
    Sum c[TALL][2];
    for (int r = 0; r < TALL; r++)
        for (int h = 0; h < 2; h++)
            c[r][h] = reinterpret_cast<Sum>(add ? _mm512_load_ps(sums + r * PANEL + 16 * h)
                                                : _mm512_setzero_ps());
    const char* fetch = reinterpret_cast<const char*>(panel + AHEAD * PANEL);
    const auto step = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int line = 0; line < FETCH; line++)
            _mm_prefetch(fetch + 64 * line, FETCH == 2 ? _MM_HINT_T0 : _MM_HINT_T1);
        fetch += 64 * FETCH;
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 16);
#pragma GCC unroll 16
        for (int r = 0; r < TALL; r++) {
            const __m512i x = _mm512_set1_epi32(static_cast<int>(rows[r]));
            c[r][0] = add_products(c[r][0], left, x);
            c[r][1] = add_products(c[r][1], right, x);
        }
        rows += TALL;
        panel += PANEL;
    };
    const int64_t panel_fetches = FETCH == 2 ? std::max<int64_t>(pairs - AHEAD, 0) : 0;
#pragma GCC unroll 4
    for (int64_t k = 0; k < panel_fetches; k++) step();
    fetch = next;
#pragma GCC unroll 4
    for (int64_t k = panel_fetches; k < pairs; k++) step();
    for (int r = 0; r < TALL; r++)
        for (int h = 0; h < 2; h++)
            _mm512_store_si512(sums + r * PANEL + 16 * h, reinterpret_cast<__m512i>(c[r][h]));
}

// Transposes the pairs of up to 16 rows, 16 pairs at a time: out[pair * step + row].
inline void transpose_pairs(const bf16* x, int64_t stride, int rows, int64_t width, uint32_t* out,
                            int64_t step) {
    const __mmask16 keep = first_lanes(rows);
    for (int64_t k = 0; 2 * k < width; k += 16) {
        __m512i v[16];
        for (int r = 0; r < 16; r++)
            v[r] = r < rows ? load_pairs(x + r * stride + 2 * k, width - 2 * k) : __m512i{};
        transpose16(v);
        for (int64_t i = 0; i < std::min<int64_t>(16, (width + 1) / 2 - k); i++)
            _mm512_mask_storeu_epi32(out + (k + i) * step, keep, v[i]);
    }
}

// Packs rows as [pair][row].
void pack(const bf16* x, int64_t stride, int rows, int64_t width, uint32_t* out) {
    if (rows > 1) return transpose_pairs(x, stride, rows, width, out, rows);
    std::memcpy(out, x, 2 * width);
    if (width % 2 == 1) out[width / 2] = x[width - 1];
}

template <class Sum, int TALLEST>
void multiply_rows(const uint32_t* rows, int count, const uint32_t* panel, int64_t pairs,
                   float* sums, bool add, const uint32_t* next, int fetch) {
    with_count<TALLEST>(count, [&](auto tall) {
        with_count<3>(fetch + 1, [&](auto lines) {
            tile<Sum, tall.value, lines.value - 1>(rows, panel, pairs, sums, add,
                                                   reinterpret_cast<const char*>(next));
        });
    });
}

}  // namespace

const Products headstart::avx512_products{TILE,       18 * TILE, 640,
                                          400 * 1024, pack,      multiply_rows<__m512, TILE>};
const Products headstart::avx512_int8_products{
    INT8_TILE, 0, 0, 0, nullptr, multiply_rows<__m512i, INT8_TILE>};

// Like AMX, treats denormal numbers as zero.
void headstart::multiply_row(const uint32_t* row, const int8_t* panel, int64_t pairs, float* sums,
                             bool add) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    __m512 sum[2] = {};
    for (int h = 0; h < 2 && add; h++) sum[h] = _mm512_load_ps(sums + 16 * h);
    for (int64_t k = 0; k < pairs;) {
        __m512 even[2] = {}, odd[2] = {};
        for (const int64_t end = std::min(k + 16, pairs); k < end; k++, panel += 2 * PANEL) {
            _mm_prefetch(reinterpret_cast<const char*>(panel + 4096), _MM_HINT_T0);
            const Halves x(_mm512_set1_epi32(static_cast<int>(row[k])));
            for (int h = 0; h < 2; h++) {
                even[h] = _mm512_fmadd_ps(floats(panel + 32 * h), x.even, even[h]);
                odd[h] = _mm512_fmadd_ps(floats(panel + 32 * h + 16), x.odd, odd[h]);
            }
        }
        for (int h = 0; h < 2; h++) sum[h] += even[h] + odd[h];
    }
    for (int h = 0; h < 2; h++) _mm512_store_ps(sums + 16 * h, sum[h]);
    _mm_setcsr(mode);
}

// Packs weight bf16 [outputs, inputs], contiguous, into panels.
extern "C" void headstart_pack(const bf16* weight, int64_t outputs, int64_t inputs,
                               uint32_t* panels, int threads) {
    const Weight shape{panels, nullptr, nullptr, nullptr, inputs, outputs, BF16};
    parallel_each(threads, 2 * shape.count(), [&](int64_t half) {
        const int64_t row = 16 * half, rows = std::clamp<int64_t>(outputs - row, 0, 16);
        uint32_t* out = panels + half / 2 * shape.pairs() * PANEL + 16 * (half % 2);
        transpose_pairs(weight + row * inputs, inputs, static_cast<int>(rows), inputs, out, PANEL);
        for (int64_t k = 0; rows < 16 && k < shape.pairs(); k++)
            std::memset(out + k * PANEL + rows, 0, (16 - rows) * 4);
    });
}

// out bf16 [rows, outputs] = x bf16 [rows, inputs] times the weight, plus its bias
extern "C" void headstart_linear(const Weight* weight, const bf16* x, int64_t rows, bf16* out,
                                 int threads) {
    Stages stages;
    const auto source = [&](int64_t row, int, int64_t* stride) {
        *stride = weight->inputs;
        return x + row * weight->inputs;
    };
    parallel(threads, [&](int, int all) { project(rows, source, {{weight, out}}, all, stages); });
}
