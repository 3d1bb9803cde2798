// Products of rows with a weight of narrow numbers that lies in rows itself, in steps of 16 inputs;
// include it after the pragma.
//
// A Kind says how numbers are multiplied:
//
//     Number, Input         of the weight, and of the rows
//     OUTPUTS               how many outputs are summed together, by the number of rows (1 to 4):
//                           sums, weights and one vector of a row fit in 16 registers
//     Vector, PARTS         a step has PARTS vectors; those of rows are aligned
//     load(from, part)      one of the weight
//     Sum.add(weight, row)  adds the products of two vectors
//     Sum.total()           the sum for an output
#pragma once

#include "digits.h"

namespace headstart {
namespace {

constexpr int64_t STEP = 16;       // inputs
constexpr int64_t TILE = 1 << 16;  // bytes of the weight that stay in the second cache
constexpr int64_t WHOLE = 12;      // outputs: a tile has a multiple of them, as 1 to 4 divide it
constexpr int64_t MOST_ROWS = 64;  // that stay there with them
constexpr int TOGETHER = 4;        // outputs, and rows, whose sums are taken together at most
constexpr size_t LONG_ROW = 12288;  // bytes; four of longer rows do not stay in the first cache

inline int64_t steps_of(int64_t inputs) { return (inputs + STEP - 1) / STEP; }

// OUTPUTS rows of the weight, the first at `weight`, times ROWS rows: sums[row][output]. The last
// step of the weight, if it is not a whole one, is copied: behind it lies another row.
template <class Kind, int OUTPUTS, int ROWS>
void multiply(const typename Kind::Number* weight, int64_t inputs,
              const typename Kind::Input* rows, float (*sums)[TOGETHER], int64_t ahead) {
    using Number = typename Kind::Number;
    using Vector = typename Kind::Vector;
    const int64_t whole = inputs / STEP, steps = steps_of(inputs);
    typename Kind::Sum sum[OUTPUTS][ROWS] = {};
    const auto step = [&](int64_t at, const Number* from, int64_t next) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int part = 0; part < Kind::PARTS; part++) {
            Vector weights[OUTPUTS];
#pragma GCC unroll 4
            for (int o = 0; o < OUTPUTS; o++) weights[o] = Kind::load(from + o * next, part);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                auto row = reinterpret_cast<const Vector*>(rows + (r * steps + at) * STEP)[part];
                asm("" : "+x"(row));  // in a register, or every product loads it anew
#pragma GCC unroll 4
                for (int o = 0; o < OUTPUTS; o++) sum[o][r].add(weights[o], row);
            }
        }
    };
    // Rows of a weight are short: the hardware would find each anew. So what comes `ahead` numbers
    // later is fetched meanwhile, into the second cache, which waits for more lines than the first.
    for (int64_t at = 0; at < whole; at++) {
        const Number* now = weight + at * STEP;
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++)
            _mm_prefetch(reinterpret_cast<const char*>(now + o * inputs + ahead), _MM_HINT_T1);
        step(at, now, inputs);
    }
    if (whole < steps) {
        Number tails[OUTPUTS][STEP] = {};
        for (int o = 0; o < OUTPUTS; o++)
            std::memcpy(tails[o], weight + o * inputs + whole * STEP, inputs % STEP * sizeof(Number));
        step(whole, tails[0], STEP);
    }
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[r][o] = sum[o][r].total();
}

// Calls finish(row, output, sum) for the products of all rows, which lie in whole steps with zeros
// at their ends, with a weight [outputs, inputs].
template <class Kind, class Finish>
void multiply_rows(const typename Kind::Number* weight, int64_t outputs, int64_t inputs,
                   const typename Kind::Input* rows, int64_t count, int threads,
                   const Finish& finish) {
    const auto multiply_some = [&](int64_t row, auto height, int64_t from, int64_t to, int64_t ahead) {
        constexpr int ROWS = height.value, OUTPUTS = Kind::OUTPUTS[ROWS - 1];
        for (int64_t output = from; output < to;) {
            const bool one = to - output < OUTPUTS;
            float sums[ROWS][TOGETHER];
            (one ? multiply<Kind, 1, ROWS> : multiply<Kind, OUTPUTS, ROWS>)(
                weight + output * inputs, inputs, rows + row * steps_of(inputs) * STEP, sums,
                ahead * inputs);
            for (int r = 0; r < ROWS; r++)
                for (int o = 0; o < (one ? 1 : OUTPUTS); o++)
                    finish(row + r, output + o, sums[r][o]);
            output += one ? 1 : OUTPUTS;
        }
    };
    const int64_t width = inputs * sizeof *weight;
    const int64_t tall = inputs * sizeof *rows > LONG_ROW ? TOGETHER / 2 : TOGETHER;
    const int64_t tile = std::max<int64_t>(WHOLE, TILE / width / WHOLE * WHOLE);
    parallel(threads, [&](int thread, int all) {
        const int64_t begin = outputs * thread / all, end = outputs * (thread + 1) / all;
        for (int64_t block = 0; block < count; block += MOST_ROWS)
            for (int64_t from = begin; from < end; from += tile) {
                const int64_t last = std::min(count, block + MOST_ROWS);
                for (int64_t row = block; row < last; row += tall)
                    with_count<TOGETHER>(std::min(tall, last - row), [&](auto height) {
                        multiply_some(row, height, from, std::min(end, from + tile),
                                      row == block ? TOGETHER : tile);
                    });
            }
    });
}

}  // namespace
}  // namespace headstart
