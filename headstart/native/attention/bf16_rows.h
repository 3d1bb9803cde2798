// Code that both attention kernels in bf16 share.
#pragma once

#include "../simd.h"
#include "rows.h"

namespace headstart {

// Rows in one pass over the keys: four vectors of 16 lanes. Their sums fit in registers, and their
// working set in the L1 and L2 caches.
constexpr int CHUNK_VECTORS = 4;
constexpr int CHUNK_ROWS = 16 * CHUNK_VECTORS;

void attend_chunk(const Rows<bf16>& rows);

// Does the same as attend_chunk() for segments with too few rows to fill the lanes. The choice
// between the two functions must depend only on the segment, since they sum in different orders. At
// the end, prefetches the first keys of `next`, the chunk that this thread may get next (or
// nullptr).
constexpr int FEW_ROWS = 8;
void attend_few(const Rows<bf16>& rows, const Chunk* next);

// True if a number is infinite or NaN: its exponent is all ones.
inline bool has_nonfinite(const bf16* row, int dim) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 nonfinite = 0;
    for (int d = 0; d < dim; d += 32)
        nonfinite |= _mm512_cmpeq_epi16_mask(load_pairs(row + d, dim - d) & exponent, exponent);
    return nonfinite != 0;
}

constexpr Constant<bf16> NAN_KEY(0x7fc0);

// Writes 16 dims of a row's output from `d` on, to the result or to a partial result.
inline void store_dims(const Rows<bf16>& rows, const Row& row, int d, __m512 dims) {
    const int left = rows.call.value_dim - d;
    if (rows.partial()) {
        _mm512_mask_storeu_ps(rows.partial_of(row) + 2 + d, first_lanes(left), dims);
    } else {
        store(rows.out(row) + d, left, dims);
    }
}

inline __m512 larger(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
inline float largest_lane(__m512 x) { return _mm512_reduce_max_ps(x); }

inline __m512bh as_pairs(__m512i pairs) { return reinterpret_cast<__m512bh>(pairs); }

// One pair in every 32-bit lane.
inline __m512bh broadcast(uint32_t pair) {
    return as_pairs(_mm512_set1_epi32(static_cast<int>(pair)));
}

// Interleaves 16 of 32 bf16 of x and y: x[i] y[i] x[i + 1] y[i + 1] ..., where i is 0 or 16.
inline __m512i interleave(__m512i x, __m512i y, short i) {
    const __m512i order =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(x, order | _mm512_set1_epi16(i), y);
}

// Pair `at` of a row in bf16.
inline uint32_t pair_at(const bf16* row, int at) {
    uint32_t pair;
    std::memcpy(&pair, row + 2 * at, sizeof pair);
    return pair;
}

}  // namespace headstart
