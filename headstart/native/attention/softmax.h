// The online softmax of rows whose keys lie in lanes; include it after the pragma.
#pragma once

#include "rows.h"

namespace headstart {

template <int ROWS, int LANES, class Stored>
struct alignas(64) Softmax {
    float scores[ROWS][TILE];
    float sum[ROWS][LANES];  // one of every LANES keys in each
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

    void hide(int r, const Keys& keys) {
        const int first = rows[r].first_key - keys.first, last = rows[r].last_key - keys.first;
        for (int k = 0; k < keys.filled; ++k)
            scores[r][k] = k >= first && k < last ? scores[r][k] : HIDDEN;
    }
};

}  // namespace headstart
