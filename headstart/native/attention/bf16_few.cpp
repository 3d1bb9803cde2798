// Attention of a few rows over their keys, as in decoding, where the only rows are the query heads
// of one KV head.
//
// The 16 lanes of a vector hold keys, since rows would not fill them. Queries and weights are
// broadcast:
//
//     scores [row, key]  +=  Q [row, pair of dims] (broadcast)  *  K^T [pair of dims, key]
//     out    [row, dim]  +=  P [row, pair of keys] (broadcast)  *  V [pair of keys, dim]
//
// Keys are transposed in registers, 16 at a time, and rows of V are interleaved in registers. There
// is one pass with an online softmax, as in bf16_chunk.cpp. The order of a row's sums depends only
// on the positions of its keys.
#include "rows.h"  // before avx512.h: float32.cpp includes it too

#include "../avx512.h"

#include "bf16_rows.h"
#include "softmax.h"

namespace headstart {
namespace {

constexpr int LANES = 16;

struct Avx512 {
    using Vector = __m512;
};

// The state of one chunk; one per thread, reused for every chunk.
struct alignas(64) Few : Softmax<FEW_ROWS, Avx512, bf16> {
    uint32_t query[FEW_ROWS][MAX_DIM / 2];  // pairs of dims
    uint32_t weights[FEW_ROWS][TILE / 2];   // pairs of keys
    float out[FEW_ROWS][MAX_DIM];
};

thread_local Few few;

void begin(Few& s, const Rows<bf16>& rows) {
    const AttentionCall& call = rows.call;
    const int pairs = call.key_dim / 2;
    for (int r = 0; r < rows.chunk.count; ++r) {
        const bf16* query = rows.query(s.begin(rows, r));
        for (int p = 0; p < pairs; p += LANES)
            _mm512_store_si512(&s.query[r][p],
                               _mm512_maskz_loadu_epi32(first_lanes(pairs - p), query + 2 * p));
        for (int d = 0; d < call.value_dim; d += LANES)
            _mm512_store_ps(&s.out[r][d], _mm512_setzero_ps());
    }
}

// Scores of 16 keys, in units of log2. Prefetches to the L1 cache, which holds two tiles.
template <int ROWS>
void score_keys(Few& s, int k, int key_dim, float scale) {
    const int pairs = key_dim / 2;
    __m512 sums[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_ps();
    for (int p = 0; p < pairs; p += LANES) {
        const __mmask16 there = first_lanes(pairs - p);
        __m512i keys[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
            keys[i] = _mm512_maskz_loadu_epi32(there, s.now.keys[k + i] + 2 * p);
        transpose16(keys);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) {
            fetch<_MM_HINT_T0>(s.next.keys[k + i] + 2 * p);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
                sums[r] =
                    _mm512_dpbf16_ps(sums[r], broadcast(s.query[r][p + i]), as_pairs(keys[i]));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) s.lanes(r, k) = sums[r] * scale;
}

// Adds the tile's weighted values to 32 dims of the output.
template <int ROWS>
void add_values(Few& s, int count, int d, __mmask32 there) {
    __m512 sums[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h)
            sums[r][h] = _mm512_load_ps(&s.out[r][d + 16 * h]) * s.shrink[r];
    for (int k = 0; k < count; k += 2) {
        fetch<_MM_HINT_T0>(s.next.values[k] + d);
        fetch<_MM_HINT_T0>(s.next.values[k + 1] + d);
        const __m512i even = _mm512_maskz_loadu_epi16(there, s.now.values[k] + d);
        const __m512i odd = _mm512_maskz_loadu_epi16(there, s.now.values[k + 1] + d);
        const __m512bh left = as_pairs(interleave(even, odd, 0));
        const __m512bh right = as_pairs(interleave(even, odd, 16));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh weight = broadcast(s.weights[r][k / 2]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], weight, left);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], weight, right);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) _mm512_store_ps(&s.out[r][d + 16 * h], sums[r][h]);
}

template <int ROWS>
void attend_tile(Few& s, const AttentionCall& call, const Keys& keys) {
    const int count = keys.filled;
    if (keys.partly) isolate_nonfinite(s.now, count, call.value_dim, NAN_KEY);
    for (int k = 0; k < count; k += LANES)
        score_keys<ROWS>(s, k, call.key_dim, call.scaling * LOG2_E);
    for (int r = 0; r < ROWS; ++r)
        s.settle<2 * LANES>(r, keys, call.softcap, [&](int k, __m512 maximum) {
            const __m512 low = power(s.lanes(r, k) - maximum);
            const __m512 high = power(s.lanes(r, k + LANES) - maximum);
            _mm512_store_si512(&s.weights[r][k / 2],
                               reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
            return low + high;
        });
    for (int d = 0; d < call.value_dim; d += 32)
        add_values<ROWS>(s, count, d, first_halves(call.value_dim - d));
}

void finish(const Few& s, const Rows<bf16>& rows) {
    for (int r = 0; r < rows.chunk.count; ++r) {
        const float sum = _mm512_reduce_add_ps(_mm512_load_ps(s.sum[r]));
        const float share = rows.partial() ? 1.0f : 1.0f / sum;
        for (int d = 0; d < rows.call.value_dim; d += LANES)
            store_dims(rows, s.rows[r], d, _mm512_load_ps(&s.out[r][d]) * share);
        rows.store_sum(s.rows[r], s.maximum[r], sum);
    }
}

}  // namespace

void attend_few(const Rows<bf16>& rows, const Chunk* next) {
    Few& s = few;
    begin(s, rows);
    with_count<FEW_ROWS>(rows.chunk.count, [&](auto count) {
        attend_tiles(s, rows, 2 * LANES, next,
                     [&](const Keys& keys) { attend_tile<count.value>(s, rows.call, keys); });
    });
    finish(s, rows);
}

}  // namespace headstart
