// Exact argmax over many outputs with half the memory traffic of reading all weights: 8-bit weights
// give bounds of each logit, and only candidates, whose upper bound reaches the best lower bound,
// are computed exactly, as in linear.h.
//
// screen.h derives the bounds: a logit in fp32 is in [lower, upper], and rounding to bf16 preserves
// the order. An output whose rounded upper bound is below the greatest rounded lower bound has a
// smaller logit than the argmax. The other outputs are candidates. They are computed in panels,
// with the same order of operations as in every other product.
//
// Outputs that a row may not choose, for example because of a grammar, are not candidates and do
// not raise the lower bound. A panel is not read if no row may choose any of its outputs.
#include "avx512.h"

#include "screen.h"

using namespace headstart;

namespace {

constexpr int TALLEST = INT8_TILE / 2;  // rows of a tile: each has high and low bytes

// A thread's argmax of a row so far; `output` is -1 if a logit is NaN or +inf.
struct Best {
    float logit = -INFINITE;
    int64_t output = std::numeric_limits<int64_t>::max();

    void add(float other, int64_t at) {
        if (output < 0 || std::isnan(other) || other == INFINITE || at < 0) {
            output = -1;
        } else if (other > logit || (other == logit && at < output)) {
            logit = other;
            output = at;
        }
    }
    void add(const Best& other) { add(other.logit, other.output); }
};

// Computes the exact logits of one row, packed as pairs, for the outputs of a panel whose bit in
// `allowed` is set. Adds them to `best`.
void exact(const Weight& weight, int64_t panel, uint32_t allowed, const uint32_t* pairs,
           Best* best) {
    alignas(64) float sums[PANEL];
    alignas(64) float logits[PANEL];
    products().multiply(pairs, 1, weight.at(panel), weight.pairs(), sums, false, nullptr, 0);
    for (int half = 0; half < 2; half++)
        _mm512_store_ps(logits + 16 * half, rounded(_mm512_load_ps(sums + 16 * half)));
    for (int64_t i = 0; i < std::min<int64_t>(PANEL, weight.outputs - panel * PANEL); i++)
        if (allowed >> i & 1) best->add(logits[i], panel * PANEL + i);
}

// The work of one call: each thread's share of each stage.
struct Search {
    const Screen* screen;
    const Weight* weight;
    const bf16* x;
    int64_t rows;
    const uint32_t* masks;  // [rows][panels], a bit for each output; null: all are allowed
    Stages stages;
    uint32_t* packed;        // rows in tiles: [quad][row][high, low]
    float* upper;            // [rows][panels]
    float* lower;            // [threads][rows][16]
    Best* best;              // [threads][rows]
    ScreenRow* screen_rows;  // [rows]

    // Rows are divided into tiles of nearly the same height.
    int64_t tiles() const { return (rows + TALLEST - 1) / TALLEST; }
    int64_t edge(int64_t tile) const { return rows * tile / tiles(); }

    uint32_t allowed(int64_t r, int64_t panel) const {
        return masks == nullptr ? ~0u : masks[r * screen->count() + panel];
    }

    void prepare_rows(int thread, int all) {
        const int64_t inputs = screen->inputs, quads = screen->quads();
        for (int64_t r = thread; r < rows; r += all) {
            int64_t t = 0;
            while (edge(t + 1) <= r) t++;
            const int64_t first = edge(t);
            screen_rows[r] =
                prepare_row(x + r * inputs, inputs, packed + 2 * (first * quads + r - first),
                            2 * (edge(t + 1) - first));
        }
        for (int64_t r = 0; r < rows; r++) {
            _mm512_store_ps(lower + (thread * rows + r) * 16, _mm512_set1_ps(-INFINITE));
            best[thread * rows + r] = Best{};
        }
    }

    void bound_rows(int thread, int all) {
        constexpr int64_t PARTS = 8;
        const int64_t quads = screen->quads(), panels = screen->count(), count = tiles();
        float* mine = lower + thread * rows * 16;
        const int64_t part_panels = (panels + PARTS * all - 1) / (PARTS * all);
        for (int64_t part = stages.take(1); part * part_panels < panels; part = stages.take(1))
            for (int64_t p = part * part_panels; p < std::min(panels, (part + 1) * part_panels);
                 p++) {
                uint32_t any = 0;
                for (int64_t r = 0; r < rows && any == 0; r++) any = allowed(r, p);
                if (any == 0) {
                    for (int64_t r = 0; r < rows; r++) upper[r * panels + p] = -INFINITE;
                    continue;
                }
                const auto at = [&](int64_t panel) {
                    return reinterpret_cast<const uint32_t*>(screen->panel(panel));
                };
                const uint32_t* next = at(std::min(p + 1, panels - 1));
                for (int64_t t = 0; t < count; t++) {
                    alignas(64) float sums[INT8_TILE * PANEL];
                    const int64_t first = edge(t), tall = edge(t + 1) - first;
                    avx512_int8_products.multiply(packed + 2 * first * quads,
                                                  static_cast<int>(2 * tall), at(p), quads, sums,
                                                  false, next + (t == 1 ? quads * PANEL / 2 : 0),
                                                  count == 1 ? 2
                                                  : t < 2    ? 1
                                                             : 0);
                    for (int64_t r = first; r < first + tall; r++) {
                        __m512 ends = _mm512_load_ps(mine + r * 16);
                        upper[r * panels + p] = bounds(*screen, p, screen_rows[r], allowed(r, p),
                                                       sums + 2 * (r - first) * PANEL, &ends);
                        _mm512_store_ps(mine + r * 16, ends);
                    }
                }
            }
    }

    void compute_candidates(int thread, int all) {
        static thread_local Scratch hit_memory;
        const int64_t panels = screen->count(), most = std::max<int64_t>(8, panels / 8);
        int64_t* hits = hit_memory.take<int64_t>(most + 16);
        int64_t unit = stages.take(1), before = 0;
        for (int64_t r = 0; r < rows; r++) {
            Best& row_best = best[thread * rows + r];
            const int64_t count =
                screen_rows[r].usable ? find_panels(r, all, most, hits) : most + 1;
            if (count > most) {
                row_best.output = -1;
                continue;
            }
            const uint32_t* pairs = unit < before + count ? pairs_of(r) : nullptr;
            for (; unit < before + count; unit = stages.take(1)) {
                const int64_t hit = hits[unit - before];
                exact(*weight, hit, allowed(r, hit), pairs, &row_best);
            }
            before += count;
        }
    }

    // Writes the panels with candidates to `hits`; stops if there are more than `most`.
    int64_t find_panels(int64_t r, int all, int64_t most, int64_t* hits) const {
        const int64_t panels = screen->count();
        __m512 ends = _mm512_set1_ps(-INFINITE);
        for (int thread = 0; thread < all; thread++)
            ends = _mm512_max_ps(ends, _mm512_load_ps(lower + (thread * rows + r) * 16));
        const __m512 least = rounded(_mm512_set1_ps(_mm512_reduce_max_ps(ends)));
        int64_t count = 0;
        for (int64_t p = 0; p < panels && count <= most; p += 16) {
            const auto there = first_lanes(panels - p);
            const __m512 above = rounded(_mm512_maskz_loadu_ps(there, upper + r * panels + p));
            uint32_t chances = _mm512_mask_cmp_ps_mask(there, above, least, _CMP_NLT_UQ);
            for (; chances != 0; chances &= chances - 1) hits[count++] = p + __builtin_ctz(chances);
        }
        return count;
    }

    const uint32_t* pairs_of(int64_t r) const {
        static thread_local Scratch pair_memory;
        uint32_t* pairs = pair_memory.take<uint32_t>(weight->pairs());
        products().pack(x + r * weight->inputs, weight->inputs, 1, weight->inputs, pairs);
        return pairs;
    }
};

}  // namespace

// Computes for each row of x bf16 [rows, inputs] the argmax (the first of equals) of its logits: x
// times the weight, rounded to bf16. `masks`, if not null, has a word for each 32 outputs of each
// row: only outputs with a set bit are considered. The result is -1 if x is not finite or very
// large, if the largest logit is not finite, or if there are too many candidates. The caller then
// computes all logits of the row.
extern "C" void headstart_greedy_tokens(const Screen* screen, const Weight* weight, const bf16* x,
                                        int64_t rows, const uint32_t* masks, int64_t* tokens,
                                        int threads) {
    static thread_local Scratch integer_memory, upper_memory, row_memory;
    Search search{screen, weight, x, rows, masks};
    search.packed = integer_memory.take<uint32_t>(2 * rows * screen->quads());
    search.upper = upper_memory.take<float>(rows * screen->count());
    search.lower = row_memory.take<float>(rows * threads * (16 + 4) + rows * 8);
    search.best = reinterpret_cast<Best*>(search.lower + rows * threads * 16);
    search.screen_rows = reinterpret_cast<ScreenRow*>(search.best + rows * threads);
    int ran = 1;
    parallel(threads, [&](int thread, int all) {
        if (thread == 0) ran = all;
        search.prepare_rows(thread, all);
        search.stages.finish(all);
        search.bound_rows(thread, all);
        search.stages.finish(all);
        search.compute_candidates(thread, all);
        release_tiles();
    });
    for (int64_t r = 0; r < rows; r++) {
        Best best;
        for (int thread = 0; thread < ran; thread++) best.add(search.best[thread * rows + r]);
        tokens[r] = best.logit == -INFINITE ? -1 : best.output;
    }
}
