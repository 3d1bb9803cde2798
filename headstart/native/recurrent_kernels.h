// Recurrent layers; include it after the pragma.
//
// Tokens are computed one after another. So a sequence's result has the same bits in any batch, on
// any number of threads, and however its prompt is split into steps. A thread computes a head, or
// some channels, of a sequence. It converts a few tokens to float32, and then computes them for one
// part of the state after another. A part stays in registers or in the L1 cache.
//
// A Kind has the operations of a CPU, and the numbers of vectors that fit in its registers:
//
//     Floats                            a vector of 16 floats
//     COLUMNS                           vectors for a row of the delta rule's state
//     STATE                             vectors for a row of a scan's state
//     set, load, store                  one number in all lanes; from and to memory
//     add, multiply, divide, smaller, larger, round      in each lane
//     fmadd, fnmadd                     a * b + c and c - a * b, rounded once
//     times_power                       x * 2^n, for whole n from -126 to 127
#pragma once

#include "recurrent.h"

namespace headstart {
namespace {

constexpr int64_t LANES = 16;
constexpr int64_t PIECE = 32;          // tokens that are converted at a time
constexpr int64_t CHANNELS = 256;      // channels of a convolution that a thread computes at a time
constexpr int64_t FEW_NUMBERS = 8192;  // one thread computes rows with fewer numbers

inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    const uint32_t bits = uint32_t{x} << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

inline void narrow(float x, float* to) { *to = x; }
// Rounds to nearest, ties to even; NaN stays NaN.
inline void narrow(float x, bf16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    *to = static_cast<bf16>((bits & 0x7fffffff) > 0x7f800000 ? nan : nearest);
}

// Converts `count` numbers of a row from `column` on, padded with zeros to whole vectors.
template <class Number>
void read_row(const Strided& rows, int64_t row, int64_t column, int64_t count, float* to) {
    const Number* from = static_cast<const Number*>(rows.first) + row * rows.stride + column;
    for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]);
    for (int64_t i = count; i < padded(count); i++) to[i] = 0.0f;
}

template <class Number>
float read_number(const Strided& rows, int64_t row, int64_t column) {
    return widen(static_cast<const Number*>(rows.first)[row * rows.stride + column]);
}

template <class Number>
void write_row(const float* from, int64_t count, void* rows, int64_t offset) {
    Number* to = static_cast<Number*>(rows) + offset;
    for (int64_t i = 0; i < count; i++) narrow(from[i], to + i);
}

// Loads up to 16 floats, padded with zeros; zeros if `from` is null.
template <class Kind>
inline typename Kind::Floats load_some(const float* from, int64_t count) {
    if (from != nullptr && count >= LANES) return Kind::load(from);
    alignas(64) float numbers[LANES] = {};
    if (from != nullptr) std::memcpy(numbers, from, std::max<int64_t>(count, 0) * sizeof(float));
    return Kind::load(numbers);
}

template <class Kind>
inline void store_some(typename Kind::Floats x, float* to, int64_t count) {
    if (count >= LANES) return Kind::store(to, x);
    alignas(64) float numbers[LANES];
    Kind::store(numbers, x);
    std::memcpy(to, numbers, std::max<int64_t>(count, 0) * sizeof(float));
}

// The part of a state that this thread reads next: the same part of the next sequence or, after the
// last sequence, the next part of the first one. Null if there is none, or if it is zeros.
inline const float* next_source(const States& states, const Sequences& sequences, int64_t sequence,
                                int64_t part, int64_t parts, int64_t floats) {
    if (++sequence == sequences.count) sequence = 0, part++;
    return part < parts ? states.source(sequences, sequence, part * floats) : nullptr;
}

// Prefetches numbers of the next state, since reading it takes longer than computing one token.
inline void prefetch(const float* state, int64_t first, int64_t count) {
    for (int64_t i = first; state != nullptr && i < first + count; i += LANES)
        _mm_prefetch(reinterpret_cast<const char*>(state + i), _MM_HINT_T1);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));
using Order = int32_t __attribute__((vector_size(32)));

// The sums of neighbors: for every four numbers, two sums of a and then two sums of b.
inline Eight add_neighbors(Eight a, Eight b) {
    return __builtin_shuffle(a, b, Order{0, 2, 8, 10, 4, 6, 12, 14}) +
           __builtin_shuffle(a, b, Order{1, 3, 9, 11, 5, 7, 13, 15});
}

// out[i] = the sum of numbers[i][16], always in the same order. `count` is rounded up to whole 8s.
inline void add_lanes(const float* numbers, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += 8, numbers += 8 * LANES) {
        Eight sums[8];
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const auto* halves = reinterpret_cast<const Eight*>(numbers + k * LANES);
            sums[k] = halves[0] + halves[1];
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) sums[k] = add_neighbors(sums[2 * k], sums[2 * k + 1]);
        const Eight first = add_neighbors(sums[0], sums[1]);
        const Eight last = add_neighbors(sums[2], sums[3]);
        *reinterpret_cast<Eight*>(out + i) =
            __builtin_shuffle(first, last, Order{0, 1, 2, 3, 8, 9, 10, 11}) +
            __builtin_shuffle(first, last, Order{4, 5, 6, 7, 12, 13, 14, 15});
    }
}

// 2^x for x in [-126, 127], with a relative error of 1e-7; NaN stays NaN.
template <class Kind>
inline typename Kind::Floats power(typename Kind::Floats x) {
    x = Kind::larger(Kind::set(-126.0f), Kind::smaller(Kind::set(127.0f), x));
    const auto n = Kind::round(x);
    const auto f = Kind::fnmadd(n, Kind::set(1.0f), x);
    auto y = Kind::set(1.535336188319500e-4f);
#pragma GCC unroll 6
    for (const float term : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
                             2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f})
        y = Kind::fmadd(y, f, Kind::set(term));
    return Kind::times_power(y, n);
}

// x / (1 + e^-x)
template <class Kind>
inline typename Kind::Floats silu(typename Kind::Floats x) {
    const auto exponent = Kind::multiply(x, Kind::set(-1.44269504f));
    return Kind::divide(x, Kind::add(Kind::set(1.0f), power<Kind>(exponent)));
}

// Calls run(sequence, part) for `parts` parts of each sequence. A thread computes a range of parts
// for all sequences, since one sequence may be a long prompt.
template <class Function>
void each_part(const Sequences& sequences, int64_t parts, int64_t width, int threads,
               const Function& run) {
    const int64_t numbers = sequences.starts[sequences.count] * width;
    parallel_each(numbers < FEW_NUMBERS ? 1 : threads, parts * sequences.count,
                  [&](int64_t i) { run(i % sequences.count, i / sequences.count); });
}

// ---- causal convolution ----

template <class Kind, class Number, int WIDTH>
void convolve(const Sequences& sequences, const ConvCall& call, int64_t sequence, int64_t channel) {
    constexpr int64_t BEFORE = WIDTH - 1;
    const int64_t count = std::min(CHANNELS, call.channels - channel);
    const int64_t begin = sequences.starts[sequence], end = sequences.starts[sequence + 1];
    alignas(64) float taps[WIDTH][CHANNELS], bias[CHANNELS];
    alignas(64) float rows[BEFORE + PIECE][CHANNELS], out[CHANNELS];
    for (int j = 0; j < WIDTH; j++)
        read_row<float>({call.weight, call.channels}, j, channel, count, taps[j]);
    std::memset(bias, 0, sizeof bias);
    if (call.bias != nullptr) std::memcpy(bias, call.bias + channel, count * sizeof(float));
    const float* from = call.states.source(sequences, sequence, channel);
    std::memset(rows, 0, BEFORE * sizeof rows[0]);
    for (int64_t j = 0; from != nullptr && j < BEFORE; j++)
        std::memcpy(rows[j], from + j * call.channels, count * sizeof(float));
    const auto store_inputs = [&](float* to) {
        for (int64_t j = 0; j < BEFORE; j++)
            std::memcpy(to + j * call.channels, rows[j], count * sizeof(float));
    };
    int64_t save = sequences.first_save(begin), some;
    for (int64_t row = begin; row < end; row += some) {
        some = std::min(PIECE, sequences.cut(save, end) - row);
        for (int64_t t = 0; t < some; t++) {
            read_row<Number>(call.rows, row + t, channel, count, rows[BEFORE + t]);
            for (int64_t i = 0; i < count; i += LANES) {
                auto sum = Kind::load(bias + i);
#pragma GCC unroll 4
                for (int j = 0; j < WIDTH; j++)
                    sum = Kind::fmadd(Kind::load(taps[j] + i), Kind::load(rows[t + j] + i), sum);
                Kind::store(out + i, call.silu ? silu<Kind>(sum) : sum);
            }
            write_row<Number>(out, count, call.out, (row + t) * call.channels + channel);
        }
        std::memmove(rows, rows[some], BEFORE * sizeof rows[0]);
        if (sequences.saves_after(save, row + some - 1))
            store_inputs(call.states.saved(sequences, save++, channel));
    }
    store_inputs(call.states.target(sequences, sequence, channel));
}

template <class Kind, class Number>
void convolve_all(const Sequences& sequences, const ConvCall& call, int threads) {
    const int64_t parts = (call.channels + CHANNELS - 1) / CHANNELS;
    with_count<MOST_TAPS>(call.width, [&](auto width) {
        each_part(sequences, parts, call.channels, threads, [&](int64_t sequence, int64_t part) {
            convolve<Kind, Number, width.value>(sequences, call, sequence, part * CHANNELS);
        });
    });
}

// ---- gated delta rule ----

// A block of columns of a head's state, and sums over its rows.
template <class Kind>
struct DeltaBlock {
    static constexpr int VECTORS = Kind::COLUMNS;
    static constexpr int64_t WIDTH = VECTORS * LANES;
    using Floats = typename Kind::Floats;

    float* state;  // [key_dim, WIDTH]
    int64_t key_dim;
    Floats key_product[VECTORS];  // the next token's key times the state

    // Separate sums over even and odd rows, so that additions need not wait for each other.
    struct Sums {
        Floats parts[2][VECTORS];

        Sums() {
            for (auto& part : parts)
                for (Floats& sum : part) sum = Kind::set(0.0f);
        }
        void total(Floats* to) const {
            for (int c = 0; c < VECTORS; c++) to[c] = Kind::add(parts[0][c], parts[1][c]);
        }
    };

    // Calls run(row, row % 2) for each row, two at a time.
    template <class Function>
    __attribute__((always_inline)) void each_row(const Function& run) const {
        const int64_t even = key_dim / 2 * 2;
        for (int64_t r = 0; r < even; r += 2) {
            run(r, std::integral_constant<int, 0>());
            run(r + 1, std::integral_constant<int, 1>());
        }
        if (even < key_dim) run(even, std::integral_constant<int, 0>());
    }

    // Reads the first `count` columns of [key_dim, stride] (zeros if `from` is null), and sets
    // `key_product` for a token. Prefetches a block at `following`.
    void read(const float* from, int64_t stride, int64_t count, const float* key,
              const float* following) {
        Sums sums;
        const auto copy = [&](int64_t r, auto part, auto whole) __attribute__((always_inline)) {
            prefetch(following, r * WIDTH, WIDTH);
            const Floats factor = Kind::set(key[r]);
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; c++) {
                Floats x;
                if constexpr (whole)
                    x = Kind::load(from + r * stride + c * LANES);
                else
                    x = load_some<Kind>(from == nullptr ? from : from + r * stride + c * LANES,
                                        count - c * LANES);
                Kind::store(state + r * WIDTH + c * LANES, x);
                sums.parts[part][c] = Kind::fmadd(factor, x, sums.parts[part][c]);
            }
        };
        if (from != nullptr && count >= WIDTH)
            each_row([&](int64_t r, auto part) { copy(r, part, std::true_type()); });
        else
            each_row([&](int64_t r, auto part) { copy(r, part, std::false_type()); });
        sums.total(key_product);
    }

    void write(float* to, int64_t stride, int64_t count) const {
        for (int64_t r = 0; r < key_dim; r++)
            for (int c = 0; c < VECTORS; c++)
                store_some<Kind>(Kind::load(state + r * WIDTH + c * LANES),
                                 to + r * stride + c * LANES, count - c * LANES);
    }

    // Computes one token: the state decays, and the outer product of `key` and `written` is added.
    // out [WIDTH] = `query` times the state. With MORE, sets `key_product` for `next`.
    template <bool MORE>
    void step(float decay, const Floats* written, const float* key, const float* query,
              const float* next, float* out) {
        Sums returned, following;
        const Floats factor = Kind::set(decay);
        each_row([&](int64_t r, auto part) __attribute__((always_inline)) {
            const Floats k = Kind::set(key[r]), q = Kind::set(query[r]);
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; c++) {
                float* at = state + r * WIDTH + c * LANES;
                const Floats x = Kind::fmadd(k, written[c], Kind::multiply(factor, Kind::load(at)));
                Kind::store(at, x);
                returned.parts[part][c] = Kind::fmadd(q, x, returned.parts[part][c]);
                if constexpr (MORE)
                    following.parts[part][c] =
                        Kind::fmadd(Kind::set(next[r]), x, following.parts[part][c]);
            }
        });
        Floats sums[VECTORS];
        returned.total(sums);
        for (int c = 0; c < VECTORS; c++) Kind::store(out + c * LANES, sums[c]);
        if constexpr (MORE) following.total(key_product);
    }
};

// x [dim] / |x|, times `scale`.
template <class Kind>
void normalize(float* x, int64_t dim, float scale) {
    auto squares = Kind::set(0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        const auto numbers = Kind::load(x + i);
        squares = Kind::fmadd(numbers, numbers, squares);
    }
    alignas(64) float lanes[8 * LANES] = {}, sums[8];
    Kind::store(lanes, squares);
    add_lanes(lanes, 1, sums);
    const float factor = scale / std::sqrt(sums[0] + 1e-6f);
    for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

// Copies a state of `count` floats from source to target, for a sequence without rows.
inline void copy_state(const float* from, float* to, int64_t count) {
    if (from == nullptr)
        std::memset(to, 0, count * sizeof(float));
    else
        std::memmove(to, from, count * sizeof(float));
}

template <class Kind, class Number>
class DeltaHead {
  public:
    DeltaHead(const Sequences& sequences, const DeltaCall& call, int64_t sequence, int64_t head)
        : sequences_(sequences),
          call_(call),
          head_(head),
          rate_(-std::exp(call.a_log[head])),
          key_head_(head / (call.heads / call.key_heads)),
          key_width_(padded(call.key_dim)),
          value_width_((call.value_dim + WIDTH - 1) / WIDTH * WIDTH),
          begin_(sequences.starts[sequence]),
          end_(sequences.starts[sequence + 1]),
          from_(call.states.source(sequences, sequence, head * call.key_dim * call.value_dim)),
          to_(call.states.target(sequences, sequence, head * call.key_dim * call.value_dim)),
          next_(next_source(call.states, sequences, sequence, head, call.heads,
                            call.key_dim * call.value_dim)) {
        static thread_local Scratch memory;
        query_ =
            memory.take<float>(PIECE * (2 * key_width_ + 2 * value_width_) + key_width_ * WIDTH);
        key_ = query_ + PIECE * key_width_;
        value_ = key_ + PIECE * key_width_;
        out_ = value_ + PIECE * value_width_;
        state_ = out_ + PIECE * value_width_;
    }

    void run() {
        const int64_t size = call_.key_dim * call_.value_dim;
        if (begin_ == end_) copy_state(from_, to_, size);
        int64_t save = sequences_.first_save(begin_), count;
        for (int64_t row = begin_; row < end_; row += count) {
            count = std::min(PIECE, sequences_.cut(save, end_) - row);
            for (int64_t t = 0; t < count; t++) read_token(row + t, t);
            for (int64_t column = 0; column < call_.value_dim; column += WIDTH) walk(column, count);
            for (int64_t t = 0; t < count; t++)
                write_row<Number>(out_ + t * value_width_, call_.value_dim, call_.out,
                                  ((row + t) * call_.heads + head_) * call_.value_dim);
            from_ = to_;
            if (sequences_.saves_after(save, row + count - 1))
                copy_state(to_, call_.states.saved(sequences_, save++, head_ * size), size);
        }
    }

  private:
    using Block = DeltaBlock<Kind>;
    static constexpr int64_t WIDTH = Block::WIDTH;

    void read_token(int64_t row, int64_t t) {
        const int64_t dim = call_.key_dim;
        float *query = query_ + t * key_width_, *key = key_ + t * key_width_;
        read_row<Number>(call_.query, row, key_head_ * dim, dim, query);
        read_row<Number>(call_.key, row, key_head_ * dim, dim, key);
        normalize<Kind>(query, dim, 1.0f / std::sqrt(static_cast<float>(dim)));
        normalize<Kind>(key, dim, 1.0f);
        read_row<Number>(call_.value, row, head_ * call_.value_dim, call_.value_dim,
                         value_ + t * value_width_);
        const float a = read_number<Number>(call_.a, row, head_);
        decay_[t] = std::exp(rate_ * softplus(a + call_.dt_bias[head_]));
        beta_[t] = sigmoid(read_number<Number>(call_.b, row, head_));
    }

    // Computes `count` tokens for the block of the state from `column` on.
    void walk(int64_t column, int64_t count) {
        const int64_t width = call_.value_dim, columns = std::min(WIDTH, width - column);
        Block block{state_, call_.key_dim, {}};
        // Blocks prefetch the next state sequentially, not by columns.
        block.read(from_ == nullptr ? from_ : from_ + column, width, columns, key_,
                   next_ == nullptr ? next_ : next_ + column * call_.key_dim);
        for (int64_t t = 0; t < count; t++) {
            const float *query = query_ + t * key_width_, *key = key_ + t * key_width_;
            const float* value = value_ + t * value_width_ + column;
            float* out = out_ + t * value_width_ + column;
            typename Kind::Floats written[Block::VECTORS];
            for (int c = 0; c < Block::VECTORS; c++) {
                const auto missing = Kind::fnmadd(Kind::set(decay_[t]), block.key_product[c],
                                                  Kind::load(value + c * LANES));
                written[c] = Kind::multiply(Kind::set(beta_[t]), missing);
            }
            if (t + 1 < count)
                block.template step<true>(decay_[t], written, key, query, key + key_width_, out);
            else
                block.template step<false>(decay_[t], written, key, query, nullptr, out);
        }
        block.write(to_ + column, width, columns);
    }

    const Sequences& sequences_;
    const DeltaCall& call_;
    const int64_t head_;
    const float rate_;
    const int64_t key_head_, key_width_, value_width_, begin_, end_;
    const float* from_;
    float* const to_;
    const float* const next_;
    // Converted tokens: normalized query and key [PIECE, key_width_], value and out
    // [PIECE, value_width_]. state_ has one block.
    float *query_, *key_, *value_, *out_, *state_;
    float decay_[PIECE], beta_[PIECE];
};

// ---- Mamba-2 ----

template <class Kind, class Number>
class ScanHead {
  public:
    ScanHead(const Sequences& sequences, const ScanCall& call, int64_t sequence, int64_t head)
        : sequences_(sequences),
          call_(call),
          head_(head),
          rate_(-std::exp(call.a_log[head])),
          group_(head / (call.heads / call.groups)),
          dim_(call.head_dim),
          width_(padded(call.state)),
          begin_(sequences.starts[sequence]),
          end_(sequences.starts[sequence + 1]),
          from_(call.states.source(sequences, sequence, head * dim_ * call.state)),
          to_(call.states.target(sequences, sequence, head * dim_ * call.state)),
          next_(
              next_source(call.states, sequences, sequence, head, call.heads, dim_ * call.state)) {
        static thread_local Scratch memory;
        const int64_t x_width = padded(dim_);
        b_ = memory.take<float>(PIECE * (2 * width_ + 2 * x_width));
        c_ = b_ + PIECE * width_;
        x_ = c_ + PIECE * width_;
        stepped_ = x_ + PIECE * x_width;
    }

    void run() {
        const int64_t size = dim_ * call_.state;
        if (begin_ == end_) copy_state(from_, to_, size);
        int64_t save = sequences_.first_save(begin_), count;
        for (int64_t row = begin_; row < end_; row += count) {
            count = std::min(PIECE, sequences_.cut(save, end_) - row);
            for (int64_t t = 0; t < count; t++) read_token(row + t, t);
            for (int64_t p = 0; p < dim_; p += TOGETHER)
                walk(p, std::min(TOGETHER, dim_ - p), count);
            for (int64_t t = 0; t < count; t++)
                write_row<Number>(x_ + t * padded(dim_), dim_, call_.out,
                                  ((row + t) * call_.heads + head_) * dim_);
            from_ = to_;
            if (sequences_.saves_after(save, row + count - 1))
                copy_state(to_, call_.states.saved(sequences_, save++, head_ * size), size);
        }
    }

  private:
    static constexpr int64_t TOGETHER = 8;  // rows of the state whose lanes are added together

    void read_token(int64_t row, int64_t t) {
        const int64_t n = call_.state, at = t * padded(dim_);
        read_row<Number>(call_.b, row, group_ * n, n, b_ + t * width_);
        read_row<Number>(call_.c, row, group_ * n, n, c_ + t * width_);
        read_row<Number>(call_.x, row, head_ * dim_, dim_, x_ + at);
        const float dt = read_number<Number>(call_.dt, row, head_) + call_.dt_bias[head_];
        const float step = std::min(std::max(softplus(dt), call_.shortest), call_.longest);
        decay_[t] = std::exp(rate_ * step);
        for (int64_t p = 0; p < dim_; p++) stepped_[at + p] = x_[at + p] * step;
    }

    // Computes `count` tokens for `rows` rows of the state; x becomes the output.
    void walk(int64_t first, int64_t rows, int64_t count) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t n = 0; n < width_; n += Kind::STATE * LANES)
                with_count<Kind::STATE>((width_ - n) / LANES, [&](auto vectors) {
                    walk_row<vectors.value>(first + r, n, count, sums_ + r * LANES, rows * LANES);
                });
        alignas(64) float totals[TOGETHER * PIECE];
        add_lanes(sums_, rows * count, totals);
        for (int64_t t = 0; t < count; t++) {
            float *x = x_ + t * padded(dim_) + first, *total = totals + t * rows;
            for (int64_t r = 0; r < rows; r++) x[r] = std::fma(call_.d[head_], x[r], total[r]);
        }
    }

    // Computes `count` tokens for part of row p: VECTORS vectors from number `n` on. Adds to the
    // sums of earlier vectors: 16 lanes for each token, `stride` floats from token to token. Not
    // inlined, so that all vectors are in registers.
    template <int VECTORS>
    [[gnu::noinline]] void walk_row(int64_t p, int64_t n, int64_t count, float* sums,
                                    int64_t stride) const {
        const int64_t place = p * call_.state + n, left = call_.state - n;
        const int64_t width = width_, x_width = padded(dim_);
        prefetch(next_, place, VECTORS * LANES);
        const float *b = b_ + n, *c = c_ + n, *x = stepped_ + p, *decay = decay_;
        typename Kind::Floats state[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            state[v] = load_some<Kind>(from_ == nullptr ? from_ : from_ + place + v * LANES,
                                       left - v * LANES);
        for (int64_t t = 0; t < count; t++) {
            const auto factor = Kind::set(decay[t]), step = Kind::set(*x);
            auto sum = n == 0 ? Kind::set(0.0f) : Kind::load(sums);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                state[v] =
                    Kind::fmadd(step, Kind::load(b + v * LANES), Kind::multiply(factor, state[v]));
                sum = Kind::fmadd(Kind::load(c + v * LANES), state[v], sum);
            }
            Kind::store(sums, sum);
            b += width, c += width, x += x_width, sums += stride;
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            store_some<Kind>(state[v], to_ + place + v * LANES, left - v * LANES);
    }

    const Sequences& sequences_;
    const ScanCall& call_;
    const int64_t head_;
    const float rate_;
    const int64_t group_, dim_, width_, begin_, end_;
    const float* from_;
    float* const to_;
    const float* const next_;
    // Converted tokens: b and c [PIECE, width_], x, and x times dt.
    float *b_, *c_, *x_, *stepped_;
    float decay_[PIECE];
    alignas(64) float sums_[TOGETHER * PIECE * LANES];
};

// ---- all heads ----

template <template <class, class> class Head, class Kind, class Call>
void run_heads(const Sequences& sequences, const Call& call, int64_t width, int threads) {
    each_part(sequences, call.heads, width, threads, [&](int64_t sequence, int64_t head) {
        if (call.bf16)
            Head<Kind, bf16>(sequences, call, sequence, head).run();
        else
            Head<Kind, float>(sequences, call, sequence, head).run();
    });
}

template <class Kind>
void run_conv(const Sequences& sequences, const ConvCall& call, int threads) {
    if (call.bf16)
        convolve_all<Kind, bf16>(sequences, call, threads);
    else
        convolve_all<Kind, float>(sequences, call, threads);
}

template <class Kind>
void run_delta(const Sequences& sequences, const DeltaCall& call, int threads) {
    const int64_t state = call.heads * call.key_dim * call.value_dim;
    run_heads<DeltaHead, Kind>(sequences, call, state, threads);
}

template <class Kind>
void run_scan(const Sequences& sequences, const ScanCall& call, int threads) {
    const int64_t state = call.heads * call.head_dim * call.state;
    run_heads<ScanHead, Kind>(sequences, call, state, threads);
}

}  // namespace
}  // namespace headstart
