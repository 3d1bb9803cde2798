// The working memory of attention in float32, and the conversion of a tile of K and V to it;
// include it after the pragma.
#pragma once

#include "int8_rows.h"
#include "softmax.h"

namespace headstart {
namespace {

constexpr int PANEL = 2 * LANES;  // keys or dims of one product
constexpr int MOST = 6;           // rows of one product
constexpr int CHUNK = 16 * MOST;  // rows whose working set fits the L2 cache

// Copies of the last dims of V, if they do not fill a panel. Products read other dims from memory.
template <class Stored>
struct Values {
    float tails[TILE][PANEL];
};

// V converted to floats, and the scales of K and V.
template <>
struct Values<int8_t> {
    float numbers[TILE * MAX_DIM];  // [key, value_dim in whole panels]
    float key_scales[TILE];
    float value_scales[TILE];
};

template <class Stored>
constexpr bool SCALED = std::is_same_v<Stored, int8_t>;
template <class Stored>
constexpr int LINE = 64 / sizeof(Stored);  // numbers in a cache line

// A thread's working memory for one chunk, reused for every chunk.
template <class Stored>
struct alignas(64) ChunkState : Softmax<CHUNK, Avx2, Stored> {
    float query[CHUNK * MAX_DIM];  // [row, key_dim], in units of log2
    float out[CHUNK * MAX_DIM];    // [row, value_dim in whole panels]
    float keys[MAX_DIM][TILE];     // transposed
    Values<Stored> values;
};

// Allocated at a thread's first use. It is a pointer, since the compiler would recompute the
// address of a thread-local object in inner loops.
template <class Stored>
ChunkState<Stored>& chunk_state() {
    static thread_local const std::unique_ptr<ChunkState<Stored>> state =
        std::make_unique<ChunkState<Stored>>();
    return *state;
}

template <class Stored>
void transpose_keys(ChunkState<Stored>& s, int count, int key_dim) {
    for (int k = 0; k < count; k += LANES)
        for (int d = 0; d < key_dim; d += LANES) {
            __m256 r[LANES];
#pragma GCC unroll 8
            for (int i = 0; i < LANES; ++i) r[i] = load(s.now.keys[k + i] + d, key_dim - d);
            transpose(r);
#pragma GCC unroll 8
            for (int i = 0; i < LANES; ++i) _mm256_store_ps(&s.keys[d + i][k], r[i]);
        }
}

void isolate_nonfinite(ChunkState<float>& s, int count, int value_dim) {
    static constexpr Constant<float> nan(std::numeric_limits<float>::quiet_NaN());
    isolate_nonfinite(s.now, count, value_dim, nan);
}

void isolate_nonfinite(ChunkState<int8_t>& s, int count, int) {
    for (int k = 0; k < count; ++k) {
        if (!std::isnan(s.values.value_scales[k])) continue;
        s.values.key_scales[k] = std::numeric_limits<float>::quiet_NaN();
        s.values.value_scales[k] = 0.0f;
    }
}

void load_scales(ChunkState<int8_t>& s) {
    for (int k = 0; k < TILE; ++k) {
        s.values.key_scales[k] = *s.now.key_scales[k];
        s.values.value_scales[k] = *s.now.value_scales[k];
    }
}

// Converts or copies the parts of V that the products cannot read from memory.
void load_values(ChunkState<float>& s, int count, int value_dim, int64_t) {
    const int tail = value_dim % PANEL, whole = value_dim - tail;
    for (int k = 0; tail > 0 && k < count; ++k)
        std::memcpy(s.values.tails[k], s.now.values[k] + whole, tail * sizeof(float));
}

void load_values(ChunkState<int8_t>& s, int count, int value_dim, int64_t width) {
    for (int k = 0; k < count; ++k)
        for (int d = 0; d < width; d += LANES)
            _mm256_store_ps(s.values.numbers + k * width + d,
                            load(s.now.values[k] + d, value_dim - d));
}

}  // namespace
}  // namespace headstart
