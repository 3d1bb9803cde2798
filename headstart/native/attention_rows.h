// A chunk's rows and keys: their addresses, and code that both attention kernels share.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention.h"

namespace headstart {

constexpr int TILE = 64;  // keys
// A hidden score, and the maximum before any score: both finite, since inf - inf is NaN, and far
// enough apart that 2^(HIDDEN - NO_MAXIMUM) is 0.
constexpr float HIDDEN = -3e38f;
constexpr float NO_MAXIMUM = -1e30f;
constexpr float LOG2_E = 1.44269504f;

// Addresses of K and V of consecutive positions.
struct Tile {
    const bf16* keys[TILE];
    const bf16* values[TILE];
};

struct NanRow {
    bf16 numbers[MAX_DIM];
    constexpr NanRow() : numbers() {
        for (bf16& number : numbers) number = 0x7fc0;
    }
};
inline constexpr NanRow NAN_ROW;
inline constexpr bf16 ZERO_ROW[MAX_DIM] = {};

// For a tile that some rows see only in part. A weight of 0 times a value that is not finite is
// NaN, so a hidden key would affect rows that do not see it. Such a value becomes zeros and its key
// NaN: the score is then NaN for every row that sees it, and masked for every other row.
inline void isolate_nonfinite(Tile& tile, int count, int value_dim) {
    for (int k = 0; k < count; ++k) {
        __mmask32 found = 0;
        for (int d = 0; d < value_dim; d += 32)
            found |= nonfinite(load_pairs(tile.values[k] + d, value_dim - d));
        if (found == 0) continue;
        tile.keys[k] = NAN_ROW.numbers;
        tile.values[k] = ZERO_ROW;
    }
}

// A row's token and query head, and the positions that it sees.
struct Row {
    int32_t number;  // of the segment
    int32_t token;
    int32_t head;
    int32_t first_key;
    int32_t last_key;
};

struct Rows {
    const AttentionStep& step;
    const AttentionCall& call;
    const Chunk& chunk;

    // Row `at` of the chunk.
    Row row(int at) const {
        const Segment& segment = *chunk.segment;
        const int group = call.heads / call.kv_heads, row = chunk.first + at;
        const int number = row / group, end = segment.first_position + number + 1;
        const int first = call.window > 0 ? end - call.window : 0;
        return {number, step.rows[segment.first_row + number], chunk.kv_head * group + row % group,
                std::max(first, segment.first_key), std::min(end, segment.last_key)};
    }

    const bf16* query(const Row& row) const {
        return call.query + row.token * call.query_strides[0] + row.head * call.query_strides[1];
    }

    bool partial() const { return chunk.segment->partial >= 0; }

    // The address of a row's partial maximum, sum and output, if several segments hold its keys.
    float* partial_of(const Row& row) const {
        const int64_t number = chunk.segment->partial + row.number;
        return step.partials + (number * call.heads + row.head) * (2 + call.value_dim);
    }

    // A sink is a score whose value is zero: it only initialises the maximum and the sum.
    bool sinks() const { return call.sinks != nullptr && chunk.segment->first_key == 0; }

    // 16 dims of a row's output from `d` on: to the result, or to a partial.
    void store(const Row& row, int d, __m512 dims) const {
        const int left = call.value_dim - d;
        if (partial()) {
            _mm512_mask_storeu_ps(partial_of(row) + 2 + d, first_lanes(left), dims);
        } else {
            const int64_t at = static_cast<int64_t>(row.token) * call.heads + row.head;
            headstart::store(call.out + at * call.value_dim + d, left, dims);
        }
    }

    // Addresses of K and V of TILE positions from `first` on; from `end` on the last one repeats.
    void find_tile(Tile& tile, int first, int end) const {
        const int32_t* table = step.tables + chunk.segment->table;
        const int size = 1 << step.block_shift;
        for (int k = 0; k < TILE;) {
            const int position = std::min(first + k, end - 1), offset = position & (size - 1);
            const int64_t block = table[position >> step.block_shift], slot = block * size + offset;
            const int64_t head = slot * call.kv_heads + chunk.kv_head;
            const bf16* key = call.keys + head * call.key_dim;
            const bf16* value = call.values + head * call.value_dim;
            const int count = std::min({TILE - k, size - offset, std::max(end - position, 1)});
            for (int i = 0; i < count; ++i, ++k) {
                tile.keys[k] = key + int64_t{i} * call.kv_heads * call.key_dim;
                tile.values[k] = value + int64_t{i} * call.kv_heads * call.value_dim;
            }
        }
    }
};

// cap * tanh(x / cap), in units of log2 before and after.
inline __m512 soft_cap(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 e = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap)));
    const __m512 t = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one));
    return _mm512_mul_ps(_mm512_set1_ps(cap * LOG2_E), _mm512_sub_ps(one, t));
}

inline __m512bh as_pairs(__m512i pairs) { return reinterpret_cast<__m512bh>(pairs); }

// One pair in every 32-bit lane.
inline __m512bh broadcast(uint32_t pair) {
    return as_pairs(_mm512_set1_epi32(static_cast<int>(pair)));
}

// x[0] y[0] x[1] y[1] ... of 32 bf16 each, up to index 15, and from there on.
inline __m512i interleave_low(__m512i x, __m512i y) {
    const __m512i order = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
        35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(x, order, y);
}

inline __m512i interleave_high(__m512i x, __m512i y) {
    const __m512i order = _mm512_set_epi16(
        63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53, 21, 52,
        20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(x, order, y);
}

// Pair `at` of a row in bf16.
inline uint32_t pair_at(const bf16* row, int at) {
    uint32_t pair;
    std::memcpy(&pair, row + 2 * at, sizeof pair);
    return pair;
}

}  // namespace headstart
