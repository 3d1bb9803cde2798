// Attention of one chunk of rows over its keys: one pass with an online softmax (Milakov and
// Gimelshein 2018; FlashAttention), all of it in registers and the L1 and L2 caches.
//
// The 16 lanes of a vector hold rows; keys and value dimensions are broadcast. So K needs no
// transposition, the maximum and the sum of a row need no reduction across lanes, and the mask is a
// comparison of 16 positions with one number:
//
//     scores^T [key, row]  +=  K [key, pair of dims] (broadcast)  *  Q^T [pair of dims, row]
//     out^T    [dim, row]  +=  V [pair of keys, dim] (broadcast)  *  P^T [pair of keys, row]
//
// The bf16 instruction adds two products, so Q^T and P^T hold pairs in each 32-bit lane. V's
// rows are interleaved two by two into scratch, once per chunk and tile of keys.
//
// Tiles begin at multiples of TILE, counted from the segment's first key, and a hidden score has
// exactly weight 0. So the bits of a row's result do not depend on the other rows of its chunk.
#include "rows.h"  // before avx512.h: float32.cpp includes it too

#include "../avx512.h"

#include "bf16_products.h"

namespace headstart {
namespace {

// A pointer, since the compiler recomputes the address of a thread-local object in the inner loops.
thread_local const std::unique_ptr<Lanes> scratch = std::make_unique<Lanes>();

// Lanes beyond the last row repeat it; their results are not used.
void begin(Lanes& s, const Rows<bf16>& rows, int lanes) {
    const AttentionCall& call = rows.call;
    for (int lane = 0; lane < lanes; ++lane) {
        const Row row = s.rows[lane] = rows.row(std::min(lane, rows.chunk.count - 1));
        s.first_key[lane] = row.first_key;
        s.last_key[lane] = row.last_key;
        s.maximum[lane] = rows.first_maximum(row);
        s.sum[lane] = rows.first_sum();
    }
    for (int d = 0; d < call.value_dim; ++d) std::memset(s.out[d], 0, lanes * sizeof(float));
}

void load_queries(Lanes& s, const Rows<bf16>& rows, int vectors) {
    const int pairs = rows.call.key_dim / 2;
    for (int v = 0; v < vectors; ++v) {
        const bf16* from[16];
        for (int i = 0; i < 16; ++i) from[i] = rows.query(s.rows[v * 16 + i]);
        for (int p = 0; p < pairs; p += 16) {
            const __mmask16 there = first_lanes(pairs - p);
            __m512i r[16];
            for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(there, from[i] + 2 * p);
            transpose16(r);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(&s.query[p + i][v * 16], r[i]);
        }
    }
}

// Interleaves pairs of rows of V, so that each 32-bit number is one dim of two keys. Whole
// vectors are read without a mask; masked reads take twice as long.
void pair_values(Lanes& s, int count, int value_dim) {
    for (int k = 0; k < count; k += 2) {
        const bf16* even = s.now.values[k];
        const bf16* odd = s.now.values[k + 1];
        uint32_t* to = s.values[k / 2];
        for (int d = 0; d < value_dim; d += 32) {
            const __m512i x = load_pairs(even + d, value_dim - d);
            const __m512i y = load_pairs(odd + d, value_dim - d);
            _mm512_store_si512(to + d, interleave(x, y, 0));
            _mm512_store_si512(to + d + 16, interleave(x, y, 16));
        }
    }
}

// Rescales the output to the new maxima.
template <int VECTORS>
void shrink_out(Lanes& s, int value_dim, const __m512 shrink[VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) {
        if (_mm512_cmp_ps_mask(shrink[v], _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) continue;
        for (int d = 0; d < value_dim; ++d)
            _mm512_store_ps(&s.out[d][v * 16], _mm512_load_ps(&s.out[d][v * 16]) * shrink[v]);
    }
}

template <int VECTORS>
void attend_tile(Lanes& s, int tile, int count, const AttentionCall& call,
                 const ScoreOptions& options) {
    // Enough sums at a time to hide latencies and to save loads, within the 32 registers.
    constexpr int KEYS = VECTORS == 4 ? 4 : 8;
    constexpr int LINES = VECTORS == 4 ? 4 : VECTORS == 1 ? 16 : 8;
    constexpr int EVEN = (VECTORS + 1) / 2 * 2;
    __m512 before[VECTORS], shrink[VECTORS];
    for (int v = 0; v < VECTORS; ++v) before[v] = _mm512_load_ps(&s.maximum[v * 16]);
    if (options.amx) {
        multiply_keys(s, count, call.key_dim, EVEN);
        for (int k = 0; k < count; k += 8)
            settle<VECTORS, 8>(s, tile, k, call.key_dim, options, [&](int i, int v) {
                return _mm512_load_ps(&s.scores[k + i][v * 16]);
            });
        weigh<VECTORS>(s, count, before, shrink);
        shrink_out<VECTORS>(s, call.value_dim, shrink);
        return multiply_values(s, count, call.value_dim, EVEN);
    }
    for (int k = 0; k < count; k += KEYS)
        score_keys<VECTORS, KEYS>(s, tile, k, call.key_dim, options);
    weigh<VECTORS>(s, count, before, shrink);
    const int lines = call.value_dim;
    int line = 0;
    for (; line + LINES <= lines; line += LINES) add_values<VECTORS, LINES>(s, count, line, shrink);
    for (; line < lines; ++line) add_values<VECTORS, 1>(s, count, line, shrink);
}

// Writes the output of 16 lanes, row by row.
void store_rows(Lanes& s, const Rows<bf16>& rows, int v) {
    const int lanes = std::min(16, rows.chunk.count - v * 16);
    __m512 share = _mm512_set1_ps(1.0f);
    if (!rows.partial()) share = share / _mm512_load_ps(&s.sum[v * 16]);
    for (int d = 0; d < rows.call.value_dim; d += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i)
            r[i] = _mm512_castps_si512(_mm512_load_ps(&s.out[d + i][v * 16]) * share);
        transpose16(r);
        for (int i = 0; i < lanes; ++i)
            store_dims(rows, s.rows[v * 16 + i], d, _mm512_castsi512_ps(r[i]));
    }
}

template <int VECTORS>
void attend_rows(Lanes& s, const Rows<bf16>& rows) {
    const AttentionCall& call = rows.call;
    const bool amx = use_amx && call.key_dim % 32 == 0 && call.value_dim % 32 == 0;
    begin(s, rows, VECTORS * 16);
    load_queries(s, rows, VECTORS);
    attend_tiles(s, rows, amx ? 32 : 8, nullptr, [&](const Keys& keys) {
        if (keys.partly) isolate_nonfinite(s.now, keys.filled, call.value_dim, NAN_KEY);
        if (!amx) pair_values(s, keys.filled, call.value_dim);
        attend_tile<VECTORS>(
            s, keys.first, keys.filled, call,
            {call.scaling * LOG2_E, call.softcap, keys.partly_filled, amx, call.value_dim});
    });
    release_tiles();
    for (int v = 0; v < VECTORS; ++v) store_rows(s, rows, v);
    for (int lane = 0; lane < rows.chunk.count; ++lane)
        rows.store_sum(s.rows[lane], s.maximum[lane], s.sum[lane]);
}

}  // namespace

void attend_chunk(const Rows<bf16>& rows) {
    Lanes& s = *scratch;
    with_count<CHUNK_VECTORS>((rows.chunk.count + 15) / 16,
                              [&](auto vectors) { attend_rows<vectors.value>(s, rows); });
}

}  // namespace headstart
