// Paged attention: the arguments from Python, and the units of work of threads.
//
// bindings.py mirrors Segment, Merger, AttentionStep and AttentionCall field by field. Strides
// count elements. Positions count tokens from the start of a sequence.
#pragma once

#include "../native.h"

namespace headstart {

// Rows that attend to the keys at positions first_key .. last_key - 1 of one block table. Row r has
// the token step.rows[first_row + r] at position first_position + r, and sees no later key. If a
// segment has all keys of its rows, partial is negative and the result goes to the output. If not,
// row r writes partial result `partial` + r, and the results are merged afterwards.
struct Segment {
    int32_t first_row;
    int32_t num_rows;
    int32_t first_position;
    int32_t table;  // index in step.tables of the block of position 0
    int32_t first_key;
    int32_t last_key;
    int32_t partial;
};

// A token whose output is merged from the partial results step.parts[first_part .. last_part - 1].
struct Merger {
    int32_t token;
    int32_t first_part;
    int32_t last_part;
};

// The arguments that are the same in all layers of a step with the same plan.
struct AttentionStep {
    const int64_t* slots;  // [tokens]
    const int32_t* tables;
    const int32_t* rows;
    const Segment* segments;
    const Merger* mergers;
    const int32_t* parts;
    float* partials;     // each [heads, 2 + value_dim]: maximum, sum, unnormalized output
    uint8_t* nonfinite;  // [tokens]: set to 1 where K or V are not finite, never cleared
    int32_t num_tokens;
    int32_t num_segments;
    int32_t num_mergers;
    int32_t block_shift;  // log2 of the block size
    int32_t threads;
};

// One layer. Its rows have the type Number, and keys and values in memory the type Stored. If
// Stored is int8_t, each token and KV head has a scale for its key and a scale for its value.
template <class Number, class Stored = Number>
struct Call {
    const Number* query;  // [tokens, heads, key_dim]
    const Number* key;    // [tokens, kv_heads, key_dim]
    const Number* value;  // [tokens, kv_heads, value_dim]
    Number* out;          // [tokens, heads, value_dim], dense
    Stored* keys;         // [slots, kv_heads, key_dim], dense
    Stored* values;       // [slots, kv_heads, value_dim], dense
    float* key_scales;    // [slots, kv_heads], or null
    float* value_scales;  // the same
    const float* sinks;   // [heads], or null
    int64_t query_strides[2];
    int64_t key_strides[2];
    int64_t value_strides[2];
    int32_t heads;
    int32_t kv_heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t window;  // 0: none
    float scaling;
    float softcap;  // 0: none

    // Sets dense rows of `queries` and `keys` elements, with heads of `dim` elements.
    void set_rows(const Number* q, const Number* k, const Number* v, Number* to, int64_t queries,
                  int64_t keys, int64_t dim) {
        query = q, key = k, value = v, out = to;
        query_strides[0] = queries, key_strides[0] = value_strides[0] = keys;
        query_strides[1] = key_strides[1] = value_strides[1] = dim;
    }
};

using AttentionCall = Call<bf16>;
using Int8Call = Call<float, int8_t>;

constexpr int MAX_DIM = 256;  // the widest head

// Some rows of a segment, for one KV head. Here, each token of the segment has a row for each query
// head: row r is query head r % group of token r / group, where group = heads / kv_heads.
struct Chunk {
    const Segment* segment;
    int32_t kv_head;
    int32_t first;
    int32_t count;
};

// A thread's share of one layer's attention in bf16: write K and V, attend, merge. Ends with a
// barrier of all threads.
void attend(const AttentionStep& step, const AttentionCall& call, int thread, int threads,
            Stages& stages);

}  // namespace headstart
