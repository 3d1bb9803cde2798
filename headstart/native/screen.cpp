// Quantization of weights and rows, and bounds of the exact products.
#include "avx512.h"

#include "screen.h"

using namespace headstart;

namespace {

constexpr int STEPS = 32512;        // 127 * 256, a row's largest integer
constexpr float LARGE = 0x1p50f;    // larger numbers get no bound, to avoid overflows
constexpr float SMALL = 0x1p-100f;  // smaller numbers are zero in the screen

// The weights of one input for 16 outputs of a panel of pairs.
inline __m512 weights(const uint32_t* pairs, int64_t inputs, int64_t input) {
    if (input >= inputs) return _mm512_setzero_ps();
    const Halves both(_mm512_loadu_si512(pairs + input / 2 * PANEL));
    const __m512 x = input % 2 == 0 ? both.even : both.odd, least = _mm512_set1_ps(0x1p-126f);
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(x), least, _CMP_NLT_UQ), x);
}

// Quantizes 16 outputs of one panel.
void quantize(const uint32_t* pairs, const Screen& screen, int64_t panel, int half) {
    __m512 most = _mm512_setzero_ps();
    __mmask16 boundless = 0;
    for (int64_t i = 0; i < screen.inputs; i++) {
        const __m512 w = _mm512_abs_ps(weights(pairs, screen.inputs, i));
        boundless |= _mm512_cmp_ps_mask(w, _mm512_set1_ps(LARGE), _CMP_NLE_UQ);
        most = _mm512_max_ps(most, w);
    }
    const __mmask16 nonzero =
        _mm512_cmp_ps_mask(most, _mm512_set1_ps(SMALL), _CMP_GE_OQ) & ~boundless;
    const __m512 full = _mm512_set1_ps(127.0f);
    const __m512 scale = _mm512_maskz_div_ps(nonzero, most, full);
    const __m512 inverse = _mm512_maskz_div_ps(nonzero, full, most);
    __m512 squares = _mm512_setzero_ps(), errors = _mm512_setzero_ps();
    uint8_t* out = screen.panel(panel) + 64 * half;
    for (int64_t q = 0; q < screen.quads(); q++) {
        __m512i four = _mm512_setzero_si512();
        for (int i = 3; i >= 0; i--) {
            const __m512 w = weights(pairs, screen.inputs, 4 * q + i);
            const __m512i integer = _mm512_maskz_cvtps_epi32(nonzero, w * inverse);
            const __m512 error = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(integer), scale, w);
            squares = _mm512_fmadd_ps(w, w, squares);
            errors = _mm512_fmadd_ps(error, error, errors);
            four = _mm512_or_si512(_mm512_slli_epi32(four, 8),
                                   _mm512_add_epi32(integer, _mm512_set1_epi32(128)));
        }
        _mm512_store_si512(out + q * 4 * PANEL, four);
    }
    // Square roots of fp32 sums, increased to upper bounds.
    const float inputs = static_cast<float>(screen.inputs);
    const __m512 more = _mm512_set1_ps(1.0f + (inputs + 64) * 0x1p-23f);
    const __m512 away = _mm512_sqrt_ps(errors) * more;
    const __m512 length = _mm512_fmadd_ps(_mm512_sqrt_ps(squares), more, away);
    __m512 bound = _mm512_fmadd_ps(length, _mm512_set1_ps((inputs + 64) * 0x1p-23f), away);
    bound = bound + 0x1p-50f;  // for squares that were flushed to zero
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

}  // namespace

ScreenRow headstart::prepare_row(const bf16* x, int64_t inputs, uint32_t* out, int64_t stride) {
    float most = 0;
    bool finite = true;
    for (int64_t i = 0; i < inputs; i++) {
        const float v = std::fabs(number(x[i]));
        finite &= v <= LARGE;
        most = v > most ? v : most;
    }
    ScreenRow row{};
    row.usable = finite;
    if (!finite) return row;
    row.step = most < SMALL ? 0.0f : most / STEPS;
    const float inverse = most < SMALL ? 0.0f : STEPS / most;
    double squares = 0, errors = 0;
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
            squares += v * v;
            errors += error * error;
        }
        out[q * stride] = high;
        out[q * stride + 1] = low;
    }
    const double more = 1 + 0x1p-18;
    row.length = static_cast<float>(std::sqrt(squares) * more + 0x1p-60);
    row.error = static_cast<float>(std::sqrt(errors) * more + 0x1p-60);
    return row;
}

float headstart::bounds(const Screen& screen, int64_t panel, const ScreenRow& row, uint32_t allowed,
                        const float* sums, __m512* lower) {
    __m512 most = _mm512_set1_ps(-INFINITE);
    const __m512 tiny = _mm512_set1_ps(static_cast<float>(screen.inputs) * 0x1p-120f);
    const __m512 error = _mm512_set1_ps(row.error);
    const __m512 row_length = _mm512_set1_ps(row.length);
    for (int half = 0; half < 2; half++) {
        const int64_t left = screen.outputs - panel * PANEL - 16 * half;
        if (left <= 0) break;
        const auto there = first_lanes(left) & static_cast<__mmask16>(allowed >> 16 * half);
        const auto part = [&](const float* from, int32_t offset) {
            const __m512i integers = _mm512_load_si512(from + 16 * half);
            return _mm512_cvtepi32_ps(_mm512_sub_epi32(integers, _mm512_set1_epi32(offset)));
        };
        const __m512 sum = part(sums, row.high) * 256.0f + part(sums + PANEL, row.low);
        const auto of = [&](const float* x) { return _mm512_load_ps(x + 16 * half); };
        const __m512 logit = sum * of(screen.scales(panel)) * row.step;
        __m512 away = _mm512_fmadd_ps(of(screen.lengths(panel)), error, tiny);
        away = _mm512_fmadd_ps(of(screen.errors(panel)), row_length, away);
        most = _mm512_mask_max_ps(most, there, most, logit + away);
        *lower = _mm512_mask_max_ps(*lower, there, *lower, logit - away);
    }
    return _mm512_reduce_max_ps(most);
}

// Fills screen->panels, aligned to 64 bytes, from a packed weight with at most 32,768 inputs.
extern "C" void headstart_screen(const Weight* weight, const Screen* screen, int threads) {
    parallel_each(threads, screen->count(), [&](int64_t p) {
        for (int half = 0; half < 2; half++) quantize(weight->at(p) + 16 * half, *screen, p, half);
    });
}
