// Recurrent layers: the sequences of a step and one layer's call, from Python.
#pragma once

#include <algorithm>

#include "native.h"

namespace headstart {

// Sequence i has the rows starts[i] to starts[i + 1] - 1. Its state is read from slot sources[i]
// (-1: zeros) and written to slot targets[i] after its last row. All targets differ, and a
// sequence's target is not another sequence's source. saves [num_saves, 2] has ascending rows, and
// the slots to which the states after them are written.
struct Sequences {
    const int32_t *starts, *sources, *targets, *saves;
    int64_t count, num_saves;

    // The index of the first save at or after a row.
    int64_t first_save(int64_t row) const {
        int64_t save = 0;
        while (save < num_saves && saves[2 * save] < row) save++;
        return save;
    }
    // The end of the rows up to the next save, at most `end`.
    int64_t cut(int64_t save, int64_t end) const {
        return save < num_saves ? std::min<int64_t>(end, saves[2 * save] + 1) : end;
    }
    bool saves_after(int64_t save, int64_t row) const {
        return save < num_saves && saves[2 * save] == row;
    }
};

// One layer's states, `stride` floats from slot to slot.
struct States {
    float* first;
    int64_t stride;

    // The address of a part of a sequence's state, or null for zeros.
    const float* source(const Sequences& sequences, int64_t sequence, int64_t part) const {
        const int64_t slot = sequences.sources[sequence];
        return slot < 0 ? nullptr : first + slot * stride + part;
    }
    float* target(const Sequences& sequences, int64_t sequence, int64_t part) const {
        return first + sequences.targets[sequence] * stride + part;
    }
    float* saved(const Sequences& sequences, int64_t save, int64_t part) const {
        return first + sequences.saves[2 * save + 1] * stride + part;
    }
};

// Rows of float32 or bf16, `stride` numbers from row to row. The numbers of a row are contiguous.
struct Strided {
    const void* first;
    int64_t stride;
};

// rows and out [rows, channels], weight [width, channels], bias [channels] or null, states
// [width - 1, channels].
struct ConvCall {
    Strided rows;
    void* out;
    const float *weight, *bias;
    States states;
    int64_t channels, width;
    int32_t silu, bf16;
};

// query and key [rows, key_heads, key_dim], value and out [rows, heads, value_dim], a and b
// [rows, heads], states [heads, key_dim, value_dim].
struct DeltaCall {
    Strided query, key, value, a, b;
    void* out;
    const float *a_log, *dt_bias;
    States states;
    int64_t key_heads, heads, key_dim, value_dim, bf16;
};

// x and out [rows, heads, head_dim], b and c [rows, groups, state], dt [rows, heads], states
// [heads, head_dim, state].
struct ScanCall {
    Strided x, b, c, dt;
    void* out;
    const float *a_log, *d, *dt_bias;
    States states;
    int64_t groups, heads, head_dim, state, bf16;
    float shortest, longest;
};

constexpr int64_t MOST_TAPS = 4;  // of a convolution

// True if float32 kernels may use AVX-512, which gives the same bits as AVX2.
inline bool has_avx512() { return vnni == 2; }

void causal_conv_avx512(const Sequences& sequences, const ConvCall& call, int threads);
void gated_delta_rule_avx512(const Sequences& sequences, const DeltaCall& call, int threads);
void mamba2_scan_avx512(const Sequences& sequences, const ScanCall& call, int threads);

}  // namespace headstart
