// The likeliest of many outputs, exactly, for half the memory that reading all weights takes: every
// output's logit is first known to within a bound, from weights of 8 bits, and computed as linear.h
// computes it only where the bound leaves it a chance.
//
// For a row x and an output's weight w, both as vdpbf16ps sees them (numbers below 2^-126 are
// zero), with w' = scale * integers of 8 bits and x' = step * integers of 16 bits:
//
//     |x.w - x'.w'|  <=  |x| |w - w'|  +  |x - x'| |w'|                        (Cauchy-Schwarz)
//
// x'.w' is computed in integers. What floats round on the way, there and in the exact product, is
// at most (inputs + 64) 2^-24 |x| |w| (Higham, Accuracy and Stability of Numerical Algorithms,
// 2002, 3.1), of which twice as much is allowed for, and inputs 2^-120 for what is flushed to zero.
// So a logit in fp32 lies in [lower, upper]; rounding it to bf16 keeps the order. An output whose
// upper end, rounded, is below the greatest lower end, rounded, is neither the likeliest nor its
// equal. The others are computed, in panels, in the order of operations of every other product; the
// panel with the greatest upper end first, as the logits known then stand above all lower ends.
//
// Many rows are bound by arithmetic. Then x' are the high bytes of the 16 bits alone: half the work,
// and with |x - x'| at most 1/64 of |x|, bounds that are wider and still leave few panels a chance.
#include <cmath>
#include <limits>

#include "linear.h"

using namespace headstart;

namespace {

constexpr int TALLEST = 4;       // rows whose sums fit in registers: 4 x 4 of 32
// From so many rows on they wait for products, not for memory: then high bytes alone are multiplied,
// if what that leaves out is at most this part of each row.
constexpr int COARSE_ROWS = 5;
constexpr float COARSE_ERROR = 1.0f / 64;
constexpr int STEPS = 32512;     // 127 * 256: a row's largest number
constexpr float LARGE = 0x1p50f;   // what is larger has no bound, so that nothing overflows
constexpr float SMALL = 0x1p-100f;  // what is smaller is zero to the screen
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

// What a row is to the screen.
struct Row {
    float step, length, error;  // of x', |x| and |x - x'| at the most
    float coarse;               // |x - x'| where x' are the high bytes alone
    int32_t high, low;          // what the weights' 128 adds to a sum
    bool usable;
};

inline __m512 flushed(__m512 x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f),
                                                _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(normal, x);
}

// 16 outputs of a panel of pairs, the weights of input 2k or 2k + 1.
inline __m512 weights(const uint32_t* pairs, int64_t inputs, int64_t input) {
    if (input >= inputs) return _mm512_setzero_ps();
    const __m512i both = _mm512_loadu_si512(pairs + input / 2 * PANEL);
    const __m512i one = input % 2 == 0 ? _mm512_slli_epi32(both, 16)
                                       : _mm512_and_si512(both, _mm512_set1_epi32(-65536));
    return flushed(_mm512_castsi512_ps(one));
}

// 16 outputs of one panel.
void quantise(const uint32_t* pairs, const Screen& screen, int64_t panel, int half) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 boundless = 0;
    for (int64_t i = 0; i < screen.inputs; i++) {
        const __m512 w = _mm512_abs_ps(weights(pairs, screen.inputs, i));
        boundless |= _mm512_cmp_ps_mask(w, _mm512_set1_ps(LARGE), _CMP_NLE_UQ);
        most = _mm512_max_ps(most, w);
    }
    const __mmask16 kept =
        _mm512_cmp_ps_mask(most, _mm512_set1_ps(SMALL), _CMP_GE_OQ) & ~boundless;
    const __m512 full = _mm512_set1_ps(127.0f);
    const __m512 scale = _mm512_maskz_div_ps(kept, most, full);
    const __m512 inverse = _mm512_maskz_div_ps(kept, full, most);
    __m512 squares = _mm512_setzero_ps(), errors = _mm512_setzero_ps();
    uint8_t* out = screen.panel(panel) + 64 * half;
    for (int64_t q = 0; q < screen.quads(); q++) {
        __m512i four = _mm512_setzero_si512();
        for (int i = 3; i >= 0; i--) {
            const __m512 w = weights(pairs, screen.inputs, 4 * q + i);
            const __m512i integer =
                _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(w, inverse));
            const __m512 error = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(integer), scale, w);
            squares = _mm512_fmadd_ps(w, w, squares);
            errors = _mm512_fmadd_ps(error, error, errors);
            four = _mm512_or_si512(_mm512_slli_epi32(four, 8),
                                   _mm512_add_epi32(integer, _mm512_set1_epi32(128)));
        }
        _mm512_store_si512(out + q * 4 * PANEL, four);
    }
    // Roots of sums in fp32, made a little larger than they can be.
    const float inputs = static_cast<float>(screen.inputs);
    const __m512 more = _mm512_set1_ps(1.0f + (inputs + 64) * 0x1p-23f);
    const __m512 away = _mm512_mul_ps(_mm512_sqrt_ps(errors), more);
    const __m512 length = _mm512_fmadd_ps(_mm512_sqrt_ps(squares), more, away);
    __m512 bound = _mm512_fmadd_ps(length, _mm512_set1_ps((inputs + 64) * 0x1p-23f), away);
    bound = _mm512_add_ps(bound, _mm512_set1_ps(0x1p-50f));  // squares that were flushed
    bound = _mm512_mask_mov_ps(bound, boundless, _mm512_set1_ps(INFINITE));
    _mm512_store_ps(screen.scales(panel) + 16 * half, scale);
    _mm512_store_ps(screen.errors(panel) + 16 * half, bound);
    _mm512_store_ps(screen.lengths(panel) + 16 * half, _mm512_maskz_mov_ps(~boundless, length));
}

inline float number(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return std::fabs(value) < 0x1p-126f ? 0.0f : value;
}

// A row's integers, high and low bytes of four inputs each, every `stride` words; and the high ones
// alone, every `step` words.
Row prepare(const bf16* x, int64_t inputs, uint32_t* out, int64_t stride, uint32_t* coarse,
            int64_t step) {
    float most = 0;
    bool finite = true;
    for (int64_t i = 0; i < inputs; i++) {
        const float v = std::fabs(number(x[i]));
        finite &= v <= LARGE;
        most = v > most ? v : most;
    }
    Row row{};
    row.usable = finite;
    if (!finite) return row;
    row.step = most < SMALL ? 0.0f : most / STEPS;
    const float inverse = most < SMALL ? 0.0f : STEPS / most;
    double squares = 0, errors = 0, coarse_errors = 0;
    for (int64_t q = 0; 4 * q < inputs; q++) {
        uint32_t high = 0, low = 0;
        for (int64_t i = 4 * q; i < std::min(4 * q + 4, inputs); i++) {
            const double v = number(x[i]);
            const int integer = std::clamp(
                static_cast<int>(std::lrintf(static_cast<float>(v) * inverse)), -STEPS, STEPS);
            const int above = (integer + 128) >> 8, below = integer - 256 * above;
            const int shift = static_cast<int>(i % 4) * 8;
            high |= (static_cast<uint32_t>(above) & 255) << shift;
            low |= (static_cast<uint32_t>(below) & 255) << shift;
            row.high += 128 * above;
            row.low += 128 * below;
            const double error = v - static_cast<double>(row.step) * integer;
            const double coarse_error = v - static_cast<double>(row.step) * (256 * above);
            squares += v * v;
            errors += error * error;
            coarse_errors += coarse_error * coarse_error;
        }
        coarse[q * step] = high;
        out[q * stride] = high;
        out[q * stride + 1] = low;
    }
    const double more = 1 + 0x1p-18;
    row.length = static_cast<float>(std::sqrt(squares) * more + 0x1p-60);
    row.error = static_cast<float>(std::sqrt(errors) * more + 0x1p-60);
    row.coarse = static_cast<float>(std::sqrt(coarse_errors) * more + 0x1p-60);
    return row;
}

// A panel times WORDS numbers of four bytes for each four inputs, which are rows' high bytes, or
// their high and low ones: sums[word][half]. FETCH cache lines are asked for with every two read: a
// tile that is alone (2) asks for what it reads itself AHEAD bytes later, one of two (1) for its half
// of `next`.
template <int WORDS, int FETCH>
void integers(const uint8_t* panel, int64_t quads, const uint32_t* rows, const uint8_t* next,
              __m512i (*sums)[2]) {
    constexpr int64_t AHEAD = 8192;
    const uint8_t* fetch = FETCH == 2 ? panel + AHEAD : next;
    __m512i c[WORDS][2];
    for (int r = 0; r < WORDS; r++)
        for (int h = 0; h < 2; h++) c[r][h] = _mm512_setzero_si512();
    const auto step = [&](const uint32_t* x, const uint8_t* w) __attribute__((always_inline)) {
        const __m512i left = _mm512_load_si512(w);
        const __m512i right = _mm512_load_si512(w + 64);
#pragma GCC unroll 12
        for (int r = 0; r < WORDS; r++) {
            const __m512i one = _mm512_set1_epi32(static_cast<int>(x[r]));
            c[r][0] = _mm512_dpbusd_epi32(c[r][0], left, one);
            c[r][1] = _mm512_dpbusd_epi32(c[r][1], right, one);
        }
    };
    int64_t q = 0;
    for (; q + 4 <= quads; q += 4) {
#pragma GCC unroll 8
        for (int line = 0; line < 4 * FETCH; line++)
            _mm_prefetch(fetch + 64 * line, _MM_HINT_T0);
        fetch += 4 * 64 * FETCH;
        step(rows, panel);
        step(rows + WORDS, panel + 4 * PANEL);
        step(rows + 2 * WORDS, panel + 8 * PANEL);
        step(rows + 3 * WORDS, panel + 12 * PANEL);
        rows += 4 * WORDS;
        panel += 16 * PANEL;
    }
    for (; q < quads; q++) {
        step(rows, panel);
        rows += WORDS;
        panel += 4 * PANEL;
    }
    for (int r = 0; r < WORDS; r++)
        for (int h = 0; h < 2; h++) sums[r][h] = c[r][h];
}

using Integers = void (*)(const uint8_t*, int64_t, const uint32_t*, const uint8_t*,
                          __m512i (*)[2]);

template <int... WORDS>
struct AllIntegers {
    Integers table[3][sizeof...(WORDS)] = {
        {integers<WORDS + 1, 0>...}, {integers<WORDS + 1, 1>...}, {integers<WORDS + 1, 2>...}};
};
constexpr AllIntegers<0, 1, 2, 3, 4, 5, 6, 7> all_integers;

// A row and a panel: the greatest upper end, and lower ends into `lower` where they are greater.
// COARSE: of the sums there are those of high bytes alone.
template <bool COARSE>
float bounds(const Screen& screen, int64_t panel, const Row& row, const __m512i (*sums)[2],
             __m512* lower) {
    __m512 most = _mm512_set1_ps(-INFINITE);
    const __m512 tiny = _mm512_set1_ps(static_cast<float>(screen.inputs) * 0x1p-120f);
    for (int half = 0; half < 2; half++) {
        const int64_t left = screen.outputs - panel * PANEL - 16 * half;
        if (left <= 0) break;
        const auto there = first_lanes(left);
        const auto part = [&](__m512i sum, int32_t offset) {
            return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(offset)));
        };
        __m512 sum = _mm512_mul_ps(part(sums[0][half], row.high), _mm512_set1_ps(256.0f));
        if (!COARSE) sum = _mm512_add_ps(sum, part(sums[1][half], row.low));
        const auto of = [&](const float* x) { return _mm512_load_ps(x + 16 * half); };
        const __m512 logit = _mm512_mul_ps(_mm512_mul_ps(sum, of(screen.scales(panel))),
                                           _mm512_set1_ps(row.step));
        const __m512 error = _mm512_set1_ps(COARSE ? row.coarse : row.error);
        __m512 away = _mm512_fmadd_ps(of(screen.lengths(panel)), error, tiny);
        away = _mm512_fmadd_ps(of(screen.errors(panel)), _mm512_set1_ps(row.length), away);
        most = _mm512_mask_max_ps(most, there, most, _mm512_add_ps(logit, away));
        *lower = _mm512_mask_max_ps(*lower, there, *lower, _mm512_sub_ps(logit, away));
    }
    return _mm512_reduce_max_ps(most);
}

// The likeliest output that a thread has seen of a row; `output` is -1 if a logit is NaN or +inf.
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

// A panel's logits of one row of pairs, as any product gives them.
void exact(const Weight& weight, int64_t panel, const uint32_t* pairs, Best* best) {
    alignas(64) float sums[PANEL];
    alignas(64) float logits[PANEL];
    multiply_tile(pairs, 1, weight.panel(panel), weight.pairs(), sums, false, nullptr, 0);
    for (int half = 0; half < 2; half++)
        _mm512_store_ps(logits + 16 * half, rounded(_mm512_load_ps(sums + 16 * half)));
    for (int64_t i = 0; i < std::min<int64_t>(PANEL, weight.outputs - panel * PANEL); i++)
        best->add(logits[i], panel * PANEL + i);
}

// One call's work, by stages; what each thread does in each.
struct Search {
    const Screen* screen;
    const Weight* weight;
    const bf16* x;
    int64_t rows;
    Stages stages;
    uint32_t *fine, *coarse;  // rows in tiles: [quad][row][high, low], and [quad][row]
    float* upper;             // [rows][panels]
    float* lower;             // [threads][rows][16]
    Best* found;              // [threads][rows]
    Best* tops;               // [rows]: of the panel with the greatest upper end
    Row* known;               // [rows]

    // Rows go in tiles of nearly the same height.
    int64_t tiles(bool high) const {
        const int64_t tallest = high ? 2 * TALLEST : TALLEST;
        return (rows + tallest - 1) / tallest;
    }
    int64_t edge(bool high, int64_t tile) const { return rows * tile / tiles(high); }

    void prepare_rows(int thread, int all) {
        const int64_t inputs = screen->inputs, quads = screen->quads();
        for (int64_t r = thread; r < rows; r += all) {
            int64_t t = 0, h = 0;
            while (edge(false, t + 1) <= r) t++;
            while (edge(true, h + 1) <= r) h++;
            const int64_t first = edge(false, t), first_high = edge(true, h);
            known[r] = prepare(x + r * inputs, inputs, fine + 2 * (first * quads + r - first),
                               2 * (edge(false, t + 1) - first),
                               coarse + first_high * quads + r - first_high,
                               edge(true, h + 1) - first_high);
        }
        for (int64_t r = 0; r < rows; r++) {
            _mm512_store_ps(lower + (thread * rows + r) * 16, _mm512_set1_ps(-INFINITE));
            found[thread * rows + r] = Best{};
        }
    }

    bool is_coarse() const {
        bool small = rows >= COARSE_ROWS;
        for (int64_t r = 0; r < rows && small; r++)
            small = known[r].coarse <= COARSE_ERROR * known[r].length;
        return small;
    }

    template <bool HIGH>
    void bound_rows(int thread, int all) {
        constexpr int64_t PARTS = 8, WORDS = HIGH ? 1 : 2;
        const int64_t quads = screen->quads(), panels = screen->count(), count = tiles(HIGH);
        const uint32_t* packed = HIGH ? coarse : fine;
        float* mine = lower + thread * rows * 16;
        const int64_t stretch = (panels + PARTS * all - 1) / (PARTS * all);
        for (int64_t part = stages.take(1); part * stretch < panels; part = stages.take(1))
            for (int64_t p = part * stretch; p < std::min(panels, (part + 1) * stretch); p++) {
                const uint8_t* next = screen->panel(std::min(p + 1, panels - 1));
                for (int64_t t = 0; t < count; t++) {
                    __m512i sums[2 * TALLEST][2];
                    const int64_t first = edge(HIGH, t), tall = edge(HIGH, t + 1) - first;
                    all_integers.table[count == 1 ? 2 : t < 2 ? 1 : 0][WORDS * tall - 1](
                        screen->panel(p), quads, packed + first * quads * WORDS,
                        next + (t == 1 ? quads * 64 : 0), sums);
                    for (int64_t r = first; r < first + tall; r++) {
                        __m512 ends = _mm512_load_ps(mine + r * 16);
                        upper[r * panels + p] =
                            bounds<HIGH>(*screen, p, known[r], sums + WORDS * (r - first), &ends);
                        _mm512_store_ps(mine + r * 16, ends);
                    }
                }
            }
    }

    // What is likeliest in the most promising panel is nearly always likeliest of all: known
    // exactly, it leaves fewer others a chance than its lower end does.
    void compute_tops(int thread, int all) {
        const int64_t panels = screen->count();
        for (int64_t r = thread; r < rows; r += all) {
            const float* ends = upper + r * panels;
            tops[r] = Best{};
            if (known[r].usable)
                exact(*weight, std::max_element(ends, ends + panels) - ends, pairs_of(r), &tops[r]);
        }
    }

    void compute_rest(int thread, int all) {
        static thread_local Scratch hit_memory;
        const int64_t panels = screen->count(), most = std::max<int64_t>(8, panels / 8);
        int64_t* hits = hit_memory.take<int64_t>(most + 16);
        int64_t turn = stages.take(1), before = 0;
        for (int64_t r = 0; r < rows; r++) {
            Best& best = found[thread * rows + r];
            const int64_t count =
                known[r].usable && tops[r].output >= 0 ? find(r, all, most, hits) : most + 1;
            if (count > most) {
                best.output = -1;
                continue;
            }
            const uint32_t* pairs = turn < before + count ? pairs_of(r) : nullptr;
            for (; turn < before + count; turn = stages.take(1))
                exact(*weight, hits[turn - before], pairs, &best);
            before += count;
        }
    }

    // The panels in which an output has a chance; more than `most` of them are not all told.
    int64_t find(int64_t r, int all, int64_t most, int64_t* hits) const {
        const int64_t panels = screen->count();
        __m512 ends = _mm512_set1_ps(-INFINITE);
        for (int one = 0; one < all; one++)
            ends = _mm512_max_ps(ends, _mm512_load_ps(lower + (one * rows + r) * 16));
        const __m512 least = _mm512_max_ps(rounded(_mm512_set1_ps(_mm512_reduce_max_ps(ends))),
                                           _mm512_set1_ps(tops[r].logit));
        int64_t count = 0;
        for (int64_t p = 0; p < panels && count <= most; p += 16) {
            const auto there = first_lanes(panels - p);
            const __m512 above = rounded(_mm512_maskz_loadu_ps(there, upper + r * panels + p));
            uint32_t chances = _mm512_mask_cmp_ps_mask(there, above, least, _CMP_NLT_UQ);
            for (; chances != 0; chances &= chances - 1)
                hits[count++] = p + __builtin_ctz(chances);
        }
        return count;
    }

    const uint32_t* pairs_of(int64_t r) const {
        static thread_local Scratch pair_memory;
        uint32_t* pairs = pair_memory.take<uint32_t>(weight->pairs());
        pack_rows(x + r * weight->inputs, weight->inputs, 1, weight->inputs, pairs);
        return pairs;
    }
};

}  // namespace

extern "C" {

// Bytes of a screen's panels.
int64_t headstart_screen_bytes(int64_t outputs, int64_t inputs) {
    const Screen shape{nullptr, inputs, outputs};
    return shape.count() * shape.bytes();
}

// Fills screen->panels, which begin on 64 bytes, from a packed weight of at most 32,768 inputs.
void headstart_screen(const Weight* weight, const Screen* screen, int threads) {
    parallel(threads, [&](int thread, int all) {
        const int64_t count = screen->count();
        for (int64_t p = count * thread / all; p < count * (thread + 1) / all; p++)
            for (int half = 0; half < 2; half++)
                quantise(weight->panel(p) + 16 * half, *screen, p, half);
    });
}

// For each row of x bf16 [rows, inputs] the first of the largest of its logits, which are
// x times the weight rounded to bf16; -1 where x is not finite or very large, where the largest logit
// is not finite, or where too many outputs have a chance: the caller then computes all of the row's
// logits.
void headstart_likeliest(const Screen* screen, const Weight* weight, const bf16* x, int64_t rows,
                         int64_t* likeliest, int threads) {
    static thread_local Scratch integer_memory, upper_memory, row_memory;
    Search search;
    search.screen = screen;
    search.weight = weight;
    search.x = x;
    search.rows = rows;
    const int64_t quads = screen->quads();
    search.fine = integer_memory.take<uint32_t>(rows * quads * 3 + quads);
    search.coarse = search.fine + rows * quads * 2;
    search.upper = upper_memory.take<float>(rows * screen->count());
    search.lower = row_memory.take<float>(rows * threads * (16 + 4) + rows * (4 + 8));
    search.found = reinterpret_cast<Best*>(search.lower + rows * threads * 16);
    search.tops = search.found + rows * threads;
    search.known = reinterpret_cast<Row*>(search.tops + rows);
    int ran = 1;
    parallel(threads, [&](int thread, int all) {
        if (thread == 0) ran = all;
        search.prepare_rows(thread, all);
        search.stages.finish(all);
        if (search.is_coarse()) {
            search.bound_rows<true>(thread, all);
        } else {
            search.bound_rows<false>(thread, all);
        }
        search.stages.finish(all);
        search.compute_tops(thread, all);
        search.stages.finish(all);
        search.compute_rest(thread, all);
    });
    for (int64_t r = 0; r < rows; r++) {
        Best best = search.tops[r];
        for (int one = 0; one < ran; one++) best.add(search.found[one * rows + r]);
        likeliest[r] = best.logit == -INFINITE ? -1 : best.output;
    }
}

}  // extern "C"
