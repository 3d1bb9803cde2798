// A thread's scratch memory for one chunk of rows; see attention_chunk.cpp.
#pragma once

#include "attention_rows.h"

namespace headstart {

constexpr int STEP = 8;  // a tile is cut short to a multiple of this

// The state of one chunk; one per thread, reused for every chunk.
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
    Tile now;
    Tile next;
};

}  // namespace headstart
