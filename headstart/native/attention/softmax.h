// The online softmax of rows whose keys are in lanes. Include it after the pragma and after a
// header with has_nonfinite() for a row, and power(), larger() and largest_lane() for a Kind's
// vectors.
#pragma once

#include "rows.h"

namespace headstart {

// cap * tanh(x / cap), in units of log2 before and after.
template <class Vector>
inline Vector soft_cap(Vector x, float cap) {
    return cap * LOG2_E * (1.0f - 2.0f / (power(x * (2.0f / cap)) + 1.0f));
}

// For a tile that some rows see only in part. A weight of 0 times a value that is not finite is
// NaN, so a hidden key would affect rows that do not see it. Such a value becomes zeros and its key
// `nan`: the score is then NaN for every row that sees it, and masked for every other row.
template <class Number>
void isolate_nonfinite(Tile<Number>& tile, int count, int value_dim, const Constant<Number>& nan) {
    static constexpr Constant<Number> zeros(0);
    for (int k = 0; k < count; ++k) {
        if (!has_nonfinite(tile.values[k], value_dim)) continue;
        tile.keys[k] = nan.numbers;
        tile.values[k] = zeros.numbers;
    }
}

template <int ROWS, class Kind, class Stored>
struct alignas(64) Softmax {
    using Vector = typename Kind::Vector;
    static constexpr int LANES = sizeof(Vector) / sizeof(float);

    float scores[ROWS][TILE];
    float sum[ROWS][LANES];  // lane i sums keys i, i + LANES, ...
    float maximum[ROWS];     // in units of log2
    float shrink[ROWS];      // the factor for weights of earlier tiles
    Row rows[ROWS];
    Tile<Stored> now;
    Tile<Stored> next;

    template <class Number>
    Row begin(const Rows<Number, Stored>& all, int r) {
        rows[r] = all.row(r);
        maximum[r] = all.first_maximum(rows[r]);
        std::memset(sum[r], 0, sizeof sum[r]);
        sum[r][0] = all.first_sum();
        return rows[r];
    }

    Vector& lanes(int r, int k) { return *reinterpret_cast<Vector*>(&scores[r][k]); }

    // Applies the softcap and the mask to a row's scores, and raises its maximum. Then converts
    // them to weights relative to the maximum, STEP keys at a time: weigh(k, maximum) returns their
    // sum.
    template <int STEP, class Weigh>
    void settle(int r, const Keys& keys, float softcap, const Weigh& weigh) {
        const int count = std::min(keys.filled, TILE);  // lets the compiler unroll loops
        for (int k = 0; softcap > 0.0f && k < count; k += LANES)
            lanes(r, k) = soft_cap(lanes(r, k), softcap);
        const int first = rows[r].first_key - keys.first, last = rows[r].last_key - keys.first;
        for (int k = 0; keys.partly_filled && k < count; ++k)
            scores[r][k] = k >= first && k < last ? scores[r][k] : HIDDEN;
        Vector most = lanes(r, 0);
        for (int k = LANES; k < count; k += LANES) most = larger(most, lanes(r, k));
        const float before = maximum[r];
        maximum[r] = std::max(before, largest_lane(most));
        const Vector now = maximum[r] - Vector{}, factor = power(before - now);
        shrink[r] = factor[0];
        Vector& all = *reinterpret_cast<Vector*>(sum[r]);
        Vector total = all * factor;
#pragma GCC unroll 8
        for (int k = 0; k < count; k += STEP) total = total + weigh(k, now);
        all = total;
    }
};

}  // namespace headstart
