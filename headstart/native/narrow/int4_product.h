// The product of int4.h; include it after the pragma.
//
// A Kind says how a CPU computes. The 16 outputs of a panel are PARTS vectors:
//
//     MOST                               rows whose sums are taken together
//     Floats, Integers                   one vector: its outputs' numbers, of 32 bits or four of 8
//     load(from), repeat(four)           reads a vector; one of the same four bytes in each
//     right(x, bits)                     shifted right, some number of bytes at once
//     from_bytes(from), from_halves(..)  the floats of bytes, and of float16
//     fmadd(a, b, c)                     a * b + c, rounded once
//     Sum.add(first, low, second, high)  adds products of values (without a sign) and a row's numbers
//     Sum.widen()                        comes after 4 such calls, or 2 with values of 5 bits
//     Sum.total()                        the sums as floats
#pragma once

#include "int4.h"

namespace headstart::int4 {
namespace {

// Four bits of a vector's values, and the fifth bit of each, which is `bit` of a byte.
template <class Kind, class Form, class Integers>
inline Integers values(Integers four, Integers fifths, int bit) {
    const Integers value = four & int64_t{0x0f0f0f0f0f0f0f0f};
    if constexpr (!Form::FIVE) return value;
    const Integers moved = bit < 4 ? fifths << (4 - bit) : Kind::right(fifths, bit - 4);
    return value | (moved & int64_t{0x1010101010101010});
}

// The steps, or in other units the starts, of a vector's outputs.
template <class Kind, class Form>
inline typename Kind::Floats grid(const uint8_t* from, int part) {
    constexpr int LANES = PANEL / Kind::PARTS;
    if constexpr (Form::IN_BYTES) return Kind::from_bytes(from + LANES * part);
    return Kind::from_halves(from + 2 * LANES * part);
}

inline int four(const int8_t* from) {
    int bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}

// sums[row][16] = rows from `row` on times a panel, before `scales`. Meanwhile it fetches what lies
// `ahead` bytes further on.
template <class Kind, class Form, int ROWS>
[[gnu::noinline]] void product(const uint8_t* block, const Rows& rows, int64_t row,
                               float (*sums)[PANEL], int64_t ahead) {
    constexpr int64_t BLOCK = Form::BYTES_OF_BLOCK;
    constexpr int PARTS = Kind::PARTS;
    typename Kind::Floats sum[ROWS][PARTS] = {};
    for (int64_t g = 0; g < rows.groups; g++, block += BLOCK) {
        for (int64_t line = 0; line < BLOCK; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(block + ahead + line), _MM_HINT_T0);
        typename Kind::Sum exact[ROWS][PARTS] = {};
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            typename Kind::Integers first[PARTS], second[PARTS];
#pragma GCC unroll 2
            for (int p = 0; p < PARTS; p++) {
                const int64_t at = 64 / PARTS * p;
                const auto bytes = Kind::load(block + Form::VALUES + 64 * v + at);
                const auto fifths = Form::FIVE ? Kind::load(block + Form::FIFTHS + at) : bytes;
                first[p] = values<Kind, Form>(bytes, fifths, 2 * v);
                second[p] = values<Kind, Form>(Kind::right(bytes, 4), fifths, 2 * v + 1);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const int8_t* x = &rows.numbers[((row + r) * rows.groups + g) * GROUP + 4 * v];
                const auto low = Kind::repeat(four(x)), high = Kind::repeat(four(x + 16));
#pragma GCC unroll 2
                for (int p = 0; p < PARTS; p++) {
                    exact[r][p].add(first[p], low, second[p], high);
                    if (v == 3 || (Form::FIVE && v == 1)) exact[r][p].widen();
                }
            }
        }
#pragma GCC unroll 2
        for (int p = 0; p < PARTS; p++) {
            const auto steps = grid<Kind, Form>(block, p);
            auto starts = grid<Kind, Form>(block + Form::STARTS, p);
            if constexpr (Form::IN_BYTES) starts = starts * Form::START_UNIT;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const int64_t at = (row + r) * rows.groups + g;
                const auto of_row = rows.sums[at] - typename Kind::Floats{};  // in every lane
                sum[r][p] = Kind::fmadd(exact[r][p].total(), steps * rows.steps[at], sum[r][p]);
                sum[r][p] = Kind::fmadd(starts, of_row, sum[r][p]);
            }
        }
    }
    std::memcpy(sums, sum, sizeof sum);
}

template <class Kind, class Form>
void multiply_form(const Weight& weight, const float* x, int64_t rows, float* out, int threads) {
    const auto* blocks = static_cast<const uint8_t*>(weight.panels);
    const int64_t panels = (weight.outputs + PANEL - 1) / PANEL;
    const Rows rounded = round_rows(x, rows, weight, threads);
    const int64_t bytes = rounded.groups * Form::BYTES_OF_BLOCK;
    const auto finish = [&](int64_t row, int64_t output, const float* sums) {
        const int64_t count = std::min(PANEL, weight.outputs - output);
        float* to = out + row * weight.outputs + output;
        for (int64_t o = 0; o < count; o++) to[o] = sums[o] * weight.scales[output + o];
    };
    parallel(threads, [&](int thread, int all) {
        const int64_t begin = panels * thread / all;
        const int64_t end = panels * (thread + 1) / all;
        for (int64_t block = 0; block < rows; block += MOST_ROWS) {
            const int64_t last = std::min(rows, block + MOST_ROWS);
            for (int64_t panel = begin; panel < end; panel++)
                for (int64_t row = block; row < last; row += Kind::MOST)
                    with_count<Kind::MOST>(last - row, [&](auto count) {
                        float sums[count.value][PANEL];
                        product<Kind, Form, count.value>(blocks + panel * bytes, rounded, row, sums,
                                                         row == block ? bytes : 0);
                        for (int r = 0; r < count.value; r++)
                            finish(row + r, panel * PANEL, sums[r]);
                    });
        }
    });
}

// Calls a function with the Form of this number.
template <class Function>
void with_form(int64_t number, const Function& function) {
    with_count<4>(number + 1, [&](auto next) {
        constexpr int NUMBER = next.value - 1;
        function(Form<NUMBER / 2 == 1, NUMBER % 2 == 1>());
    });
}

template <class Kind>
void multiply(const Weight& weight, const float* x, int64_t rows, float* out, int threads) {
    with_form(weight.kind, [&](auto of) {
        multiply_form<Kind, decltype(of)>(weight, x, rows, out, threads);
    });
}

}  // namespace
}  // namespace headstart::int4
