// Attention of one chunk of rows over its keys: one pass with an online softmax (Milakov and
// Gimelshein 2018; FlashAttention), all of it in registers and the first cache levels.
//
// Rows lie in the lanes of vectors, 16 to each; keys and value dimensions are broadcast. So K is
// used as it lies in memory, the maximum and the sum of a row need no reduction across lanes, and
// the mask is a comparison of 16 positions with one number:
//
//     scores^T [key, row]  +=  K [key, pair of dims] (broadcast)  *  Q^T [pair of dims, row]
//     out^T    [dim, row]  +=  V [pair of keys, dim] (broadcast)  *  P^T [pair of keys, row]
//
// The bf16 product adds two products at once, so Q^T and P^T hold pairs in each 32-bit lane. V's
// rows are interleaved two by two into scratch, once per chunk and tile of keys.
//
// Tiles begin at multiples of TILE from the segment's first key on, and a hidden score counts exactly 0, so a row's result is the
// same bit for bit whichever rows share its chunk.
#include <algorithm>
#include <cstring>

#include "attention.h"

namespace headstart {
namespace {

constexpr int TILE = 64;
constexpr int STEP = 8;  // a tile is cut short to a multiple of this
// A score that is hidden, and a maximum before any score: both finite, since inf - inf is NaN,
// and far enough apart that 2^(HIDDEN - NO_MAXIMUM) is 0.
constexpr float HIDDEN = -3e38f;
constexpr float NO_MAXIMUM = -1e30f;
constexpr float LOG2_E = 1.44269504f;

// Where the K and V of some consecutive positions are.
struct Tile {
    const bf16* keys[TILE];
    const bf16* values[TILE];
};

// Everything of one chunk, per thread and used again and again.
struct alignas(64) Scratch {
    uint32_t query[MAX_DIM / 2][CHUNK_ROWS];  // pairs of dims
    float out[MAX_DIM][CHUNK_ROWS];
    float scores[TILE][CHUNK_ROWS];          // then pairs of weights in the first half
    uint32_t values[TILE / 2][MAX_DIM];      // pairs of keys
    float maximum[CHUNK_ROWS];               // in units of log2
    float sum[CHUNK_ROWS];
    int32_t row[CHUNK_ROWS];  // of the segment
    int32_t token[CHUNK_ROWS];
    int32_t head[CHUNK_ROWS];
    int32_t first_key[CHUNK_ROWS];  // what each row sees
    int32_t last_key[CHUNK_ROWS];
    Tile now;
    Tile next;
};

thread_local Scratch scratch;

struct Rows {
    const AttentionStep& step;
    const AttentionCall& call;
    const Chunk& chunk;
};

// Whose row each lane is. Lanes beyond the last row repeat it; nobody reads them.
void find_rows(Scratch& s, const Rows& rows, int lanes) {
    const int group = rows.call.heads / rows.call.kv_heads;
    const int32_t* tokens = rows.step.rows + rows.chunk.segment->first_row;
    for (int lane = 0; lane < lanes; ++lane) {
        const int row = rows.chunk.first + std::min(lane, rows.chunk.count - 1);
        s.row[lane] = row / group;
        s.token[lane] = tokens[row / group];
        s.head[lane] = rows.chunk.kv_head * group + row % group;
    }
}

void load_queries(Scratch& s, const Rows& rows, int vectors) {
    const AttentionCall& call = rows.call;
    const int pairs = call.key_dim / 2;
    for (int v = 0; v < vectors; ++v) {
        const bf16* from[16];
        for (int i = 0; i < 16; ++i) {
            const int lane = v * 16 + i;
            from[i] = call.query + s.token[lane] * call.query_strides[0] +
                      s.head[lane] * call.query_strides[1];
        }
        for (int p = 0; p < pairs; p += 16) {
            const __mmask16 there = first_lanes(pairs - p);
            __m512i r[16];
            for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(there, from[i] + 2 * p);
            transpose16(r);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(&s.query[p + i][v * 16], r[i]);
        }
    }
}

// A sink is a score whose value is zero: it only begins the maximum and the sum.
void begin(Scratch& s, const Rows& rows, int lanes) {
    const AttentionCall& call = rows.call;
    const Segment& segment = *rows.chunk.segment;
    const bool sinks = call.sinks != nullptr && segment.first_key == 0;
    for (int lane = 0; lane < lanes; ++lane) {
        const int end = segment.first_position + s.row[lane] + 1;
        s.last_key[lane] = std::min(end, segment.last_key);
        const int first = call.window > 0 ? end - call.window : 0;
        s.first_key[lane] = std::max(first, segment.first_key);
        s.maximum[lane] = sinks ? call.sinks[s.head[lane]] * LOG2_E : NO_MAXIMUM;
        s.sum[lane] = sinks ? 1.0f : 0.0f;
    }
    for (int d = 0; d < call.value_dim; ++d) std::memset(s.out[d], 0, lanes * sizeof(float));
}

int64_t slot_of(const Rows& rows, int position) {
    const int32_t* table = rows.step.tables + rows.chunk.segment->table;
    const int shift = rows.step.block_shift;
    const int64_t block = table[position >> shift];
    return (block << shift) | (position & ((1 << shift) - 1));
}

const bf16* key_at(const Rows& rows, int64_t slot) {
    return rows.call.keys + (slot * rows.call.kv_heads + rows.chunk.kv_head) * rows.call.key_dim;
}

const bf16* value_at(const Rows& rows, int64_t slot) {
    return rows.call.values +
           (slot * rows.call.kv_heads + rows.chunk.kv_head) * rows.call.value_dim;
}

// Where K and V of positions `first` .. `first` + TILE - 1 are; behind `end` the last one again.
void find_tile(Tile& tile, const Rows& rows, int first, int end) {
    for (int k = 0; k < TILE; ++k) {
        const int64_t slot = slot_of(rows, std::min(first + k, end - 1));
        tile.keys[k] = key_at(rows, slot);
        tile.values[k] = value_at(rows, slot);
    }
}

// Rows of V two by two, so that each 32-bit number is one dim of two keys.
void pair_values(Scratch& s, int count, int value_dim) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
        35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int k = 0; k < count; k += 2) {
        uint32_t* to = s.values[k / 2];
        for (int d = 0; d < value_dim; d += 32) {
            const __mmask32 there = first_halves(value_dim - d);
            const __m512i even = _mm512_maskz_loadu_epi16(there, s.now.values[k] + d);
            const __m512i odd = _mm512_maskz_loadu_epi16(there, s.now.values[k + 1] + d);
            _mm512_store_si512(to + d, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to + d + 16, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}

inline __m512bh as_pairs(__m512i pairs) { return reinterpret_cast<__m512bh>(pairs); }

inline __m512bh broadcast(const void* pair) {
    int32_t number;
    std::memcpy(&number, pair, sizeof number);
    return as_pairs(_mm512_set1_epi32(number));
}

// cap * tanh(x / cap), in units of log2 before and after.
inline __m512 soft_cap(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 e = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap)));
    const __m512 t = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one));
    return _mm512_mul_ps(_mm512_set1_ps(cap * LOG2_E), _mm512_sub_ps(one, t));
}

// Blocks lie anywhere, so no prefetcher of the CPU guesses which row comes next; and asked for all
// at once, the rows of a tile are more than it can wait for.
inline void prefetch(const bf16* row, int dim) {
    constexpr int LINE = 64 / sizeof(bf16);
    for (int d = 0; d < dim; d += LINE)
        _mm_prefetch(reinterpret_cast<const char*>(row + d), _MM_HINT_T0);
}

struct ScoreOptions {
    float scale;    // from products to units of log2
    float softcap;  // 0: none
    bool masked;    // whether some row does not see all of the tile
    int value_dim;
};

// Scores of KEYS keys from position `tile + k` on for all rows; raises the maxima.
template <int VECTORS, int KEYS>
void score_keys(Scratch& s, int tile, int k, int key_dim, const ScoreOptions& options) {
    __m512 sums[KEYS][VECTORS];
    const bf16* keys[KEYS];
    for (int i = 0; i < KEYS; ++i) {
        keys[i] = s.now.keys[k + i];
        for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_setzero_ps();
    }
    for (int p = 0; p < key_dim / 2; ++p) {
        __m512bh query[VECTORS];
        for (int v = 0; v < VECTORS; ++v)
            query[v] = as_pairs(_mm512_load_si512(&s.query[p][v * 16]));
        for (int i = 0; i < KEYS; ++i) {
            const __m512bh key = broadcast(keys[i] + 2 * p);
            for (int v = 0; v < VECTORS; ++v)
                sums[i][v] = _mm512_dpbf16_ps(sums[i][v], query[v], key);
        }
    }
    for (int i = 0; i < KEYS; ++i) {
        prefetch(s.next.keys[k + i], key_dim);
        prefetch(s.next.values[k + i], options.value_dim);
    }
    const __m512 scale = _mm512_set1_ps(options.scale);
    for (int v = 0; v < VECTORS; ++v) {
        __m512 maximum = _mm512_load_ps(&s.maximum[v * 16]);
        for (int i = 0; i < KEYS; ++i) {
            __m512 x = _mm512_mul_ps(sums[i][v], scale);
            if (options.softcap > 0.0f) x = soft_cap(x, options.softcap);
            if (options.masked) {
                const __m512i at = _mm512_set1_epi32(tile + k + i);
                const __m512i first = _mm512_load_si512(&s.first_key[v * 16]);
                const __m512i last = _mm512_load_si512(&s.last_key[v * 16]);
                const __mmask16 seen =
                    _mm512_cmple_epi32_mask(first, at) & _mm512_cmpgt_epi32_mask(last, at);
                x = _mm512_mask_blend_ps(seen, _mm512_set1_ps(HIDDEN), x);
            }
            maximum = _mm512_max_ps(maximum, x);
            _mm512_store_ps(&s.scores[k + i][v * 16], x);
        }
        _mm512_store_ps(&s.maximum[v * 16], maximum);
    }
}

// Scores become weights relative to the new maximum; `shrink` is what older weights count now.
// The pair of weights of keys k and k + 1 takes the place of score k / 2, which is read by then.
template <int VECTORS>
void weigh(Scratch& s, int count, const __m512 before[VECTORS], __m512 shrink[VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) {
        const __m512 maximum = _mm512_load_ps(&s.maximum[v * 16]);
        shrink[v] = exp2(_mm512_sub_ps(before[v], maximum));
        __m512 even_sum = _mm512_mul_ps(_mm512_load_ps(&s.sum[v * 16]), shrink[v]);
        __m512 odd_sum = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int k = 0; k < count; k += 2) {
            const __m512 even = exp2(_mm512_sub_ps(_mm512_load_ps(&s.scores[k][v * 16]), maximum));
            const __m512 odd =
                exp2(_mm512_sub_ps(_mm512_load_ps(&s.scores[k + 1][v * 16]), maximum));
            even_sum = _mm512_add_ps(even_sum, even);
            odd_sum = _mm512_add_ps(odd_sum, odd);
            _mm512_store_si512(&s.scores[k / 2][v * 16], pair_bf16(even, odd));
        }
        _mm512_store_ps(&s.sum[v * 16], _mm512_add_ps(even_sum, odd_sum));
    }
}

// Adds the tile's weighted values to DIMS dims of the output.
template <int VECTORS, int DIMS>
void add_values(Scratch& s, int count, int d, const __m512 shrink[VECTORS]) {
    __m512 sums[DIMS][VECTORS];
    for (int i = 0; i < DIMS; ++i)
        for (int v = 0; v < VECTORS; ++v)
            sums[i][v] = _mm512_mul_ps(_mm512_load_ps(&s.out[d + i][v * 16]), shrink[v]);
    for (int k = 0; k < count / 2; ++k) {
        __m512bh weights[VECTORS];
        for (int v = 0; v < VECTORS; ++v)
            weights[v] = as_pairs(_mm512_load_si512(&s.scores[k][v * 16]));
        for (int i = 0; i < DIMS; ++i) {
            const __m512bh value = broadcast(&s.values[k][d + i]);
            for (int v = 0; v < VECTORS; ++v)
                sums[i][v] = _mm512_dpbf16_ps(sums[i][v], weights[v], value);
        }
    }
    for (int i = 0; i < DIMS; ++i)
        for (int v = 0; v < VECTORS; ++v) _mm512_store_ps(&s.out[d + i][v * 16], sums[i][v]);
}

template <int VECTORS>
void attend_tile(Scratch& s, int tile, int count, const AttentionCall& call,
                 const ScoreOptions& options) {
    // As many keys or dims at once as there are registers for: latencies overlap, loads are few.
    constexpr int AT_ONCE = VECTORS == 4 ? 4 : 8;
    __m512 before[VECTORS], shrink[VECTORS];
    for (int v = 0; v < VECTORS; ++v) before[v] = _mm512_load_ps(&s.maximum[v * 16]);
    for (int k = 0; k < count; k += AT_ONCE)
        score_keys<VECTORS, AT_ONCE>(s, tile, k, call.key_dim, options);
    weigh<VECTORS>(s, count, before, shrink);
    int d = 0;
    for (; d + AT_ONCE <= call.value_dim; d += AT_ONCE)
        add_values<VECTORS, AT_ONCE>(s, count, d, shrink);
    for (; d < call.value_dim; ++d) add_values<VECTORS, 1>(s, count, d, shrink);
}

template <int VECTORS>
void attend_keys(Scratch& s, const Rows& rows) {
    const AttentionCall& call = rows.call;
    int first = s.first_key[0], last = s.last_key[0], all_first = first, all_last = last;
    for (int lane = 1; lane < rows.chunk.count; ++lane) {
        first = std::min(first, s.first_key[lane]);
        all_first = std::max(all_first, s.first_key[lane]);
        last = std::max(last, s.last_key[lane]);
        all_last = std::min(all_last, s.last_key[lane]);
    }
    ScoreOptions options{call.scaling * LOG2_E, call.softcap, false, call.value_dim};
    const int origin = rows.chunk.segment->first_key;
    const int start = origin + (first - origin) / TILE * TILE;
    find_tile(s.next, rows, start, last);
    for (int tile = start; tile < last; tile += TILE) {
        const int count = std::min(TILE, (last - tile + STEP - 1) / STEP * STEP);
        options.masked = tile < all_first || tile + count > all_last;
        s.now = s.next;
        find_tile(s.next, rows, tile + TILE, last);
        pair_values(s, count, call.value_dim);
        attend_tile<VECTORS>(s, tile, count, call, options);
    }
}

float* partial_of(const Scratch& s, const Rows& rows, int lane) {
    const AttentionCall& call = rows.call;
    const int64_t number = rows.chunk.segment->partial + s.row[lane];
    return rows.step.partials + (number * call.heads + s.head[lane]) * (2 + call.value_dim);
}

// The output of 16 lanes, one row after the other: to the result, or as a partial.
void store_rows(Scratch& s, const Rows& rows, int v) {
    const AttentionCall& call = rows.call;
    const int lanes = std::min(16, rows.chunk.count - v * 16);
    const bool partial = rows.chunk.segment->partial >= 0;
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 share = partial ? one : _mm512_div_ps(one, _mm512_load_ps(&s.sum[v * 16]));
    for (int d = 0; d < call.value_dim; d += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i)
            r[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(&s.out[d + i][v * 16]), share));
        transpose16(r);
        const __mmask16 there = first_lanes(call.value_dim - d);
        for (int i = 0; i < lanes; ++i) {
            const __m512 row = _mm512_castsi512_ps(r[i]);
            const int lane = v * 16 + i;
            if (partial) {
                _mm512_mask_storeu_ps(partial_of(s, rows, lane) + 2 + d, there, row);
            } else {
                const int64_t at = static_cast<int64_t>(s.token[lane]) * call.heads + s.head[lane];
                _mm256_mask_storeu_epi16(call.out + at * call.value_dim + d, there,
                                         reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(row)));
            }
        }
    }
}

// Not inlined, so that the thread's scratch is looked up once.
template <int VECTORS>
__attribute__((noinline)) void attend_rows(Scratch& s, const Rows& rows) {
    find_rows(s, rows, VECTORS * 16);
    load_queries(s, rows, VECTORS);
    begin(s, rows, VECTORS * 16);
    attend_keys<VECTORS>(s, rows);
    for (int v = 0; v < VECTORS; ++v) store_rows(s, rows, v);
    if (rows.chunk.segment->partial < 0) return;
    for (int lane = 0; lane < rows.chunk.count; ++lane) {
        float* to = partial_of(s, rows, lane);
        to[0] = s.maximum[lane];
        to[1] = s.sum[lane];
    }
}

}  // namespace

void attend_chunk(const AttentionStep& step, const AttentionCall& call, const Chunk& chunk) {
    const Rows rows{step, call, chunk};
    switch ((chunk.count + 15) / 16) {
        case 1: return attend_rows<1>(scratch, rows);
        case 2: return attend_rows<2>(scratch, rows);
        case 3: return attend_rows<3>(scratch, rows);
        default: return attend_rows<4>(scratch, rows);
    }
}

}  // namespace headstart
