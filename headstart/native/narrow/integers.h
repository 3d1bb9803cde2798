// Weights of 4, 5 or 8 bits, and rows of 8 bits to multiply them by.
//
// A weight [outputs, inputs] lies in panels of 16 outputs, and a panel in groups of 32 inputs. What
// belongs to one group of one panel lies side by side, so a product reads a weight from its first
// byte to its last. Of 4 or 5 bits:
//
//     steps[16], starts[16]      float16; or bytes: a start is then -8 (4 bits) or -16 times its byte
//     bytes[4][16][4]            byte [v][o][b]: input 4v + b of output o; above it 16 + 4v + b
//     fifths[16][4]              of 5 bits: bit 2v + h of byte [o][b]: the fifth of 16h + 4v + b
//
//     weight[o, i] = (value * step + start) * scales[o] * columns[i]
//
// Of 8 bits it has no steps and starts, or float16; a value is its byte less 128:
//
//     bytes[8][16][4]            byte [v][o][b]: input 4v + b of output o
//
// A row is multiplied by `columns`; then each 32 inputs of it become whole numbers of 8 bits and a
// step of their own. Sums within a group are exact, and groups are added in order. So a row has the
// same bits alone, in any batch, on any number of threads, and by any instruction set.
#pragma once

#include "../weight.h"

namespace headstart::integers {

constexpr int64_t GROUP = 32;      // inputs
constexpr int64_t PANEL = 16;      // outputs
constexpr int64_t MOST_ROWS = 64;  // that stay in the second cache with a panel

// How a weight lies; Python names it by a number: 2 for 5 bits + 1 for bytes, or of 8 bits INT8 or
// INT8_IN_GROUPS.
template <int NUMBER>
struct Form {
    static constexpr int BITS = NUMBER >= INT8 ? 8 : 4 + NUMBER / 2;
    static constexpr bool IN_BYTES = BITS < 8 && NUMBER % 2 == 1;
    static constexpr int GRID_BYTES = NUMBER == INT8 ? 0
                                      : IN_BYTES     ? 1
                                                     : 2;      // of a step or a start
    static constexpr int64_t STARTS = PANEL * GRID_BYTES;  // where they begin
    static constexpr int64_t VALUES = 2 * STARTS;
    static constexpr int64_t FIFTHS = VALUES + PANEL * GROUP / (BITS == 8 ? 1 : 2);
    static constexpr int64_t BYTES_OF_BLOCK = FIFTHS + (BITS == 5 ? PANEL * GROUP / 8 : 0);
    static constexpr float START_UNIT = -(1 << (BITS - 1));
};

// A group of a row as whole numbers, their step, step times sum, and -128 times sum.
struct Group {
    int8_t numbers[GROUP];
    float step, sum;
    int32_t middle;
};

// Rows [rows, groups].
struct Rows {
    int64_t groups;
    Group* first;
};

// The rows of x, on `threads` threads; in memory of the caller's thread, until the next call.
Rows round_rows(const float* x, int64_t rows, const Weight& weight, int threads);

}  // namespace headstart::integers
