// Comes after avx512.h in files whose functions need AMX: eight tiles of 16 rows of 64 bytes.
//
// Kernels use tiles 0 to 3 for sums, 4 and 5 for rows of pairs, 6 and 7 for pairs of rows:
//
//     0 1       4
//     2 3  +=   5  *  6 7
#pragma once

#include "native.h"

#ifdef HEADSTART_HAS_AMX
#ifndef HEADSTART_EMULATED
#pragma GCC target("amx-tile,amx-bf16,amx-int8")
#endif
#endif

namespace headstart {

constexpr int DEPTH = 16;  // pairs of a tile

// GCC 12 does not know that loading tiles reads memory: what was written before a load stays before
// it by this.
inline void before_tiles() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Declares this thread's tiles, unless they are so already: `rows` (at most 32) of `depth` pairs.
void configure_tiles(int rows, int depth);

}  // namespace headstart
