// A chunk's rows and keys: their addresses, and the positions that rows see.
#pragma once

#include "attention.h"

namespace headstart {

constexpr int TILE = 64;  // keys
// A hidden score, and the maximum before the first score. Both are finite, since inf - inf is NaN,
// and 2^(HIDDEN - NO_MAXIMUM) is 0.
constexpr float HIDDEN = -3e38f;
constexpr float NO_MAXIMUM = -1e30f;
constexpr float LOG2_E = 1.44269504f;

// Addresses of K and V of consecutive positions.
template <class Stored>
struct Tile {
    const Stored* keys[TILE];
    const Stored* values[TILE];
};

template <>
struct Tile<int8_t> {
    const int8_t* keys[TILE];
    const int8_t* values[TILE];
    const float* key_scales[TILE];
    const float* value_scales[TILE];
};

// A row's token and query head, and the positions that it sees.
struct Row {
    int32_t number;  // of the token in the segment
    int32_t token;
    int32_t head;
    int32_t first_key;
    int32_t last_key;
};

template <class Number, class Stored = Number>
struct Rows {
    const AttentionStep& step;
    const Call<Number, Stored>& call;
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

    const Number* query(const Row& row) const {
        return call.query + row.token * call.query_strides[0] + row.head * call.query_strides[1];
    }

    Number* out(const Row& row) const {
        return call.out + (int64_t{row.token} * call.heads + row.head) * call.value_dim;
    }

    bool partial() const { return chunk.segment->partial >= 0; }

    // The address of a row's partial maximum, sum and output, if several segments hold its keys.
    float* partial_of(const Row& row) const {
        const int64_t number = chunk.segment->partial + row.number;
        return step.partials + (number * call.heads + row.head) * (2 + call.value_dim);
    }

    // Writes the maximum and the sum of a row, if it is partial.
    void store_sum(const Row& row, float maximum, float sum) const {
        if (!partial()) return;
        float* to = partial_of(row);
        to[0] = maximum;
        to[1] = sum;
    }

    // A sink is a score with a value of zero, so it only initializes the maximum and the sum.
    bool sinks() const { return call.sinks != nullptr && chunk.segment->first_key == 0; }

    // The maximum of a row, in units of log2, and its sum before any key.
    float first_maximum(const Row& row) const {
        return sinks() ? call.sinks[row.head] * LOG2_E : NO_MAXIMUM;
    }
    float first_sum() const { return sinks() ? 1.0f : 0.0f; }

    // Sets the addresses of K and V of TILE positions from `first` on. Positions from `end` on get
    // the addresses of position `end` - 1.
    void find_tile(Tile<Stored>& tile, int first, int end) const {
        const int32_t* table = step.tables + chunk.segment->table;
        const int size = 1 << step.block_shift;
        for (int k = 0; k < TILE;) {
            const int position = std::min(first + k, end - 1), offset = position & (size - 1);
            const int64_t block = table[position >> step.block_shift], slot = block * size + offset;
            const int64_t head = slot * call.kv_heads + chunk.kv_head;
            const Stored* key = call.keys + head * call.key_dim;
            const Stored* value = call.values + head * call.value_dim;
            const int count = std::min({TILE - k, size - offset, std::max(end - position, 1)});
            for (int i = 0; i < count; ++i, ++k) {
                tile.keys[k] = key + int64_t{i} * call.kv_heads * call.key_dim;
                tile.values[k] = value + int64_t{i} * call.kv_heads * call.value_dim;
                if constexpr (std::is_same_v<Stored, int8_t>) {
                    tile.key_scales[k] = call.key_scales + head + int64_t{i} * call.kv_heads;
                    tile.value_scales[k] = call.value_scales + head + int64_t{i} * call.kv_heads;
                    __builtin_prefetch(tile.key_scales[k]);
                    __builtin_prefetch(tile.value_scales[k]);
                }
            }
        }
    }
};

// Blocks are scattered, so the hardware prefetcher cannot predict the next row. Kernels prefetch
// its lines one by one between products; bursts would wait for the CPU's load buffers.
template <auto HINT>
inline void fetch(const void* line) {
    _mm_prefetch(static_cast<const char*>(line), HINT);
}

// The positions that some of a chunk's rows see, and those that all of them see.
struct Seen {
    int first, last, all_first, all_last;

    explicit Seen(const Row& row)
        : first(row.first_key), last(row.last_key), all_first(first), all_last(last) {}

    void add(const Row& row) {
        first = std::min(first, row.first_key);
        all_first = std::max(all_first, row.first_key);
        last = std::max(last, row.last_key);
        all_last = std::min(all_last, row.last_key);
    }

    // The start of the first tile. Tiles begin at multiples of TILE, counted from the segment's
    // first key.
    int start(const Segment& segment) const {
        return segment.first_key + (first - segment.first_key) / TILE * TILE;
    }

    // True if some row does not see all of the `count` positions from `tile` on.
    bool partly(int tile, int count) const { return tile < all_first || tile + count > all_last; }
};

// A tile of a chunk's keys: the first position, the number of keys, and this number rounded up for
// the kernel. The flags are true if some row does not see all `count`, or all `filled` keys.
struct Keys {
    int first, count, filled;
    bool partly, partly_filled;
};

// Calls attend(keys) for each tile of the keys that the rows s.rows see. s.now has the addresses of
// its keys. s.next has addresses to prefetch: those of the next tile, and at the end those of the
// first tile of `following`, unless that is null. `filled` is a multiple of `together`.
template <class State, class Number, class Stored, class Attend>
void attend_tiles(State& s, const Rows<Number, Stored>& rows, int together, const Chunk* following,
                  const Attend& attend) {
    Seen seen(s.rows[0]);
    for (int r = 1; r < rows.chunk.count; ++r) seen.add(s.rows[r]);
    const int start = seen.start(*rows.chunk.segment), last = seen.last;
    rows.find_tile(s.next, start, last);
    for (int tile = start; tile < last; tile += TILE) {
        const int count = std::min(TILE, last - tile);
        const int filled = (count + together - 1) / together * together;
        s.now = s.next;
        if (tile + TILE < last || following == nullptr) {
            rows.find_tile(s.next, tile + TILE, last);
        } else {
            const Rows<Number, Stored> after{rows.step, rows.call, *following};
            const Row row = after.row(0);
            after.find_tile(s.next, std::min(row.first_key, row.last_key - 1), row.last_key);
        }
        attend(Keys{tile, count, filled, seen.partly(tile, count), seen.partly(tile, filled)});
    }
}

// A row that repeats one number.
template <class Number>
struct Constant {
    Number numbers[MAX_DIM] = {};
    constexpr explicit Constant(Number number) {
        for (Number& element : numbers) element = number;
    }
};

}  // namespace headstart
