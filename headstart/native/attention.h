// Paged attention in bf16: the arguments from Python, and the units of work.
//
// bindings.py mirrors Segment, Merger, AttentionStep and AttentionCall field by field. Strides
// count elements. Positions count tokens from the start of a sequence.
#pragma once

#include "native.h"
#include "simd.h"

namespace headstart {

// Rows that attend to the keys at positions first_key .. last_key - 1 of one block table, each up
// to its own position, which is first_position + r for row r. Their tokens are step.rows[first_row
// ..]. A segment that holds all keys of its rows (partial < 0) writes to the output; others write
// to partials partial, partial + 1, ..., which are merged afterwards.
struct Segment {
    int32_t first_row;
    int32_t num_rows;
    int32_t first_position;
    int32_t table;  // where in step.tables the block of position 0 is
    int32_t first_key;
    int32_t last_key;
    int32_t partial;
};

// One token whose output is the merger of step.parts[first_part .. last_part - 1].
struct Merger {
    int32_t token;
    int32_t first_part;
    int32_t last_part;
};

// The arguments that all layers of a step with the same plan share.
struct AttentionStep {
    const int64_t* slots;  // [tokens]
    const int32_t* tables;
    const int32_t* rows;
    const Segment* segments;
    const Merger* mergers;
    const int32_t* parts;
    float* partials;  // each [heads, 2 + value_dim]: maximum, sum, unnormalised output
    uint8_t* nonfinite;  // [tokens]: set to 1 where K or V are not finite, never cleared
    int32_t num_tokens;
    int32_t num_segments;
    int32_t num_mergers;
    int32_t block_shift;  // log2 of the block size
    int32_t threads;
};

// One layer.
struct AttentionCall {
    const bf16* query;  // [tokens, heads, key_dim]
    const bf16* key;    // [tokens, kv_heads, key_dim]
    const bf16* value;  // [tokens, kv_heads, value_dim]
    bf16* out;          // [tokens, heads, value_dim], dense
    bf16* keys;         // [slots, kv_heads, key_dim], dense
    bf16* values;       // [slots, kv_heads, value_dim], dense
    const float* sinks;  // [heads], or null
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
};

// The widest head, and the rows of one pass over the keys: four vectors of 16 lanes fill the
// registers of the products, and their working set fits the L1 and L2 caches.
constexpr int MAX_DIM = 256;
constexpr int CHUNK_VECTORS = 4;
constexpr int CHUNK_ROWS = 16 * CHUNK_VECTORS;

// A thread's part of one layer's attention: write K and V, attend, merge. Ends with a barrier of
// all threads.
void attend(const AttentionStep& step, const AttentionCall& call, int thread, int threads,
            Stages& stages);

// Up to CHUNK_ROWS rows of a segment for one KV head. Row r of a segment is query head r % group
// of its token r / group, where group = heads / kv_heads.
struct Chunk {
    const Segment* segment;
    int32_t kv_head;
    int32_t first;
    int32_t count;
};

void attend_chunk(const AttentionStep& step, const AttentionCall& call, const Chunk& chunk);

// The same for segments with so few rows that lanes would stay idle. The choice between the two
// must depend on the segment alone, as they sum in different orders. At its end it prefetches the
// first keys of the chunk that this thread may get next (or nullptr).
constexpr int FEW_ROWS = 8;
void attend_few(const AttentionStep& step, const AttentionCall& call, const Chunk& chunk,
                const Chunk* next);

}  // namespace headstart
