// Weights of 4, 5 or 8 bits, and rows of 8 bits to multiply them by.
//
// A weight [outputs, inputs] is stored in panels of 16 outputs, and a panel in groups of 32 inputs.
// The data of one group of one panel is contiguous, so a product reads a weight sequentially. With
// 4 or 5 bits:
//
//     steps[16], starts[16]      float16, or bytes; with bytes, a start is -8 (4 bits) or -16 (5
//                                bits) times its byte
//     bytes[4][16][4]            byte [v][o][b] of output o: input 4v + b in the low half, input
//                                16 + 4v + b in the high half
//     fifths[16][4]              5 bits: bit 2v + h of byte [o][b]: fifth bit of input 16h + 4v + b
//
//     weight[o, i] = (value * step + start) * scales[o] * columns[i]
//
// With 8 bits, steps and starts are float16 or absent, and a value is its byte minus 128:
//
//     bytes[8][16][4]            byte [v][o][b]: input 4v + b of output o
//
// A row is multiplied by `columns`. Then each group of 32 inputs is rounded to 8-bit integers with
// a step. Sums within a group are exact, and groups are added in order. So the result of a row has
// the same bits in any batch, on any number of threads, and with any instruction set.
#pragma once

#include "../weight.h"

namespace headstart::integers {

constexpr int64_t GROUP = 32;      // inputs
constexpr int64_t PANEL = 16;      // outputs
constexpr int64_t MOST_ROWS = 64;  // rows that fit in the L2 cache with a panel

// The layout of a weight. NUMBER is Weight::kind: INT8, INT8_IN_GROUPS, or 0 to 3. 0 and 1 have 4
// bits, 2 and 3 have 5 bits; in 1 and 3, steps and starts are bytes.
template <int NUMBER>
struct Form {
    static constexpr int BITS = NUMBER >= INT8 ? 8 : 4 + NUMBER / 2;
    static constexpr bool IN_BYTES = BITS < 8 && NUMBER % 2 == 1;
    static constexpr int GRID_BYTES = NUMBER == INT8 ? 0
                                      : IN_BYTES     ? 1
                                                     : 2;      // bytes of a step or a start
    static constexpr int64_t STARTS = PANEL * GRID_BYTES;  // offset of the starts
    static constexpr int64_t VALUES = 2 * STARTS;
    static constexpr int64_t FIFTHS = VALUES + PANEL * GROUP / (BITS == 8 ? 1 : 2);
    static constexpr int64_t BYTES_OF_BLOCK = FIFTHS + (BITS == 5 ? PANEL * GROUP / 8 : 0);
    static constexpr float START_UNIT = -(1 << (BITS - 1));
};

inline int64_t groups_of(const Weight& weight) { return (weight.inputs + GROUP - 1) / GROUP; }

// A group of a row as integers. sum: step times their sum. middle: -128 times their sum.
struct Group {
    int8_t numbers[GROUP];
    float step, sum;
    int32_t middle;
};

// Rounded rows [rows, groups].
struct Rows {
    int64_t groups;
    Group* first;
};

// Memory of the calling thread for rounded rows [rows, groups], valid until the next call.
Group* take_groups(int64_t count);

// Rounds groups from `first` to before `last` of all rows of x, counted row by row.
void round_groups(const float* x, const Weight& weight, int64_t first, int64_t last, Group* out);

}  // namespace headstart::integers
