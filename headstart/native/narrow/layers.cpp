// Decoder layers as in ../layer.cpp, with products of float32 rows, on CPUs with AVX2. Products and
// attention use all threads. The operations between them use one thread if they are short.
//
// With HALF, rows are bf16 stored as floats: each number that the layers' modules round to bf16 is
// rounded here too, and K and V are bf16, which needs AVX-512. An MLP computes in float32, as its
// module does.
#include "../layer.h"

#pragma GCC target("avx2,fma")

#include "../attention/avx2.h"
#include "digits.h"

using namespace headstart;

extern "C" void headstart_attend(const AttentionStep*, const AttentionCall*);
extern "C" void headstart_attend_float32(const AttentionStep*, const Call<float>*);
extern "C" void headstart_attend_int8(const AttentionStep*, const Int8Call*);

namespace {

// Products of the same rows x [rows, inputs], plus the weights' biases. Products with integers
// share the rounding of x.
void multiply(std::initializer_list<Product> products, const float* x, int64_t rows, int threads) {
    static constexpr FloatProducts* INTEGERS[] = {multiply_integers, multiply_integers_vnni,
                                                  multiply_integers_avx512};
    const auto is_half = [](const Product& product) { return product.weight->kind == BF16; };
    for (const Product *first = products.begin(), *last; first < products.end(); first = last) {
        const bool half = is_half(*first);
        last = std::find_if(first, products.end(), [&](auto& p) { return is_half(p) != half; });
        const auto run = half ? multiply_half : INTEGERS[vnni];
        run(first, static_cast<int>(last - first), x, rows, threads);
    }
    for (const Product& product : products) add_bias(*product.weight, rows, product.out);
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Rounds to bf16 if HALF, to nearest.
template <bool HALF>
inline float stored(float x) {
    if constexpr (!HALF) return x;
    const uint32_t bits = bits_of(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : float_of(rounded & 0xffff0000);
}

template <bool HALF>
void normalize(const float* x, int64_t width, const Norm& norm, float* out) {
    const auto* weight = static_cast<const float*>(norm.weight);
    __m256 squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
        const __m256 v = load(x + i, static_cast<int>(std::min<int64_t>(width - i, LANES)));
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    const float mean = total(squares) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + norm.epsilon);
    const float offset = norm.gemma ? 1.0f : 0.0f;
    const bool gemma = norm.gemma != 0;
    for (int64_t i = 0; i < width; i++) {
        const float exact = x[i] * scale;
        out[i] = stored<HALF>((offset + weight[i]) * (gemma ? exact : stored<HALF>(exact)));
    }
}

// Normalizes (if there is a norm) and rotates the heads of a row in place, as in ../layer.cpp.
template <bool HALF>
void rotate_heads(float* row, int64_t width, int64_t dim, const Norm& norm, const float* cos,
                  const float* sin) {
    for (float *head = row, *other = head + dim / 2; head < row + width;
         head += dim, other += dim) {
        if (norm.weight != nullptr) normalize<HALF>(head, dim, norm, head);
        for (int64_t i = 0; i < dim / 2; i++) {
            const float first = head[i];
            head[i] = stored<HALF>(stored<HALF>(first * cos[i]) - stored<HALF>(other[i] * sin[i]));
            other[i] = stored<HALF>(stored<HALF>(other[i] * cos[i + dim / 2]) +
                                    stored<HALF>(first * sin[i + dim / 2]));
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

inline void narrow(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; i++) to[i] = static_cast<bf16>(bits_of(from[i]) >> 16);
}

inline void widen(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] = float_of(uint32_t{from[i]} << 16);
}

constexpr int64_t CHUNK = 256;  // rows in bf16 that are computed together, except for attention
// From MANY_ROWS rows on, operations between products use all threads. The operation on gates takes
// longer, so it uses all threads from MANY_GATES vectors on.
constexpr int64_t MANY_ROWS = 64;
constexpr int64_t MANY_GATES = 512;

// Rows of q, k, v and attention's result, each [rows, elements], one after the other from `first`.
template <class Number>
struct Projected {
    Number *q, *k, *v, *attended;

    Projected(Number* first, int64_t rows, int64_t queries, int64_t keys)
        : q(first), k(q + rows * queries), v(k + rows * keys), attended(v + rows * keys) {}
};

// Runs hidden [rows, inputs], in place, through `count` layers of the same widths.
template <bool HALF>
void run_layers(const LayerRun* runs, int64_t count, float* hidden, int64_t rows, int threads) {
    const Layer& shape = *runs->layer;
    const int64_t width = shape.q.inputs, queries = shape.q.outputs, keys = shape.k.outputs;
    const int64_t most = HALF ? std::min(rows, CHUNK) : rows;
    const int64_t inner = (most * shape.gate.outputs + LANES - 1) / LANES * LANES;
    static thread_local Scratch memory, half_memory;
    float* gate = memory.take<float>(most * (width + 2 * queries + 2 * keys) + 2 * inner);
    float *up = gate + inner, *update = up + inner;
    const Projected<float> part(update + most * width, most, queries, keys);
    bf16* halves = HALF ? half_memory.take<bf16>(2 * rows * (queries + keys)) : nullptr;
    const Projected<bf16> all(halves, rows, queries, keys);
    const int row_threads = rows < MANY_ROWS ? 1 : threads;
    const auto project = [&](std::initializer_list<Product> products, const float* x,
                             int64_t some) {
        multiply(products, x, some, threads);
        for (const auto& [weight, out] : products)
            parallel_each(HALF ? row_threads : 1, HALF ? some : 0, [&](int64_t r) {
                float* row = out + r * weight->outputs;
                for (int64_t i = 0; i < weight->outputs; i++) row[i] = stored<HALF>(row[i]);
            });
    };
    // Adds `update` to rows, normalized if there is a norm for it.
    const auto add = [&](float* to, int64_t some, const Norm& norm) {
        parallel_each(row_threads, some, [&](int64_t r) {
            float *row = to + r * width, *more = update + r * width;
            if (norm.weight != nullptr) normalize<HALF>(more, width, norm, more);
            for (int64_t i = 0; i < width; i++) row[i] = stored<HALF>(row[i] + more[i]);
        });
    };
    // Writes normalized rows to `update`.
    const auto begin = [&](const float* from, int64_t some, const Norm& norm) {
        parallel_each(row_threads, some, [&](int64_t r) {
            normalize<HALF>(from + r * width, width, norm, update + r * width);
        });
    };
    const auto before = [&](const LayerRun& run, int64_t row, int64_t some) {
        const Layer& layer = *run.layer;
        const int64_t dim = layer.head_dim;
        const auto *cos = static_cast<const float*>(run.cos) + row * dim,
                   *sin = static_cast<const float*>(run.sin) + row * dim;
        begin(hidden + row * width, some, layer.before);
        project({{&layer.q, part.q}, {&layer.k, part.k}, {&layer.v, part.v}}, update, some);
        parallel_each(row_threads, some, [&](int64_t r) {
            float *q = part.q + r * queries, *k = part.k + r * keys, *v = part.v + r * keys;
            rotate_heads<HALF>(q, queries, dim, layer.q_heads, cos + r * dim, sin + r * dim);
            rotate_heads<HALF>(k, keys, dim, layer.k_heads, cos + r * dim, sin + r * dim);
            if (!HALF) return;
            narrow(q, queries, all.q + (row + r) * queries);
            narrow(k, keys, all.k + (row + r) * keys);
            narrow(v, keys, all.v + (row + r) * keys);
        });
    };
    const auto after = [&](const Layer& layer, int64_t row, int64_t some) {
        if (HALF) widen(all.attended + row * queries, some * queries, part.attended);
        project({{&layer.o, update}}, part.attended, some);
        add(hidden + row * width, some, layer.attention_update);
        begin(hidden + row * width, some, layer.after);
        multiply({{&layer.gate, gate}, {&layer.up, up}}, update, some, threads);
        const int64_t vectors = (some * layer.gate.outputs + LANES - 1) / LANES;
        parallel_each(vectors < MANY_GATES ? 1 : threads, vectors, [&](int64_t i) {
            multiply_gates(layer.activation, gate + i * LANES, up + i * LANES, LANES);
        });
        project({{&layer.down, update}}, gate, some);
        add(hidden + row * width, some, layer.mlp_update);
    };
    for (const LayerRun* run = runs; run < runs + count; run++) {
        const Layer& layer = *run->layer;
        const auto attend = [&](auto call, auto function, const auto& rows_of) {
            call.set_rows(rows_of.q, rows_of.k, rows_of.v, rows_of.attended, queries, keys,
                          layer.head_dim);
            function(run->step, &call);
        };
        for (int64_t row = 0; row < rows; row += most)
            before(*run, row, std::min(most, rows - row));
        if constexpr (HALF)
            attend(*run->call, headstart_attend, all);
        else if (run->call->key_scales != nullptr)
            attend(*reinterpret_cast<const Int8Call*>(run->call), headstart_attend_int8, part);
        else
            attend(*reinterpret_cast<const Call<float>*>(run->call), headstart_attend_float32,
                   part);
        for (int64_t row = 0; row < rows; row += most)
            after(layer, row, std::min(most, rows - row));
    }
}

}  // namespace

// out float [rows, outputs] = x float [rows, inputs] times the weight, plus its bias
extern "C" void headstart_float_linear(const Weight* weight, const float* x, int64_t rows,
                                       float* out, int threads) {
    multiply({{weight, out}}, x, rows, threads);
}

extern "C" void headstart_float_layers(const LayerRun* runs, int64_t count, float* hidden,
                                       int64_t rows, int threads) {
    run_layers<false>(runs, count, hidden, rows, threads);
}

// The same for rows of bf16 stored as floats.
extern "C" void headstart_half_layers(const LayerRun* runs, int64_t count, float* hidden,
                                      int64_t rows, int threads) {
    run_layers<true>(runs, count, hidden, rows, threads);
}
