// What a thread needs to attend with one chunk of rows; see attention_chunk.cpp.
#pragma once

#include "attention.h"

namespace headstart {

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
    float scores[TILE][CHUNK_ROWS];      // then pairs of weights in the first half
    uint32_t values[TILE / 2][MAX_DIM];  // pairs of keys
    float maximum[CHUNK_ROWS];           // in units of log2
    float sum[CHUNK_ROWS];
    int32_t row[CHUNK_ROWS];  // of the segment
    int32_t token[CHUNK_ROWS];
    int32_t head[CHUNK_ROWS];
    int32_t first_key[CHUNK_ROWS];  // what each row sees
    int32_t last_key[CHUNK_ROWS];
    Tile now;
    Tile next;
};

struct Rows {
    const AttentionStep& step;
    const AttentionCall& call;
    const Chunk& chunk;
};

}  // namespace headstart
