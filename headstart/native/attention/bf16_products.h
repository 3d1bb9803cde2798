// The inner loops of attention: scores, weights, weighted values; see bf16_chunk.cpp.
//
// VECTORS vectors hold the rows of a chunk. Every loop over them and over their sums must be
// unrolled, or the compiler keeps the sums in memory.
#pragma once

#include "bf16_rows.h"
#include "softmax.h"

namespace headstart {

// A thread's scratch memory for one chunk of rows (bf16_chunk.cpp), reused for every chunk.
struct alignas(64) Lanes {
    uint32_t query[MAX_DIM / 2][CHUNK_ROWS];  // pairs of dims
    float out[MAX_DIM][CHUNK_ROWS];
    float scores[TILE][CHUNK_ROWS];      // then pairs of weights in the first half
    uint32_t values[TILE / 2][MAX_DIM];  // pairs of keys
    float maximum[CHUNK_ROWS];           // in units of log2
    float sum[CHUNK_ROWS];
    int32_t first_key[CHUNK_ROWS];  // the range of positions that each row sees
    int32_t last_key[CHUNK_ROWS];
    Row rows[CHUNK_ROWS];
    Tile<bf16> now;
    Tile<bf16> next;
};

inline void prefetch(const bf16* row, int dim) {
    constexpr int LINE = 64 / sizeof(bf16);
    for (int d = 0; d < dim; d += LINE) fetch<_MM_HINT_T1>(row + d);
}

struct ScoreOptions {
    float scale;    // from products to units of log2
    float softcap;  // 0: none
    bool masked;    // true if some row does not see all of the tile
    bool amx;
    int value_dim;
};

// Stores the scores of KEYS keys from sums, raises the maxima, and prefetches later keys.
template <int VECTORS, int KEYS, class Sums>
__attribute__((always_inline)) inline void settle(Lanes& s, int tile, int k, int key_dim,
                                                  const ScoreOptions& options, Sums&& sums) {
    for (int i = 0; i < KEYS; ++i) {
        prefetch(s.next.keys[k + i], key_dim);
        prefetch(s.next.values[k + i], options.value_dim);
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
        __m512 scores[KEYS];
#pragma GCC unroll 8
        for (int i = 0; i < KEYS; ++i) scores[i] = sums(i, v) * options.scale;
        if (options.softcap > 0.0f) {
#pragma GCC unroll 8
            for (int i = 0; i < KEYS; ++i) scores[i] = soft_cap(scores[i], options.softcap);
        }
        if (options.masked) {
            const __m512i first = _mm512_load_si512(&s.first_key[v * 16]);
            const __m512i last = _mm512_load_si512(&s.last_key[v * 16]);
#pragma GCC unroll 8
            for (int i = 0; i < KEYS; ++i) {
                const __m512i at = _mm512_set1_epi32(tile + k + i);
                const __mmask16 seen =
                    _mm512_cmple_epi32_mask(first, at) & _mm512_cmpgt_epi32_mask(last, at);
                scores[i] = _mm512_mask_blend_ps(seen, _mm512_set1_ps(HIDDEN), scores[i]);
            }
        }
        __m512 maximum = _mm512_load_ps(&s.maximum[v * 16]);
#pragma GCC unroll 8
        for (int i = 0; i < KEYS; ++i) {
            maximum = _mm512_max_ps(maximum, scores[i]);
            _mm512_store_ps(&s.scores[k + i][v * 16], scores[i]);
        }
        _mm512_store_ps(&s.maximum[v * 16], maximum);
    }
}

// Computes the scores of KEYS keys from position `tile + k` on for all rows; raises the maxima.
template <int VECTORS, int KEYS>
void score_keys(Lanes& s, int tile, int k, int key_dim, const ScoreOptions& options) {
    __m512 sums[KEYS][VECTORS];
    const bf16* keys[KEYS];
#pragma GCC unroll 8
    for (int i = 0; i < KEYS; ++i) {
        keys[i] = s.now.keys[k + i];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_setzero_ps();
    }
#pragma GCC unroll 4
    for (int p = 0; p < key_dim / 2; ++p) {
        __m512bh query[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            query[v] = as_pairs(_mm512_load_si512(&s.query[p][v * 16]));
#pragma GCC unroll 8
        for (int i = 0; i < KEYS; ++i) {
            const __m512bh key = broadcast(pair_at(keys[i], p));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                sums[i][v] = _mm512_dpbf16_ps(sums[i][v], query[v], key);
        }
    }
    settle<VECTORS, KEYS>(s, tile, k, key_dim, options, [&](int i, int v) { return sums[i][v]; });
}

// Converts scores to weights relative to the new maximum. `shrink` is the factor for older weights.
// The pair of weights of keys k and k + 1 overwrites score k / 2, which was read before.
template <int VECTORS>
void weigh(Lanes& s, int count, const __m512 before[VECTORS], __m512 shrink[VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) {
        const __m512 maximum = _mm512_load_ps(&s.maximum[v * 16]);
        shrink[v] = power(before[v] - maximum);
        __m512 even_sum = _mm512_load_ps(&s.sum[v * 16]) * shrink[v];
        __m512 odd_sum = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int k = 0; k < count; k += 2) {
            const __m512 even = power(_mm512_load_ps(&s.scores[k][v * 16]) - maximum);
            const __m512 odd = power(_mm512_load_ps(&s.scores[k + 1][v * 16]) - maximum);
            even_sum += even;
            odd_sum += odd;
            _mm512_store_si512(&s.scores[k / 2][v * 16], pair_bf16(even, odd));
        }
        _mm512_store_ps(&s.sum[v * 16], even_sum + odd_sum);
    }
}

// Adds the tile's weighted values to LINES dims of the output.
template <int VECTORS, int LINES>
void add_values(Lanes& s, int count, int line, const __m512 shrink[VECTORS]) {
    __m512 sums[LINES][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < LINES; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            sums[i][v] = _mm512_load_ps(&s.out[line + i][v * 16]) * shrink[v];
#pragma GCC unroll 4
    for (int k = 0; k < count / 2; ++k) {
        __m512bh weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            weights[v] = as_pairs(_mm512_load_si512(&s.scores[k][v * 16]));
#pragma GCC unroll 16
        for (int i = 0; i < LINES; ++i) {
            const __m512bh value = broadcast(s.values[k][line + i]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                sums[i][v] = _mm512_dpbf16_ps(sums[i][v], weights[v], value);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < LINES; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) _mm512_store_ps(&s.out[line + i][v * 16], sums[i][v]);
}

// The two products of a whole tile with AMX, for 16 * `vectors` rows (`vectors` is even). They
// write unscaled scores, and add weighted values to `out`. Dims and `count` are multiples of 32.
void multiply_keys(Lanes& s, int count, int key_dim, int vectors);
void multiply_values(Lanes& s, int count, int value_dim, int vectors);

}  // namespace headstart
