// Attention in float32 for CPUs with AVX2, over K and V in float32 or in 8 bits: one pass over the
// keys with an online softmax.
//
// Both products have the same shape, up to 6 rows by 16 lanes, which fill the 16 registers:
//
//     scores [row, key]  +=  Q [row, dim] (broadcast)  *  K^T [dim, key]
//     out    [row, dim]  +=  P [row, key] (broadcast)  *  V [key, dim]
//
// A tile of keys is transposed once for all rows of a chunk; V needs no transposition. One row uses
// the same code as many, since reading K and V takes most of its time. A tile of K and V in 8 bits
// is converted to floats once for all rows; a key's scale multiplies its scores, a value's scale
// the weights.
//
// Each element of a product is summed in the order of keys or dims, and a hidden score has exactly
// weight 0. So a row's result depends only on its keys and on the first key of its segment, not on
// other rows.
#include "rows.h"

#pragma GCC target("avx2,fma")

#include "float32_tile.h"
#include "stages.h"

namespace headstart {
namespace {

// The first two groups of rows prefetch the next tile, although both prefetch the same lines. With
// only one group, decoding would be slower; with all groups, prefilling would be slower.
constexpr int FETCHING = 2 * MOST;  // rows

// A matrix in rows.
struct Matrix {
    float* numbers;
    int64_t stride;

    Matrix from(int row, int column) const { return {numbers + row * stride + column, stride}; }
};

// c [ROWS, 16] = a [ROWS, count] * b [count, 16], plus c * shrink [ROWS] unless `shrink` is null.
// line(k) is the address of row k of b.
template <int ROWS, class Line>
inline void multiply(Matrix a, int count, const Line& line, Matrix c, const float* shrink) {
    __m256 low[ROWS], high[ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
        low[r] = high[r] = _mm256_setzero_ps();
        if (shrink == nullptr) continue;
        low[r] = _mm256_loadu_ps(c.numbers + r * c.stride) * shrink[r];
        high[r] = _mm256_loadu_ps(c.numbers + r * c.stride + LANES) * shrink[r];
    }
    for (int k = 0; k < count; ++k) {
        const float* from = line(k);
        const __m256 left = _mm256_loadu_ps(from), right = _mm256_loadu_ps(from + LANES);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const __m256 factor = _mm256_broadcast_ss(a.numbers + r * a.stride + k);
            low[r] = _mm256_fmadd_ps(factor, left, low[r]);
            high[r] = _mm256_fmadd_ps(factor, right, high[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
        _mm256_storeu_ps(c.numbers + r * c.stride, low[r]);
        _mm256_storeu_ps(c.numbers + r * c.stride + LANES, high[r]);
    }
}

template <int ROWS, class Stored>
void score_rows(ChunkState<Stored>& s, int row, int count, int key_dim) {
    const Matrix query{s.query, key_dim}, scores{s.scores[0], TILE};
    for (int k = 0; k < count; k += PANEL)
        multiply<ROWS>(
            query.from(row, 0), key_dim,
            [&](int d) {
                const unsigned at = d;  // the line to prefetch; 16 keys have at most key_dim
                const int dim = at / PANEL * LINE<Stored>;
                if (row < FETCHING && (!SCALED<Stored> || dim < key_dim))
                    fetch<_MM_HINT_T1>(s.next.keys[k + at % PANEL] + dim);
                return &s.keys[d][k];
            },
            scores.from(row, k), nullptr);
}

// Adds the tile's weighted values to the rows' output.
template <int ROWS, class Stored>
void add_values(ChunkState<Stored>& s, int row, int count, int value_dim, int64_t width) {
    const Matrix weights{s.scores[0], TILE}, out{s.out, width};
    const auto add = [&](int d, const auto& line) {
        multiply<ROWS>(weights.from(row, 0), count, line, out.from(row, d), s.shrink + row);
    };
    const int whole = SCALED<Stored> ? width : value_dim / PANEL * PANEL;
    for (int d = 0; d < whole; d += PANEL)
        add(d, [&](int k) {
            if (row < FETCHING && (!SCALED<Stored> || d % LINE<Stored> == 0))
                fetch<_MM_HINT_T1>(s.next.values[k] + d);
            if constexpr (SCALED<Stored>)
                return s.values.numbers + k * width + d;
            else
                return s.now.values[k] + d;
        });
    if constexpr (!SCALED<Stored>)
        if (whole < value_dim) add(whole, [&](int k) { return s.values.tails[k]; });
}

// Divides rows into groups of nearly the same size, at most MOST. Calls a function with the first
// row of each group, and with the number of its rows as a type.
template <class Function>
void in_groups(int rows, const Function& function) {
    const int groups = (rows + MOST - 1) / MOST;
    for (int group = 0; group < groups; ++group) {
        const int row = rows * group / groups;
        with_count<MOST>(rows * (group + 1) / groups - row,
                         [&](auto count) { function(row, count); });
    }
}

template <class Stored>
class Attention {
  public:
    explicit Attention(const Rows<float, Stored>& rows)
        : s(chunk_state<Stored>()),
          rows(rows),
          call(rows.call),
          count(rows.chunk.count),
          width((call.value_dim + PANEL - 1) / PANEL * PANEL) {}

    void run() {
        begin();
        attend_tiles(s, rows, PANEL, nullptr, [&](const Keys& keys) { attend_tile(keys); });
        finish();
    }

  private:
    void begin() {
        const float scale = call.scaling * LOG2_E;
        for (int r = 0; r < count; ++r) {
            const float* query = rows.query(s.begin(rows, r));
            for (int d = 0; d < call.key_dim; ++d) s.query[r * call.key_dim + d] = query[d] * scale;
        }
        std::memset(s.out, 0, count * width * sizeof(float));
    }

    void attend_tile(const Keys& keys) {
        const int filled = std::min(keys.filled, TILE);  // lets the compiler unroll loops
        if constexpr (SCALED<Stored>) load_scales(s);
        if (keys.partly) isolate_nonfinite(s, keys.count, call.value_dim);
        transpose_keys(s, filled, call.key_dim);
        in_groups(count, [&](int row, auto group) {
            score_rows<group.value>(s, row, filled, call.key_dim);
        });
        for (int r = 0; r < count; ++r) {
            if constexpr (SCALED<Stored>)
                for (int k = 0; k < filled; ++k) s.scores[r][k] *= s.values.key_scales[k];
            s.template settle<LANES>(r, keys, call.softcap, [&](int k, __m256 maximum) {
                const __m256 weight = power(s.lanes(r, k) - maximum);
                s.lanes(r, k) = weight;
                if constexpr (SCALED<Stored>)
                    s.lanes(r, k) = weight * _mm256_loadu_ps(s.values.value_scales + k);
                return weight;
            });
        }
        load_values(s, keys.count, call.value_dim, width);
        in_groups(count, [&](int row, auto group) {
            add_values<group.value>(s, row, keys.count, call.value_dim, width);
        });
    }

    void finish() {
        for (int r = 0; r < count; ++r) {
            const float sum = total(_mm256_load_ps(s.sum[r]));
            const float* from = s.out + r * width;
            const bool partial = rows.partial();
            float* to = partial ? rows.partial_of(s.rows[r]) + 2 : rows.out(s.rows[r]);
            const float share = partial ? 1.0f : 1.0f / sum;
            rows.store_sum(s.rows[r], s.maximum[r], sum);
            for (int d = 0; d < call.value_dim; ++d) to[d] = from[d] * share;
        }
    }

    ChunkState<Stored>& s;
    const Rows<float, Stored>& rows;
    const Call<float, Stored>& call;
    const int count;
    const int64_t width;
};

struct Float32 {
    static constexpr int CHUNK_ROWS = CHUNK;

    static bool write_row(float* to, float*, const float* from, int dim) {
        std::memcpy(to, from, dim * sizeof(float));
        return has_nonfinite(from, dim);
    }

    static bool write_row(int8_t* to, float* scale, const float* from, int dim) {
        return write_int8_row(to, scale, from, dim);
    }

    template <class Stored>
    static void attend(const Rows<float, Stored>& rows, const Chunk*) {
        Attention<Stored>(rows).run();
    }

    static float power(float x) { return _mm256_cvtss_f32(headstart::power(_mm256_set1_ps(x))); }

    static void store_row(float* to, const float* from, int dim, float factor) {
        for (int d = 0; d < dim; ++d) to[d] = from[d] * factor;
    }
};

}  // namespace
}  // namespace headstart

extern "C" void headstart_attend_float32(const headstart::AttentionStep* step,
                                         const headstart::Call<float>* call) {
    headstart::run<headstart::Float32>(*step, *call);
}

extern "C" void headstart_attend_int8(const headstart::AttentionStep* step,
                                      const headstart::Int8Call* call) {
    headstart::run<headstart::Float32>(*step, *call);
}
