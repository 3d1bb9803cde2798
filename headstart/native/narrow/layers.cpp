// Decoder layers as in ../layer.cpp, for few float32 rows on CPUs with AVX2. Products and attention
// use all threads, the operations between them one thread.
#include "../layer.h"

#pragma GCC target("avx2,fma")

#include "../attention/avx2.h"
#include "digits.h"

using namespace headstart;

extern "C" void headstart_attend_float32(const AttentionStep*, const Call<float>*);
extern "C" void headstart_attend_int8(const AttentionStep*, const Int8Call*);

// out float [rows, outputs] = x float [rows, inputs] times the weight, plus its bias
extern "C" void headstart_float_linear(const Weight* weight, const float* x, int64_t rows,
                                       float* out, int threads) {
    static constexpr FloatProduct* PRODUCTS[] = {multiply_integers, multiply_integers_vnni,
                                                 multiply_integers_avx512};
    const auto multiply = weight->kind == BF16 ? multiply_half : PRODUCTS[vnni];
    multiply(*weight, x, rows, out, threads);
    add_bias(*weight, rows, out);
}

namespace {

void normalise(const float* x, int64_t width, const Norm& norm, float* out) {
    const auto* weight = static_cast<const float*>(norm.weight);
    __m256 squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
        const __m256 v = load(x + i, static_cast<int>(std::min<int64_t>(width - i, LANES)));
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    const float mean = total(squares) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + norm.epsilon);
    const float offset = norm.gemma ? 1.0f : 0.0f;
    for (int64_t i = 0; i < width; i++) out[i] = (offset + weight[i]) * (x[i] * scale);
}

// Normalises (if there is a norm) and rotates the heads of a row in place, as ../layer.cpp.
void turn(float* row, int64_t width, int64_t dim, const Norm& norm, const float* cos,
          const float* sin) {
    for (float *head = row, *other = head + dim / 2; head < row + width;
         head += dim, other += dim) {
        if (norm.weight != nullptr) normalise(head, dim, norm, head);
        for (int64_t i = 0; i < dim / 2; i++) {
            const float first = head[i];
            head[i] = first * cos[i] - other[i] * sin[i];
            other[i] = other[i] * cos[i + dim / 2] + first * sin[i + dim / 2];
        }
    }
}

// gate[count] = activation(gate) * up, in whole vectors, so it may write beyond `count`.
void multiply_gates(int64_t activation, float* gate, const float* up, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const __m256 x = _mm256_loadu_ps(gate + i);
        const __m256 exponent = activation == SILU ? x : gelu_exponent(x);
        const __m256 share = 1.0f / (1.0f + power(exponent * -1.44269504f));
        _mm256_storeu_ps(gate + i, x * share * _mm256_loadu_ps(up + i));
    }
}

}  // namespace

// Runs hidden float [rows, inputs], in place, through `count` layers of the same widths.
extern "C" void headstart_float_layers(const LayerRun* runs, int64_t count, float* hidden,
                                       int64_t rows, int threads) {
    const Layer& shape = *runs->layer;
    const int64_t width = shape.q.inputs, queries = shape.q.outputs, keys = shape.k.outputs;
    const int64_t inner = (rows * shape.gate.outputs + LANES - 1) / LANES * LANES;
    static thread_local Scratch memory;
    float* gate = memory.take<float>(rows * (width + 2 * queries + 2 * keys) + 2 * inner);
    float *up = gate + inner, *q = up + inner, *k = q + rows * queries, *v = k + rows * keys;
    float *attended = v + rows * keys, *update = attended + rows * queries;
    const auto multiply = [&](const Weight& weight, const float* x, float* out) {
        headstart_float_linear(&weight, x, rows, out, threads);
    };
    // Adds `update` to the rows, normalised if there is a norm for it.
    const auto add = [&](const Norm& norm) {
        for (int64_t r = 0; r < rows; r++) {
            float *row = hidden + r * width, *more = update + r * width;
            if (norm.weight != nullptr) normalise(more, width, norm, more);
            for (int64_t i = 0; i < width; i++) row[i] += more[i];
        }
    };
    // Writes the normalised rows to `update`.
    const auto begin = [&](const Norm& norm) {
        for (int64_t r = 0; r < rows; r++)
            normalise(hidden + r * width, width, norm, update + r * width);
    };
    for (int64_t i = 0; i < count; i++) {
        const Layer& layer = *runs[i].layer;
        const auto *cos = static_cast<const float*>(runs[i].cos),
                   *sin = static_cast<const float*>(runs[i].sin);
        begin(layer.before);
        multiply(layer.q, update, q);
        multiply(layer.k, update, k);
        multiply(layer.v, update, v);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t dim = layer.head_dim, angle = r * dim;
            turn(q + r * queries, queries, dim, layer.q_heads, cos + angle, sin + angle);
            turn(k + r * keys, keys, dim, layer.k_heads, cos + angle, sin + angle);
        }
        const auto attend = [&](auto call, auto function) {
            call.set_rows(q, k, v, attended, queries, keys, layer.head_dim);
            function(runs[i].step, &call);
        };
        if (runs[i].call->key_scales == nullptr)
            attend(*reinterpret_cast<const Call<float>*>(runs[i].call), headstart_attend_float32);
        else
            attend(*reinterpret_cast<const Int8Call*>(runs[i].call), headstart_attend_int8);
        multiply(layer.o, attended, update);
        add(layer.attention_update);
        begin(layer.after);
        multiply(layer.gate, update, gate);
        multiply(layer.up, update, up);
        multiply_gates(layer.activation, gate, up, inner);
        multiply(layer.down, gate, update);
        add(layer.mlp_update);
    }
}
