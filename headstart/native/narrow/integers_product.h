// The product of integers.h; include it after the pragma.
//
// A Kind has the operations of a CPU:
//
//     LANES                              outputs in a vector, 8 or 16
//     MOST                               rows summed at the same time, for two vectors of outputs
//     Floats, Integers                   a vector: for each output a float, or four bytes
//     load(from), repeat(four)           a vector from memory; the same four bytes for each output
//     right(x, bits)                     shift right in lanes of 16 or 32 bits, not of bytes
//     from_bytes(from), from_halves(..)  convert a byte, or a float16, to a float for each output
//     fmadd(a, b, c)                     a * b + c, rounded once
//     Sum::of(middle)                    begin a group; middle: -128 times a row's sum of numbers
//     Sum.add(first, low, second, high)  add products of unsigned values and a row's numbers
//     Sum.add(bytes, numbers)            the same for 8 bits; bytes are values + 128. A Kind either
//                                        starts from `middle`, or subtracts 128 from each byte
//     Sum.widen()                        call after 4 calls of the first add, or 2 with 5 bits
//     Sum.total()                        the sums as floats
#pragma once

#include "integers.h"

namespace headstart::integers {
namespace {

// A vector's values: the lower four bits of each byte and, with 5 bits, a bit of `fifths`.
template <class Kind, class Form, class Integers>
inline Integers values(Integers four, Integers fifths, int bit) {
    const Integers value = four & int64_t{0x0f0f0f0f0f0f0f0f};
    if constexpr (Form::BITS == 4) return value;
    const Integers moved = bit < 4 ? fifths << (4 - bit) : Kind::right(fifths, bit - 4);
    return value | (moved & int64_t{0x1010101010101010});
}

// The stored steps or starts of a vector's outputs.
template <class Kind, class Form>
inline typename Kind::Floats grid(const uint8_t* from) {
    if constexpr (Form::IN_BYTES) return Kind::from_bytes(from);
    return Kind::from_halves(from);
}

// sums[row][output] = ROWS rows, from `row` on, times VECTORS vectors of outputs at `block`,
// without `scales`. Prefetches the data `ahead` bytes later in each of its panels.
template <class Kind, class Form, int ROWS, int VECTORS>
[[gnu::noinline]] void product(const uint8_t* block, const Rows& rows, int64_t row,
                               float (*sums)[VECTORS * Kind::LANES], int64_t ahead) {
    constexpr bool WIDE = Form::BITS == 8, FIVE = Form::BITS == 5, PLAIN = Form::GRID_BYTES == 0;
    constexpr int64_t BLOCK = Form::BYTES_OF_BLOCK;
    const int64_t other = rows.groups * BLOCK;  // the next panel
    // The address of a vector's outputs of `bytes` bytes each, in this block or the next panel's.
    const auto at = [&](int vector, int64_t from, int bytes) {
        const int output = vector * Kind::LANES;
        return block + from + output / PANEL * other + output % PANEL * bytes;
    };
    typename Kind::Floats sum[ROWS][VECTORS] = {};
    const Group* group = rows.first + row * rows.groups;
    for (int64_t g = 0; g < rows.groups; g++, group++, block += BLOCK) {
        const auto of = [&](int r) -> const Group& { return group[r * rows.groups]; };
        const auto x = [&](int r, int k) {
            int four;
            std::memcpy(&four, of(r).numbers + k, sizeof four);
            return Kind::repeat(four);
        };
        for (int64_t panel = 0; panel < VECTORS * Kind::LANES / PANEL; panel++)
            for (int64_t line = 0; line < BLOCK; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(block + ahead + panel * other + line),
                             _MM_HINT_T0);
        typename Kind::Sum exact[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int p = 0; p < VECTORS; p++) exact[r][p] = Kind::Sum::of(WIDE ? of(r).middle : 0);
#pragma GCC unroll 8
        for (int v = 0; WIDE && v < 8; v++) {
            typename Kind::Integers bytes[VECTORS];
#pragma GCC unroll 2
            for (int p = 0; p < VECTORS; p++)
                bytes[p] = Kind::load(at(p, Form::VALUES + 64 * v, 4));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const auto numbers = x(r, 4 * v);
#pragma GCC unroll 2
                for (int p = 0; p < VECTORS; p++) exact[r][p].add(bytes[p], numbers);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; !WIDE && v < 4; v++) {
            typename Kind::Integers first[VECTORS], second[VECTORS];
#pragma GCC unroll 2
            for (int p = 0; p < VECTORS; p++) {
                const auto bytes = Kind::load(at(p, Form::VALUES + 64 * v, 4));
                const auto fifths = FIVE ? Kind::load(at(p, Form::FIFTHS, 4)) : bytes;
                first[p] = values<Kind, Form>(bytes, fifths, 2 * v);
                second[p] = values<Kind, Form>(Kind::right(bytes, 4), fifths, 2 * v + 1);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const auto low = x(r, 4 * v), high = x(r, 4 * v + 16);
#pragma GCC unroll 2
                for (int p = 0; p < VECTORS; p++) {
                    exact[r][p].add(first[p], low, second[p], high);
                    if (v == 3 || (FIVE && v == 1)) exact[r][p].widen();
                }
            }
        }
#pragma GCC unroll 2
        for (int p = 0; p < VECTORS; p++) {
            typename Kind::Floats steps, starts, zero = {};
            if constexpr (!PLAIN) {
                steps = grid<Kind, Form>(at(p, 0, Form::GRID_BYTES));
                starts = grid<Kind, Form>(at(p, Form::STARTS, Form::GRID_BYTES));
                if constexpr (Form::IN_BYTES) starts = starts * Form::START_UNIT;
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const auto step = of(r).step - zero, of_row = of(r).sum - zero;
                sum[r][p] =
                    Kind::fmadd(exact[r][p].total(), PLAIN ? step : steps * step, sum[r][p]);
                if constexpr (!PLAIN) sum[r][p] = Kind::fmadd(starts, of_row, sum[r][p]);
            }
        }
    }
    std::memcpy(sums, sum, sizeof sum);
}

// The part of a product for panels from `begin` to before `end`.
template <class Kind, class Form>
void multiply_panels(const Weight& weight, const Rows& rounded, int64_t rows, float* out,
                     int64_t begin, int64_t end) {
    constexpr int64_t AHEAD = 4096;  // bytes
    constexpr int ALONE = PANEL / Kind::LANES;
    const auto* blocks = static_cast<const uint8_t*>(weight.panels);
    const int64_t bytes = rounded.groups * Form::BYTES_OF_BLOCK;
    const auto run = [&](int64_t panel, int64_t row, int64_t ahead, auto count, auto vectors) {
        constexpr int64_t WIDTH = vectors.value * Kind::LANES;
        float sums[count.value][WIDTH];
        product<Kind, Form, count.value, vectors.value>(blocks + panel * bytes, rounded, row, sums,
                                                        ahead);
        const int64_t some = std::min(WIDTH, weight.outputs - panel * PANEL);
        for (int r = 0; r < count.value; r++) {
            const float* scales = weight.scales + panel * PANEL;
            float* to = out + (row + r) * weight.outputs + panel * PANEL;
            for (int64_t o = 0; o < some; o++) to[o] = sums[r][o] * scales[o];
        }
    };
    for (int64_t block = 0; block < rows; block += MOST_ROWS) {
        const int64_t last = std::min(rows, block + MOST_ROWS);
        // The product of one or two rows is limited by memory, and sequential reads are fastest.
        const int64_t together = ALONE == 1 && last - block > 2 ? 2 : 1;
        for (int64_t panel = begin; panel < end; panel += together)
            for (int64_t row = block; row < last; row += Kind::MOST)
                with_count<Kind::MOST>(last - row, [&](auto count) {
                    const int64_t ahead = row == block ? std::min(bytes, AHEAD) : 0;
                    if (together == 2 && panel + 1 < end)
                        run(panel, row, row == block ? 2 * bytes : 0, count,
                            std::integral_constant<int, 2>());
                    else
                        run(panel, row, ahead, count, std::integral_constant<int, ALONE>());
                });
    }
}

// Calls a function with a value of type Form<number>; number is below FORMS.
template <int FORMS, class Function>
void with_form(int64_t number, const Function& function) {
    with_count<FORMS>(number + 1, [&](auto next) { function(Form<next.value - 1>()); });
}

// Threads share the rounding of rows and then the panels of each product. Products whose weights
// have the same columns, or none, use the same rounded rows.
template <class Kind>
void multiply(const Product* products, int count, const float* x, int64_t rows, int threads) {
    const int64_t groups = groups_of(*products->weight), all_groups = rows * groups;
    const Rows rounded{groups, take_groups(all_groups)};
    Stages stages;
    parallel(threads, [&](int thread, int all) {
        for (const Product* p = products; p < products + count; p++) {
            const Weight& weight = *p->weight;
            if (p == products || weight.columns != p[-1].weight->columns) {
                if (p != products) stages.finish(all);  // other threads may still use old rows
                round_groups(x, weight, all_groups * thread / all, all_groups * (thread + 1) / all,
                             rounded.first);
                stages.finish(all);
            }
            const int64_t panels = (weight.outputs + PANEL - 1) / PANEL;
            with_form<BF16>(weight.kind, [&](auto of) {
                multiply_panels<Kind, decltype(of)>(weight, rounded, rows, p->out,
                                                    panels * thread / all,
                                                    panels * (thread + 1) / all);
            });
        }
    });
}

}  // namespace
}  // namespace headstart::integers
