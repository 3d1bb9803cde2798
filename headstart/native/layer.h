// A decoder layer's arguments from Python; see layer.cpp.
#pragma once

#include "attention/attention.h"
#include "weight.h"

namespace headstart {

struct Norm {
    const void* weight;  // of the rows' type; nullptr: none
    float epsilon;
    int32_t gemma;  // 1: multiply by 1 + weight, then round; 0: round, then multiply by the weight
};

// The activation of an MLP's gate: x / (1 + e^-x), or the tanh approximation of GELU.
constexpr int64_t SILU = 0, GELU_TANH = 1;

// A layer's weights; a Norm may be absent (weight nullptr). `before` and `after` are norms of the
// inputs of attention and MLP, `attention_update` and `mlp_update` of their outputs.
struct Layer {
    Weight q, k, v, o, gate, up, down;
    Norm before, after, attention_update, mlp_update, q_heads, k_heads;
    int64_t head_dim, activation;
};

// A layer in one step. The call's query, key, value and out are ignored. For float32 rows it is a
// Call<float> or Int8Call, with the same layout. cos, sin [rows, head_dim] have the rows' type.
struct LayerRun {
    const Layer* layer;
    const AttentionStep* step;
    const AttentionCall* call;
    const void *cos, *sin;
};

// gelu(x) = x / (1 + e^-gelu_exponent(x))
template <class Vector>
inline Vector gelu_exponent(Vector x) {
    return x * (1.59576912f + 0.0713548163f * x * x);
}

}  // namespace headstart
