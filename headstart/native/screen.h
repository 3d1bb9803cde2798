// An LM head's weight in 8 bits, and the bounds that it gives for every logit.
//
// For a row x and an output's weight w, both as vdpbf16ps sees them (numbers below 2^-126 are
// zero), with w' = scale * integers of 8 bits and x' = step * integers of 16 bits:
//
//     |x.w - x'.w'|  <=  |x| |w - w'|  +  |x - x'| |w'|                        (Cauchy-Schwarz)
//
// x'.w' is computed in integers. What floats round on the way, there and in the exact product, is
// at most (inputs + 64) 2^-24 |x| |w| (Higham, Accuracy and Stability of Numerical Algorithms,
// 2002, 3.1), of which twice as much is allowed for, and inputs 2^-120 for what is flushed to zero.
// So a logit in fp32 lies in [lower, upper].
//
// x' may be the high bytes of the 16 bits alone: half the work, and wider bounds.
#pragma once

#include <limits>

#include "linear.h"

namespace headstart {

constexpr int TALLEST = 4;  // rows whose sums fit in registers: 4 x 4 of 32
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Weights [outputs, inputs] in panels of 32 outputs. A panel holds, for each four inputs, 16
// outputs' four integers + 128, then those of the other 16; behind them three rows of 32 floats.
struct Screen {
    uint8_t* panels;
    int64_t inputs;
    int64_t outputs;

    int64_t quads() const { return (inputs + 3) / 4; }
    int64_t count() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t bytes() const { return (quads() + 3) * 4 * PANEL; }
    uint8_t* panel(int64_t at) const { return panels + at * bytes(); }
    float* scales(int64_t at) const {
        return reinterpret_cast<float*>(panel(at) + quads() * 4 * PANEL);
    }
    float* errors(int64_t at) const { return scales(at) + PANEL; }       // of |w - w'| and floats
    float* lengths(int64_t at) const { return scales(at) + 2 * PANEL; }  // |w'| at the most
};

// A row as the screen is multiplied by it.
struct ScreenRow {
    float step, length, error;  // of x', |x| and |x - x'| at the most
    float coarse;               // |x - x'| where x' are the high bytes alone
    int32_t high, low;          // what the weights' 128 adds to a sum
    bool usable;
};

// A row's integers, high and low bytes of four inputs each, every `stride` words; and the high ones
// alone, every `step` words.
ScreenRow prepare_row(const bf16* x, int64_t inputs, uint32_t* out, int64_t stride,
                      uint32_t* coarse, int64_t step);

// A panel times `words` (1 to 2 * TALLEST) numbers of four bytes for each four inputs, which are
// rows' high bytes, or their high and low ones: sums[word][half]. Cache lines are asked for with
// every two read, `fetch` of them: a tile that is alone (2) asks for what it reads itself, one of two
// (1) for its half of `next`.
void multiply_integers(const uint8_t* panel, int64_t quads, const uint32_t* rows, int64_t words,
                       const uint8_t* next, int fetch, __m512i (*sums)[2]);

// A row and a panel: the greatest upper end, and lower ends into `lower` where they are greater.
// COARSE: of the sums there are those of high bytes alone.
template <bool COARSE>
float bounds(const Screen& screen, int64_t panel, const ScreenRow& row,
             const __m512i (*sums)[2], __m512* lower);

}  // namespace headstart
