// The two products of attention with tiles of AMX; see bf16_chunk.cpp.
//
// Queries and weights are right factors (amx.h), in the layout of `Lanes`. Keys and values are left
// factors. Keys are read from memory if they are evenly spaced. Values are transposed.
#include "rows.h"  // before avx512.h: float32.cpp includes it too

#include "../avx512.h"

#include "../amx.h"
#include "bf16_products.h"

namespace headstart {

namespace {

constexpr int SIDE = CHUNK_ROWS * 4;  // bytes of a row of scores, weights or outputs

// 16 keys as rows of a tile: in memory, or copied if they are not evenly spaced.
struct KeyRows {
    const bf16* first;
    int64_t stride;  // bytes

    KeyRows(const bf16* const* keys, int key_dim, bf16* copy)
        : first(keys[0]), stride((keys[1] - keys[0]) * 2) {
        bool even = true;
        for (int i = 2; i < 16; ++i) even &= (keys[i] - keys[i - 1]) * 2 == stride;
        if (even) return;
        first = copy, stride = key_dim * 2;
        for (int i = 0; i < 16; ++i) std::memcpy(copy + i * key_dim, keys[i], key_dim * 2);
    }
};

}  // namespace

void multiply_keys(Lanes& s, int count, int key_dim, int vectors) {
    alignas(64) static thread_local bf16 copies[2][16 * MAX_DIM];
    configure_tiles(32, DEPTH);
    for (int k = 0; k < count; k += 32) {
        const KeyRows upper(s.now.keys + k, key_dim, copies[0]);
        const KeyRows lower(s.now.keys + k + 16, key_dim, copies[1]);
        before_tiles();
        for (int v = 0; v < vectors; v += 2) {
            zero_sums();
            for (int p = 0; p < key_dim / 2; p += DEPTH)
                add_products(upper.first + 2 * p, upper.stride, lower.first + 2 * p, lower.stride,
                             &s.query[p][v * 16], SIDE);
            store_sums(&s.scores[k][v * 16], &s.scores[k + 16][v * 16], SIDE);
        }
    }
}

void multiply_values(Lanes& s, int count, int value_dim, int vectors) {
    uint32_t (*const values)[TILE / 2] = reinterpret_cast<uint32_t (*)[TILE / 2]>(s.values);
    for (int k = 0; k < count; k += 32)
        for (int d = 0; d < value_dim; d += 32) {
            __m512i low[16], high[16];
            for (int i = 0; i < 16; ++i) {
                const __m512i even = _mm512_loadu_si512(s.now.values[k + 2 * i] + d);
                const __m512i odd = _mm512_loadu_si512(s.now.values[k + 2 * i + 1] + d);
                low[i] = interleave(even, odd, 0), high[i] = interleave(even, odd, 16);
            }
            transpose16(low);
            transpose16(high);
            for (int i = 0; i < 16; ++i) {
                _mm512_store_si512(&values[d + i][k / 2], low[i]);
                _mm512_store_si512(&values[d + 16 + i][k / 2], high[i]);
            }
        }
    before_tiles();
    for (int d = 0; d < value_dim; d += 32)
        for (int v = 0; v < vectors; v += 2) {
            float* upper = &s.out[d][v * 16];
            float* lower = &s.out[d + 16][v * 16];
            load_sums(upper, lower, SIDE);
            for (int k = 0; k < count / 2; k += DEPTH)
                add_products(&values[d][k], sizeof values[d], &values[d + 16][k], sizeof values[d],
                             reinterpret_cast<const uint32_t*>(&s.scores[k][v * 16]), SIDE);
            store_sums(upper, lower, SIDE);
        }
}

}  // namespace headstart
