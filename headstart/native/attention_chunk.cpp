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
// With 8 rows or fewer, as in decoding, a row takes 2, 4, 8 or 16 neighbouring lanes (WIDTH), each
// with a share of the dims, and as many pairs are broadcast together: no lane is left idle.
//
// The bf16 product adds two products at once, so Q^T and P^T hold pairs in each 32-bit lane. V's
// rows are interleaved two by two into scratch, once per chunk and tile of keys.
//
// Tiles begin at multiples of TILE from the segment's first key on, and a hidden score counts exactly 0, so a row's result is the
// same bit for bit whichever rows share its chunk.
#include <algorithm>
#include <cstring>

#include "attention_products.h"

namespace headstart {
namespace {

thread_local Scratch scratch;

// Whose row each lane is. Lanes beyond the last row repeat it; nobody reads them.
void find_rows(Scratch& s, const Rows& rows, int lanes, int width) {
    const int group = rows.call.heads / rows.call.kv_heads;
    const int32_t* tokens = rows.step.rows + rows.chunk.segment->first_row;
    for (int lane = 0; lane < lanes; ++lane) {
        const int row = rows.chunk.first + std::min(lane / width, rows.chunk.count - 1);
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

// The same where a row takes `width` lanes: each line of s.query holds so many pairs of every row.
void load_wide_queries(Scratch& s, const Rows& rows, int width) {
    const AttentionCall& call = rows.call;
    for (int lane = 0; lane < 16; lane += width) {
        const bf16* from = call.query + s.token[lane] * call.query_strides[0] +
                           s.head[lane] * call.query_strides[1];
        for (int p = 0; p < call.key_dim / 2; p += width)
            std::memcpy(&s.query[p / width][lane], from + 2 * p, width * sizeof(uint32_t));
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

template <int VECTORS, int WIDTH>
void attend_tile(Scratch& s, int tile, int count, const AttentionCall& call,
                 const ScoreOptions& options) {
    // So many sums at once that latencies overlap and loads are few, in the registers there are.
    constexpr int KEYS = VECTORS == 4 ? 4 : 8;
    constexpr int LINES = VECTORS == 4 ? 4 : VECTORS == 1 ? 16 : 8;
    __m512 before[VECTORS], shrink[VECTORS];
    for (int v = 0; v < VECTORS; ++v) before[v] = _mm512_load_ps(&s.maximum[v * 16]);
    for (int k = 0; k < count; k += KEYS)
        score_keys<VECTORS, WIDTH, KEYS>(s, tile, k, call.key_dim, options);
    weigh<VECTORS>(s, count, before, shrink);
    const int lines = call.value_dim / WIDTH;
    int line = 0;
    for (; line + LINES <= lines; line += LINES)
        add_values<VECTORS, WIDTH, LINES>(s, count, line, shrink);
    for (; line < lines; ++line) add_values<VECTORS, WIDTH, 1>(s, count, line, shrink);
}

template <int VECTORS, int WIDTH>
void attend_keys(Scratch& s, const Rows& rows) {
    const AttentionCall& call = rows.call;
    int first = s.first_key[0], last = s.last_key[0], all_first = first, all_last = last;
    for (int lane = 1; lane < rows.chunk.count * WIDTH; ++lane) {
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
        attend_tile<VECTORS, WIDTH>(s, tile, count, call, options);
    }
}

float* partial_of(const Scratch& s, const Rows& rows, int lane) {
    const AttentionCall& call = rows.call;
    const int64_t number = rows.chunk.segment->partial + s.row[lane];
    return rows.step.partials + (number * call.heads + s.head[lane]) * (2 + call.value_dim);
}

// 16 dims of a row's output from `d` on: to the result, or to a partial.
inline void store_dims(const Scratch& s, const Rows& rows, int lane, int d, __m512 dims) {
    const AttentionCall& call = rows.call;
    const __mmask16 there = first_lanes(call.value_dim - d);
    if (rows.chunk.segment->partial >= 0) {
        _mm512_mask_storeu_ps(partial_of(s, rows, lane) + 2 + d, there, dims);
    } else {
        const int64_t at = static_cast<int64_t>(s.token[lane]) * call.heads + s.head[lane];
        _mm256_mask_storeu_epi16(call.out + at * call.value_dim + d, there,
                                 reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(dims)));
    }
}

// The output of 16 lanes, one row after the other.
void store_rows(Scratch& s, const Rows& rows, int v) {
    const int lanes = std::min(16, rows.chunk.count - v * 16);
    const bool partial = rows.chunk.segment->partial >= 0;
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 share = partial ? one : _mm512_div_ps(one, _mm512_load_ps(&s.sum[v * 16]));
    for (int d = 0; d < rows.call.value_dim; d += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i)
            r[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(&s.out[d + i][v * 16]), share));
        transpose16(r);
        for (int i = 0; i < lanes; ++i)
            store_dims(s, rows, v * 16 + i, d, _mm512_castsi512_ps(r[i]));
    }
}

// The same where a row takes `width` lanes.
void store_wide_rows(Scratch& s, const Rows& rows, int width) {
    const bool partial = rows.chunk.segment->partial >= 0;
    alignas(64) float out[MAX_DIM];
    for (int lane = 0; lane < rows.chunk.count * width; lane += width) {
        for (int d = 0; d < rows.call.value_dim; d += width)
            std::memcpy(out + d, &s.out[d / width][lane], width * sizeof(float));
        const __m512 share = _mm512_set1_ps(partial ? 1.0f : 1.0f / s.sum[lane]);
        for (int d = 0; d < rows.call.value_dim; d += 16)
            store_dims(s, rows, lane, d, _mm512_mul_ps(_mm512_load_ps(out + d), share));
    }
}

// Not inlined, so that the thread's scratch is looked up once.
template <int VECTORS, int WIDTH>
__attribute__((noinline)) void attend_rows(Scratch& s, const Rows& rows) {
    find_rows(s, rows, VECTORS * 16, WIDTH);
    if (WIDTH == 1) {
        load_queries(s, rows, VECTORS);
    } else {
        load_wide_queries(s, rows, WIDTH);
    }
    begin(s, rows, VECTORS * 16);
    attend_keys<VECTORS, WIDTH>(s, rows);
    if (WIDTH == 1) {
        for (int v = 0; v < VECTORS; ++v) store_rows(s, rows, v);
    } else {
        store_wide_rows(s, rows, WIDTH);
    }
    if (rows.chunk.segment->partial < 0) return;
    for (int lane = 0; lane < rows.chunk.count * WIDTH; lane += WIDTH) {
        float* to = partial_of(s, rows, lane);
        to[0] = s.maximum[lane];
        to[1] = s.sum[lane];
    }
}

// How many lanes each row may take. Only for segments that are as small as a whole: which lanes a
// row's dims are summed in must not depend on where it stands among others.
int width_for(const Rows& rows) {
    const AttentionCall& call = rows.call;
    const int count = rows.chunk.segment->num_rows * (call.heads / call.kv_heads);
    int width = 1;
    while (2 * width * count <= 16 && call.key_dim % (4 * width) == 0 &&
           call.value_dim % (2 * width) == 0)
        width *= 2;
    return width;
}

}  // namespace

void attend_chunk(const AttentionStep& step, const AttentionCall& call, const Chunk& chunk) {
    const Rows rows{step, call, chunk};
    Scratch& s = scratch;
    switch (width_for(rows)) {
        case 2: return attend_rows<1, 2>(s, rows);
        case 4: return attend_rows<1, 4>(s, rows);
        case 8: return attend_rows<1, 8>(s, rows);
        case 16: return attend_rows<1, 16>(s, rows);
    }
    switch ((chunk.count + 15) / 16) {
        case 1: return attend_rows<1, 1>(s, rows);
        case 2: return attend_rows<2, 1>(s, rows);
        case 3: return attend_rows<3, 1>(s, rows);
        default: return attend_rows<4, 1>(s, rows);
    }
}

}  // namespace headstart
