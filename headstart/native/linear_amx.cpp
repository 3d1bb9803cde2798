// Products of packed rows with packed weights on CPUs with AMX: tiles of 16 rows of 16 pairs.
//
// 16 pairs of 16 outputs of a panel are a tile. Rows are packed as [16 pairs][row][pair]; the last
// group has the remaining pairs. Two tiles of rows times two tiles of weights are four tiles of
// sums, which uses all eight tiles. A tile with fewer rows or pairs is configured with this size.
// For every 16 pairs, the products of the pairs' first inputs and those of their second inputs are
// summed separately. Then both are added to the output's sum, always in this order.
#include "avx512.h"

#include "amx.h"
#include "linear.h"

using namespace headstart;

namespace {

struct alignas(64) Shapes {  // as the instruction LDTILECFG reads it
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

thread_local int configured = 0;  // this thread's configuration: DEPTH * rows + pairs

// Multiplies rows of `steps` times `depth` pairs by a panel.
template <bool TWO>
void multiply_steps(const uint32_t* rows, int count, const uint32_t* panel, int64_t steps,
                    int depth, float* sums, bool add, const char* next, int fetch) {
    constexpr int64_t SIDE = 4 * PANEL;
    configure_tiles(count, depth);
    before_tiles();
    float* below = sums + 16 * PANEL;
    add ? load_sums<TWO>(sums, below, SIDE) : zero_sums<TWO>();
    for (int64_t k = 0; k < steps; k++) {
        for (int line = 0; line < fetch * DEPTH; line++, next += 64)
            _mm_prefetch(next, _MM_HINT_T1);
        add_products<TWO>(rows, depth * 4, rows + 16 * depth, depth * 4, panel, SIDE);
        rows += count * depth;
        panel += depth * PANEL;
    }
    store_sums<TWO>(sums, below, SIDE);
}

void pack(const bf16* x, int64_t stride, int rows, int64_t width, uint32_t* out) {
    for (int64_t k = 0; 2 * k < width; k += DEPTH) {
        const int64_t depth = std::min<int64_t>(DEPTH, (width + 1) / 2 - k);
        for (int r = 0; r < rows; r++, out += depth)
            _mm512_mask_storeu_epi32(out, first_lanes(depth),
                                     load_pairs(x + r * stride + 2 * k, width - 2 * k));
    }
}

void multiply_rows(const uint32_t* rows, int count, const uint32_t* panel, int64_t pairs,
                   float* sums, bool add, const uint32_t* next, int fetch) {
    const auto run = count > 16 ? multiply_steps<true> : multiply_steps<false>;
    const int64_t steps = pairs / DEPTH, whole = steps * DEPTH;
    const char* ahead = reinterpret_cast<const char*>(next);
    if (steps > 0) run(rows, count, panel, steps, DEPTH, sums, add, ahead, fetch);
    if (whole < pairs)
        run(rows + count * whole, count, panel + whole * PANEL, 1, static_cast<int>(pairs - whole),
            sums, add || steps > 0, ahead, 0);
}

}  // namespace

void headstart::configure_tiles(int rows, int depth) {
    if (configured == rows * DEPTH + depth) return;
    Shapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        const int half = tile < 4 ? tile / 2 : tile % 2;
        shapes.bytes[tile] = static_cast<uint16_t>(tile / 2 == 2 ? depth * 4 : 64);
        shapes.rows[tile] =
            static_cast<uint8_t>(tile >= 6 ? depth : std::clamp(rows - 16 * half, 1, 16));
    }
    before_tiles();
    _tile_loadconfig(&shapes);
    configured = rows * DEPTH + depth;
}

void headstart::release_tiles() {
    if (configured != 0) _tile_release();
    configured = 0;
}

const Products headstart::amx_products{32, 512, 128, 1280 * 1024, pack, multiply_rows};
