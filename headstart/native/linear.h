// Products of rows in bf16 with weights that were packed once.
//
// A weight [outputs, inputs] becomes panels of 32 outputs. A panel has, for each pair of inputs,
// the two weights of each output side by side, as the instruction vdpbf16ps needs them:
//
//     panel p, pair k:   w[32p][2k] w[32p][2k+1]   w[32p+1][2k] w[32p+1][2k+1]   ...   (128 bytes)
//
// so that a product reads a weight once, sequentially. Missing outputs and inputs are zeros. Every
// tile sums an output's pairs in fp32 in the same order, so the result of a row has the same bits
// in any batch and on any thread.
//
// A weight of 8 bits has the same order, except that for each pair of inputs the first weights of
// 16 outputs precede their second weights. Weights of 4 or 5 bits have the blocks of
// narrow/integers.h, with the blocks of a panel's two halves side by side. Both have a scale for
// each output. A thread converts them to bf16 in its own memory for the product: exactly from 8
// bits, with rounding from 4 and 5 bits.
#pragma once

#include "simd.h"
#include "weight.h"

namespace headstart {

constexpr int PANEL = Weight::PANEL;  // outputs

// Converts 16 int8 to floats.
inline __m512 floats(const int8_t* from) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Converts `pairs` pairs of a panel from int8 to bf16.
inline void widen(const int8_t* from, int64_t pairs, uint32_t* out) {
    for (int64_t at = 0; at < 2 * pairs; at++, from += 32)
        _mm512_storeu_si512(out + 16 * at,
                            _mm512_srli_epi32(_mm512_castps_si512(floats(from)), 16) |
                                _mm512_castps_si512(floats(from + 16)));
}

constexpr int64_t GROUP = 16;  // pairs in a group of 4 or 5 bits

// One of a weight's panels.
struct Panel {
    const Weight* weight;
    int64_t number;

    const uint32_t* at(int64_t k) const { return weight->at(number, k); }
    // Returns pairs in bf16 from pair k on. If necessary, converts them into `memory`, which must
    // have space for whole groups.
    const uint32_t* range(int64_t k, int64_t pairs, uint32_t* memory) const {
        if (weight->kind == BF16) return at(k);
        if (weight->kind == INT8)
            widen(reinterpret_cast<const int8_t*>(at(k)), pairs, memory);
        else
            widen(weight->kind, at(k), weight->columns + 2 * k, pairs, memory);
        return memory;
    }
};

// Functions and limits of products on one kind of CPU. Kinds differ in the order of sums, so a
// process uses only one. A range is some consecutive pairs of a panel.
struct Products {
    int tallest;         // most rows of a tile
    int64_t most_rows;   // most rows of a block, at most MOST_ROWS
    int64_t most_pairs;  // most pairs of a range, a multiple of 16
    int64_t cache;       // most bytes of a block of rows, which stays in the L2 cache
    // Packs `rows` rows (at most `tallest`) of `width` elements in the order of the product.
    void (*pack)(const bf16* x, int64_t stride, int rows, int64_t width, uint32_t* out);
    // sums[row][32] = or += products of packed rows with a range of a panel. Prefetches weights,
    // `fetch` cache lines per pair. 0: none, 1: from `next` on, 2: this range and then from `next`
    // on (with AMX only from `next` on).
    void (*multiply)(const uint32_t* rows, int count, const uint32_t* panel, int64_t pairs,
                     float* sums, bool add, const uint32_t* next, int fetch);
};
extern const Products avx512_products, amx_products;
// A product of int8 with sums in int32. Instead of a pair, a weight has four uint8, each 128 plus
// an integer, and a row has four int8. Has only multiply(), for at most INT8_TILE rows.
extern const Products avx512_int8_products;
constexpr int INT8_TILE = 8;
// The product of one row and a range of an int8 panel, with the same bits as amx_products.
void multiply_row(const uint32_t* row, const int8_t* panel, int64_t pairs, float* sums, bool add);
inline const Products& products() { return use_amx ? amx_products : avx512_products; }
constexpr int64_t MOST_ROWS = 512;

// This thread's share of one stage: a product of `rows` rows with `panels` groups of N panels each.
//
// - source(first, count, stride) returns rows of inputs and sets their stride,
// - panel(group, part) returns a `Panel`,
// - finish(group, first, count, sums) receives sums[part][row - first][32].
//
// Rows are cut into blocks that stay in the L2 cache, while weights are streamed. A unit of the
// stage is some consecutive groups for one block, or all groups if there are many blocks.
template <int N, class Source, class Find, class Finish>
void multiply(int64_t rows, int64_t inputs, int64_t panels, int threads, Stages& stages,
              Source&& source, Find&& panel, Finish&& finish) {
    constexpr int64_t FEWEST_ROWS = 64, PARTS = 64;
    const Products& kind = products();
    static thread_local Scratch packed_memory, wide_memory;
    alignas(64) static thread_local float sums[N * MOST_ROWS * PANEL];
    const int64_t pairs = (inputs + 1) / 2;
    const int64_t fitting = std::min(kind.cache / (pairs * 4), kind.most_rows);
    int64_t most = std::max<int64_t>(fitting / kind.tallest, 1) * kind.tallest;
    most = std::min(most, std::max(FEWEST_ROWS, (rows + threads - 1) / threads));
    const int64_t blocks = (rows + most - 1) / most;
    const int64_t cuts = (pairs + kind.most_pairs - 1) / kind.most_pairs;
    const int64_t length = ((pairs + cuts - 1) / cuts + 15) / 16 * 16;
    uint32_t* packed = packed_memory.take<uint32_t>(most * pairs);
    uint32_t* wide = wide_memory.take<uint32_t>(length * PANEL);

    // With few rows the product is memory-bound, and each unit begins with a cache miss, so each
    // thread gets one unit. With many rows it is compute-bound, so units are small: threads finish
    // together, and a thread on a shared core takes fewer units.
    int64_t parts = threads;
    if (threads > 1 && rows > FEWEST_ROWS) parts = (PARTS * threads + blocks - 1) / blocks;
    const int64_t unit_groups = (panels + parts - 1) / parts;
    const int64_t units_per_block = (panels + unit_groups - 1) / unit_groups;
    int64_t ready = -1;
    for (int64_t unit = stages.take(1); unit < blocks * units_per_block; unit = stages.take(1)) {
        const int64_t block = unit / units_per_block;
        const auto start = [&](int64_t at) { return at * rows / blocks; };
        const int64_t row0 = start(block), count = start(block + 1) - row0;
        const int64_t tiles = (count + kind.tallest - 1) / kind.tallest;
        // For one row, which needs little arithmetic, the hardware prefetcher is fastest.
        const int single_fetch = count == 1 ? 0 : 2;
        const auto edge = [&](int64_t tile) { return count * tile / tiles; };
        for (int64_t t = 0; t < tiles && ready != block; t++) {
            const int tall = static_cast<int>(edge(t + 1) - edge(t));
            int64_t stride = 0;
            const bf16* x = source(row0 + edge(t), tall, &stride);
            for (int64_t k = 0; k < pairs; k += length) {
                const int64_t some = std::min(length, pairs - k);
                kind.pack(x + 2 * k, stride, tall, std::min(2 * some, inputs - 2 * k),
                          packed + count * k + edge(t) * some);
            }
        }
        ready = block;
        const int64_t last = std::min(panels, (unit % units_per_block + 1) * unit_groups);
        for (int64_t group = unit % units_per_block * unit_groups; group < last; group++) {
            for (int part = 0; part < N; part++) {
                const Panel weights = panel(group, part);
                float* target = sums + part * count * PANEL;
                const Panel after =
                    part + 1 < N ? panel(group, part + 1) : panel(std::min(group + 1, last - 1), 0);
                for (int64_t k = 0; k < pairs; k += length) {
                    const int64_t some = std::min(length, pairs - k);
                    if (use_amx && count == 1 && weights.weight->kind == INT8) {
                        multiply_row(packed + k, reinterpret_cast<const int8_t*>(weights.at(k)),
                                     some, target, k > 0);
                        continue;
                    }
                    const uint32_t* range = weights.range(k, some, wide);
                    const uint32_t* next =
                        k + length < pairs ? weights.at(k + length) : after.at(0);
                    for (int64_t t = 0; t < tiles; t++) {
                        const int tall = static_cast<int>(edge(t + 1) - edge(t));
                        const int fetch = weights.weight->kind < BF16 ? 0
                                          : tiles == 1                ? single_fetch
                                                                      : t < 2;
                        kind.multiply(packed + count * k + edge(t) * some, tall, range, some,
                                      target + edge(t) * PANEL, k > 0,
                                      next + (t == 1 ? some * PANEL / 2 : 0), fetch);
                    }
                }
            }
            finish(group, row0, count, sums);
        }
    }
    release_tiles();
}

// The 32 sums of a row times the scales, if any, plus the bias, if any, rounded to bf16; zeros
// beyond the last output.
inline __m512i finished(const float* sums, const Weight& weight, int64_t output) {
    __m512 half[2];
    for (int h = 0; h < 2; h++) {
        half[h] = _mm512_load_ps(sums + 16 * h);
        const int64_t left = weight.outputs - output - 16 * h;
        if (weight.scales != nullptr && left > 0)
            half[h] *= _mm512_maskz_loadu_ps(first_lanes(left), weight.scales + output + 16 * h);
        if (weight.bias != nullptr && left > 0)
            half[h] = _mm512_add_ps(
                half[h], load(static_cast<const bf16*>(weight.bias) + output + 16 * h, left));
    }
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(half[1], half[0]));
}

// The destination of a product: out [rows, outputs] = sums + residual [rows, outputs], if any.
struct Target {
    const Weight* weight;
    bf16* out;
    const bf16* residual = nullptr;

    // Writes sums[count][32] to 32 outputs from `at` on, of rows from `row` on.
    void store(int64_t at, int64_t row, int64_t count, const float* sums) const {
        const int64_t left = weight->outputs - at;
        for (int64_t r = 0; r < count; r++) {
            const int64_t place = (row + r) * weight->outputs + at;
            __m512i x = finished(sums + r * PANEL, *weight, at);
            if (residual != nullptr) {
                const Halves own(x), other(load_pairs(residual + place, left));
                x = pair_bf16(own.even + other.even, own.odd + other.odd);
            }
            store_pairs(out + place, left, x);
        }
    }
};

// This thread's share of one stage: products of the same rows with one or several weights.
template <class Source>
void project(int64_t rows, const Source& source, std::initializer_list<Target> targets, int threads,
             Stages& stages) {
    const auto find = [&](int64_t panel) {
        const Target* target = targets.begin();
        for (; panel >= target->weight->count(); ++target) panel -= target->weight->count();
        return std::pair(target, panel);
    };
    int64_t panels = 0;
    for (const Target& target : targets) panels += target.weight->count();
    multiply<1>(
        rows, targets.begin()->weight->inputs, panels, threads, stages, source,
        [&](int64_t group, int) {
            const auto [target, panel] = find(group);
            return Panel{target->weight, panel};
        },
        [&](int64_t group, int64_t row, int64_t count, const float* sums) {
            const auto [target, panel] = find(group);
            target->store(panel * PANEL, row, count, sums);
        });
}

}  // namespace headstart
