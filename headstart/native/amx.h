// Include after avx512.h in files whose functions need AMX: eight tiles of 16 rows of 64 bytes.
//
// Kernels use tiles 0 to 3 for sums, and the others for factors, whose elements are bf16 pairs:
//
//     0 1       4
//     2 3  +=   5  *  6 7       4, 5 [row, pair]    6, 7 [pair, column]
#pragma once

#include "native.h"

#ifndef HEADSTART_EMULATED
#pragma GCC target("amx-tile,amx-bf16")
#endif

namespace headstart {

constexpr int DEPTH = 16;  // pairs in a row of a tile

// GCC 12 does not know that loading tiles reads memory. This keeps earlier writes before the load.
inline void before_tiles() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Configures this thread's tiles, if necessary, for `rows` rows (at most 32) of `depth` pairs.
void configure_tiles(int rows, int depth);

// The sums of the upper rows and, if there are TWO tiles of rows, of the lower rows. A row of sums
// has 32 floats and begins `side` bytes after the previous row.
template <bool TWO = true>
inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) _tile_zero(2);
    if (TWO) _tile_zero(3);
}

template <bool TWO = true>
inline void load_sums(const float* upper, const float* lower, int64_t side) {
    _tile_loadd(0, upper, side);
    _tile_loadd(1, upper + 16, side);
    if (TWO) _tile_loadd(2, lower, side);
    if (TWO) _tile_loadd(3, lower + 16, side);
}

template <bool TWO = true>
inline void store_sums(float* upper, float* lower, int64_t side) {
    _tile_stored(0, upper, side);
    _tile_stored(1, upper + 16, side);
    if (TWO) _tile_stored(2, lower, side);
    if (TWO) _tile_stored(3, lower + 16, side);
}

// Adds the products of upper and lower [row, pair] with pairs [pair, 32 columns]. Strides and
// `side` count the bytes from row to row.
template <bool TWO = true>
inline void add_products(const void* upper, int64_t upper_stride, const void* lower,
                         int64_t lower_stride, const uint32_t* pairs, int64_t side) {
    _tile_loadd(6, pairs, side);
    _tile_loadd(7, pairs + 16, side);
    _tile_loadd(4, upper, upper_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) _tile_loadd(5, lower, lower_stride);
    if (TWO) _tile_dpbf16ps(2, 5, 6);
    if (TWO) _tile_dpbf16ps(3, 5, 7);
}

}  // namespace headstart
