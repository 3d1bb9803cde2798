// An LM head's weight in 8 bits, and bounds of every logit.
//
// For a row x and an output's weight w, both as vdpbf16ps sees them (numbers below 2^-126 are
// zero), with w' = scale * integers of 8 bits and x' = step * integers of 16 bits:
//
//     |x.w - x'.w'|  <=  |x| |w - w'|  +  |x - x'| |w'|                        (Cauchy-Schwarz)
//
// x'.w' is computed in integers. The float rounding error, here and in the exact product, is at
// most (inputs + 64) 2^-24 |x| |w| (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
// 3.1). The bound allows twice that, plus inputs 2^-120 for numbers that are flushed to zero. So a
// logit in fp32 lies in [lower, upper].
#pragma once

#include "linear.h"

namespace headstart {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Weights [outputs, inputs] in panels of 32 outputs. A panel has, for every four inputs, the
// integers + 128 of the first 16 outputs, then of the other 16. Three rows of 32 floats follow.
struct Screen {
    uint8_t* panels;
    int64_t inputs, outputs;

    int64_t quads() const { return (inputs + 3) / 4; }
    int64_t count() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t bytes() const { return (quads() + 3) * 4 * PANEL; }
    uint8_t* panel(int64_t at) const { return panels + at * bytes(); }
    float* scales(int64_t at) const {
        return reinterpret_cast<float*>(panel(at) + quads() * 4 * PANEL);
    }
    float* errors(int64_t at) const { return scales(at) + PANEL; }  // bound |w - w'| + rounding
    float* lengths(int64_t at) const { return scales(at) + 2 * PANEL; }  // bound |w'|
};

// A row, quantized for products with a screen.
struct ScreenRow {
    float step, length, error;  // of x', upper bounds of |x| and |x - x'|
    int32_t high, low;          // added to a sum by the 128 in each weight
    bool usable;
};

// Writes a row's integers: every `stride` words, the high bytes and the low bytes of four inputs.
ScreenRow prepare_row(const bf16* x, int64_t inputs, uint32_t* out, int64_t stride);

// Returns the greatest upper bound of a row's logits in a panel, and raises `lower` to greater
// lower bounds; considers only outputs with a bit in `allowed`. `sums` [2][32] are products of the
// row's high and low bytes.
float bounds(const Screen& screen, int64_t panel, const ScreenRow& row, uint32_t allowed,
             const float* sums, __m512* lower);

}  // namespace headstart
