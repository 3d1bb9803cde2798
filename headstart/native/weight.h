// A weight from Python.
#pragma once

#include "native.h"

namespace headstart {

// The kind of a weight. Kinds below INT8 are forms of 4 or 5 bits (narrow/integers.h).
constexpr int64_t INT8 = 4, INT8_IN_GROUPS = 5, BF16 = 6;
constexpr int64_t PAIR_BYTES[] = {40, 36, 48, 44, 64, 0, 128};  // in a panel of 32 outputs

// A weight [outputs, inputs], and its bias [outputs] or nullptr. Weights other than bf16 have
// scales [outputs], and weights in groups also columns [inputs] or nullptr.
//
//     rows       layout                                           bias       columns
//     bf16       panels of linear.h                               bf16       padded to whole groups
//     float32    bf16: row by row; others: narrow/integers.h      float32    may be null
struct Weight {
    static constexpr int64_t PANEL = 32;

    const void *panels, *bias;
    const float *scales, *columns;
    int64_t inputs, outputs, kind;

    int64_t pairs() const { return (inputs + 1) / 2; }
    int64_t count() const { return (outputs + PANEL - 1) / PANEL; }
    // Pair k of a panel; with 4 or 5 bits, k must be the first pair of a group.
    const uint32_t* at(int64_t panel, int64_t k = 0) const {
        const int64_t whole = kind < INT8 ? (pairs() + 15) / 16 * 16 : pairs();
        return reinterpret_cast<const uint32_t*>(static_cast<const char*>(panels) +
                                                 (panel * whole + k) * PAIR_BYTES[kind]);
    }
};

// A weight, and the memory [rows, outputs] for its product.
struct Product {
    const Weight* weight;
    float* out;
};

// Products of the same float32 rows with `count` weights, without the biases, for CPUs with AVX2.
// The three functions for integers return the same bits; the last two need VNNI instructions.
using FloatProducts = void(const Product* products, int count, const float* x, int64_t rows,
                           int threads);
FloatProducts multiply_half, multiply_integers, multiply_integers_vnni, multiply_integers_avx512;

// Converts `pairs` pairs (whole groups) of a panel of 4 or 5 bits to bf16, multiplied by columns;
// for CPUs with AVX-512.
void widen(int64_t form, const void* from, const float* columns, int64_t pairs, uint32_t* out);

// out [rows, outputs] += the bias, if there is one.
inline void add_bias(const Weight& weight, int64_t rows, float* out) {
    const auto* bias = static_cast<const float*>(weight.bias);
    for (int64_t r = 0; bias != nullptr && r < rows; r++, out += weight.outputs)
        for (int64_t o = 0; o < weight.outputs; o++) out[o] += bias[o];
}

}  // namespace headstart
