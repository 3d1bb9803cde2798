// The parts of a decoder layer around attention, as in Llama, Qwen and Gemma:
//
//     before:  hidden -> norm -> q, k, v -> (norms of heads) -> rotary positions
//     after:   attended -> o -> (norm), + hidden
//                  -> norm -> activation(gate) * up -> down -> (norm), + input of the first norm
//
// Every intermediate that transformers rounds to bf16 is rounded here too, so the two differ only
// in summation order.
#include "layer.h"  // before avx512.h: narrow/layers.cpp includes it too

#include "avx512.h"

#include "linear.h"

using namespace headstart;

namespace {

constexpr int64_t CHUNK = 512;  // rows that are computed together after attention
constexpr Norm NO_NORM{nullptr, 0, 0};

// 1 / (1 + e^-x), with a relative error of 1e-5: a hundredth of the rounding error of bf16
inline __m512 sigmoid(__m512 x) {
    const __m512 limit = _mm512_set1_ps(126.0f);
    const __m512 exponent = _mm512_max_ps(-limit, _mm512_min_ps(x * -1.44269504f, limit));
    const __m512 below = 1.0f + power(exponent);
    const __m512 near = _mm512_rcp14_ps(below);  // with one Newton step, faster than a division
    return near * _mm512_fnmadd_ps(below, near, _mm512_set1_ps(2.0f));
}

inline __m512 activate(int64_t activation, __m512 x) {
    return x * sigmoid(activation == SILU ? x : gelu_exponent(x));
}

void normalize(const bf16* x, int64_t width, const Norm& norm, bf16* out) {
    __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 v = load(x + i, width - i);
        squares[i / 16 % 2] = _mm512_fmadd_ps(v, v, squares[i / 16 % 2]);
    }
    const float mean = _mm512_reduce_add_ps(squares[0] + squares[1]) / static_cast<float>(width);
    const __m512 scale = 1.0f / _mm512_sqrt_ps(_mm512_set1_ps(mean + norm.epsilon));
    for (int64_t i = 0; i < width; i += 16) {
        const int64_t left = width - i;
        const __m512 weight = load(static_cast<const bf16*>(norm.weight) + i, left);
        const __m512 exact = load(x + i, left) * scale;
        store(out + i, left, norm.gemma ? exact * (1.0f + weight) : rounded(exact) * weight);
    }
}

// Normalizes rows in place, then adds the residual. Waits for all threads at the end.
void normalize_update(bf16* rows, const bf16* residual, int64_t count, int64_t width,
                      const Norm& norm, int thread, int all, Stages& stages) {
    for (int64_t r = count * thread / all; r < count * (thread + 1) / all; r++) {
        bf16* row = rows + r * width;
        normalize(row, width, norm, row);
        for (int64_t i = 0; i < width; i += 16)
            store(row + i, width - i,
                  load(row + i, width - i) + load(residual + r * width + i, width - i));
    }
    stages.finish(all);
}

// Returns rows of x [rows, width], normalized if there is a norm.
struct Rows {
    const bf16* x;
    int64_t width;
    Norm norm;

    const bf16* operator()(int64_t row, int count, int64_t* stride) const {
        static thread_local Scratch memory;
        *stride = width;
        if (norm.weight == nullptr) return x + row * width;
        bf16* out = memory.take<bf16>(count * width);
        for (int r = 0; r < count; r++)
            normalize(x + (row + r) * width, width, norm, out + r * width);
        return out;
    }
};

// This thread's share of a stage: out[rows, outputs] = activation(gate) * up.
void gated(const bf16* x, int64_t rows, const Layer& layer, bf16* out, int all, Stages& stages) {
    const Weight &gate = layer.gate, &up = layer.up;
    const int64_t kind = layer.activation;
    multiply<2>(
        rows, gate.inputs, gate.count(), all, stages, Rows{x, gate.inputs, layer.after},
        [&](int64_t group, int part) { return Panel{part == 0 ? &gate : &up, group}; },
        [&](int64_t group, int64_t row, int64_t count, const float* sums) {
            const int64_t at = group * PANEL, left = gate.outputs - at;
            for (int64_t r = 0; r < count; r++) {
                const float* sum = sums + r * PANEL;
                const Halves g(finished(sum, gate, at)), u(finished(sum + count * PANEL, up, at));
                const Halves s(pair_bf16(activate(kind, g.even), activate(kind, g.odd)));
                store_pairs(out + (row + r) * gate.outputs + at, left,
                            pair_bf16(s.even * u.even, s.odd * u.odd));
            }
        });
}

// Rotates pairs (x[i], x[i + dim / 2]) in place by angles given as cosines and sines.
void rotate(bf16* x, int64_t dim, const bf16* cos, const bf16* sin) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t left = half - i;
        const __m512 a = load(x + i, left), b = load(x + half + i, left);
        const auto part = [&](__m512 own, __m512 other, int64_t at) {
            return rounded(own * load(cos + at, left)) + rounded(other * load(sin + at, left));
        };
        const __m512 first_half = part(a, _mm512_setzero_ps() - b, i);
        store(x + half + i, left, part(b, a, half + i));
        store(x + i, left, first_half);
    }
}

// Rows of queries, keys and values, each [rows, outputs of its weight].
struct Projected {
    bf16 *q, *k, *v;
};

// This thread's share of the part before attention. Ends without a barrier: this thread has rotated
// only the rows from rows * thread / all to rows * (thread + 1) / all - 1.
void before_attention(const Layer& layer, const bf16* hidden, int64_t rows, const bf16* cos,
                      const bf16* sin, const Projected& out, int thread, int all, Stages& stages) {
    project(rows, Rows{hidden, layer.q.inputs, layer.before},
            {{&layer.q, out.q}, {&layer.k, out.k}, {&layer.v, out.v}}, all, stages);
    stages.finish(all);
    const int64_t dim = layer.head_dim;
    const auto rotate_heads = [&](bf16* row, int64_t width, const Norm& norm, int64_t number) {
        for (bf16* head = row; head < row + width; head += dim) {
            if (norm.weight != nullptr) normalize(head, dim, norm, head);
            rotate(head, dim, cos + number * dim, sin + number * dim);
        }
    };
    for (int64_t r = rows * thread / all; r < rows * (thread + 1) / all; r++) {
        rotate_heads(out.q + r * layer.q.outputs, layer.q.outputs, layer.q_heads, r);
        rotate_heads(out.k + r * layer.k.outputs, layer.k.outputs, layer.k_heads, r);
    }
}

// Elements of the buffer that after_attention() needs between its stages.
int64_t buffer_size(const Layer& layer, int64_t rows) {
    return std::min(rows, CHUNK) * (layer.gate.inputs + layer.down.inputs);
}

// This thread's share of the part after attention.
void after_attention(const Layer& layer, const bf16* attended, const bf16* hidden, int64_t rows,
                     bf16* out, bf16* memory, int thread, int all, Stages& stages) {
    const Weight &o = layer.o, &down = layer.down;
    const int64_t width = layer.gate.inputs;
    bf16* inner = memory + std::min(rows, CHUNK) * width;
    // Projects rows, normalizes the result if there is a norm, and adds the residual.
    const auto update = [&](int64_t count, const bf16* x, const Weight& weight, const Norm& norm,
                            const bf16* residual, bf16* to) {
        const bool normed = norm.weight != nullptr;
        project(count, Rows{x, weight.inputs, NO_NORM},
                {{&weight, to, normed ? nullptr : residual}}, all, stages);
        stages.finish(all);
        if (normed) normalize_update(to, residual, count, width, norm, thread, all, stages);
    };
    for (int64_t row = 0; row < rows; row += CHUNK) {
        const int64_t some = std::min(CHUNK, rows - row);
        update(some, attended + row * o.inputs, o, layer.attention_update, hidden + row * width,
               memory);
        gated(memory, some, layer, inner, all, stages);
        stages.finish(all);
        update(some, inner, down, layer.mlp_update, memory, out + row * width);
    }
}

}  // namespace

// Computes q, k, v bf16 [rows, their outputs] from hidden bf16 [rows, inputs]; cos and sin bf16
// [rows, head_dim].
extern "C" void headstart_before_attention(const Layer* layer, const bf16* hidden, int64_t rows,
                                           const bf16* cos, const bf16* sin, bf16* q, bf16* k,
                                           bf16* v, int threads) {
    Stages stages;
    parallel(threads, [&](int thread, int all) {
        before_attention(*layer, hidden, rows, cos, sin, {q, k, v}, thread, all, stages);
    });
}

// Computes out bf16 [rows, inputs], the next layer's hidden, from attended bf16 [rows, o's inputs]
// and this layer's hidden bf16 [rows, inputs].
extern "C" void headstart_after_attention(const Layer* layer, const bf16* attended,
                                          const bf16* hidden, int64_t rows, bf16* out,
                                          int threads) {
    static thread_local Scratch memory;
    bf16* buffer = memory.take<bf16>(buffer_size(*layer, rows));
    Stages stages;
    parallel(threads, [&](int thread, int all) {
        after_attention(*layer, attended, hidden, rows, out, buffer, thread, all, stages);
    });
}

// Runs hidden bf16 [rows, inputs], in place, through `count` layers of the same widths. Threads are
// woken only once, since waking them takes as long as decode attention.
extern "C" void headstart_layers(const LayerRun* runs, int64_t count, bf16* hidden, int64_t rows,
                                 int threads) {
    static thread_local Scratch memory;
    const Layer& shape = *runs->layer;
    const int64_t width = shape.q.inputs, queries = shape.q.outputs, keys = shape.k.outputs;
    bf16* q = memory.take<bf16>(rows * (width + 2 * queries + 2 * keys) + buffer_size(shape, rows));
    bf16* k = q + rows * queries;
    bf16* v = k + rows * keys;
    bf16* attended = v + rows * keys;
    bf16* other = attended + rows * queries;
    bf16* buffer = other + rows * width;
    Stages stages;
    parallel(threads, [&](int thread, int all) {
        bf16* from = hidden;
        bf16* to = other;
        for (int64_t i = 0; i < count; i++) {
            const Layer& layer = *runs[i].layer;
            before_attention(layer, from, rows, static_cast<const bf16*>(runs[i].cos),
                             static_cast<const bf16*>(runs[i].sin), {q, k, v}, thread, all, stages);
            AttentionCall call = *runs[i].call;
            call.set_rows(q, k, v, attended, queries, keys, layer.head_dim);
            attend(*runs[i].step, call, thread, all, stages);  // first writes this thread's rows
            after_attention(layer, attended, from, rows, to, buffer, thread, all, stages);
            std::swap(from, to);
        }
    });
    if (count % 2 == 1) std::memcpy(hidden, other, rows * width * sizeof(bf16));
}
