// A decoder layer's arguments from Python; see layer.cpp.
#pragma once

#include "attention/attention.h"
#include "weight.h"

namespace headstart {

struct Norm {
    const void* weight;  // of the rows' type; nullptr: none
    float epsilon;
};

// A layer's weights; a Norm may be absent (weight nullptr).
struct Layer {
    Weight q, k, v, o, gate, up, down;
    Norm before, after, q_heads, k_heads;
    int64_t head_dim;
};

// A layer in one step. The call's query, key, value and out are ignored. For float32 rows the call
// has another type with the same layout.
struct LayerRun {
    const Layer* layer;
    const AttentionStep* step;
    const AttentionCall* call;
};

}  // namespace headstart
