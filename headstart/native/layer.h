// A decoder layer as Python hands it over, weights and all; see layer.cpp.
#pragma once

#include "attention.h"
#include "linear.h"

namespace headstart {

struct Norm {
    const bf16* weight;  // nullptr: none
    float epsilon;
};

// Everything of one layer that stays the same; Norms may be none, see there.
struct Layer {
    Weight q, k, v, o, gate, up, down;
    Norm before, after, q_heads, k_heads;
    int64_t head_dim;
};

// A layer in one step; the call's query, key, value and out are of no meaning.
struct LayerRun {
    const Layer* layer;
    const AttentionStep* step;
    const AttentionCall* call;
};

}  // namespace headstart
