// The AVX-512 and AMX instructions that the kernels use, in plain C++. This header replaces the
// compiler's header of the same name. So any CPU can run the kernels, and a sanitizer sees every load
// and store, also masked ones.
//
// Each function follows Intel's manual, also for NaN and infinity. If the manual allows several
// results, the function returns the worst for a kernel. A kernel with an instruction that this file
// lacks does not compile: add the instruction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define VECTOR(name, number, bytes) \
    typedef number name __attribute__((vector_size(bytes), may_alias))
VECTOR(__m512, float, 64);
VECTOR(__m512i, int64_t, 64);
VECTOR(__m512bh, int16_t, 64);
VECTOR(__m256i, int64_t, 32);
VECTOR(__m256bh, int16_t, 32);
VECTOR(__m128i, int64_t, 16);
using __mmask16 = uint16_t;
using __mmask32 = uint32_t;

enum { _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8 };
enum { _CMP_NEQ_UQ = 4, _CMP_NLT_UQ = 21, _CMP_NLE_UQ = 22, _CMP_GE_OQ = 29 };
enum { _MM_HINT_T1 = 2, _MM_HINT_T0 = 3 };

namespace emulated {

VECTOR(Int8, int8_t, 64);
VECTOR(Uint8, uint8_t, 64);
VECTOR(Int32, int32_t, 64);
VECTOR(Uint32, uint32_t, 64);
VECTOR(Uint16, uint16_t, 64);
VECTOR(Half, uint16_t, 32);
VECTOR(Bytes, uint8_t, 16);
#undef VECTOR

constexpr uint64_t ALL = ~uint64_t{0};

// Returns the vector of `lane(i)`, with 0 outside the mask.
template <class Vector, class Lane>
Vector each(Lane lane, uint64_t mask = ALL) {
    Vector out{};
    for (unsigned i = 0; i < sizeof out / sizeof out[0]; i++)
        if (mask >> i & 1) out[i] = lane(i);
    return out;
}

template <class Holds>
uint32_t which(int lanes, Holds holds) {
    uint32_t mask = 0;
    for (int i = 0; i < lanes; i++) mask |= uint32_t{holds(i)} << i;
    return mask;
}

// Does not access numbers outside the mask, which may be outside the memory. Addresses may be
// unaligned.
template <class Vector>
Vector load(const void* from, uint64_t mask = ALL) {
    return each<Vector>([&](int i) {
        std::remove_reference_t<decltype(Vector{}[0])> number;
        std::memcpy(&number, static_cast<const char*>(from) + i * sizeof number, sizeof number);
        return number;
    }, mask);
}

template <class Number, class Vector>
void store(void* to, uint64_t mask, Vector x) {
    for (unsigned i = 0; i < sizeof x / sizeof(Number); i++) {
        const Number number = x[i];
        if (mask >> i & 1)
            std::memcpy(static_cast<char*>(to) + i * sizeof number, &number, sizeof number);
    }
}

// With an unaligned address, an aligned load or store ends the process, as on the CPU.
template <class Vector>
Vector& aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(Vector) != 0) __builtin_trap();
    return *static_cast<Vector*>(const_cast<void*>(address));
}

template <class To, class From>
To bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// The bf16 instructions read and write subnormal numbers as 0.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline uint16_t narrow(float x) {
    const auto from = bits<uint32_t>(flush(x));
    return std::isnan(x) ? from >> 16 | 0x40 : (from + 0x7fff + (from >> 16 & 1)) >> 16;
}

inline float widen(uint16_t x) { return flush(bits<float>(uint32_t{x} << 16)); }

inline float from_float16(uint16_t x) {
    const int exponent = x >> 10 & 31, fraction = x & 1023;
    float size = std::ldexp(fraction + (exponent ? 1024.0f : 0.0f), (exponent ? exponent : 1) - 25);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return x >> 15 ? -size : size;
}

inline float add_product(float sum, uint16_t a, uint16_t b) {
    return flush(flush(sum) + flush(widen(a) * widen(b)));
}

inline float larger(float a, float b) { return a > b ? a : b; }

inline bool holds(float a, int predicate, float b) {
    if (predicate == _CMP_GE_OQ) return a >= b;
    if (predicate == _CMP_NEQ_UQ) return a != b;
    return predicate == _CMP_NLT_UQ ? !(a < b) : !(a <= b);
}

// Returns x * 2^power, for a whole power.
inline float scale(float x, float power) {
    if (std::isnan(power)) return power;
    if (!std::isinf(power))
        return std::ldexp(x, static_cast<int>(std::fmax(-999.0f, std::fmin(power, 999.0f))));
    if (std::isnan(x)) return power > 0 ? power : 0.0f;
    if (power > 0) return x * power;
    return std::isinf(x) ? NAN : std::copysign(0.0f, x);
}

// The relative error is nearly 2^-14, the largest that the manual allows.
inline float reciprocal(float x) { return 1 / x * (1 - 0x1p-14f + 0x1p-20f); }

// Joins the halves of a vector until one number is left.
template <class Join>
float reduce(__m512 x, Join join) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] = join(x[i + half], x[i]);
    return x[0];
}

// Two groups of four numbers of `a`, then two of `b`; `order` has two bits for each group.
inline __m512i groups(__m512i a, __m512i b, int order) {
    return each<__m512i>([&](int i) {
        const int from = (order >> i / 2 * 2 & 3) * 2 + i % 2;
        return i < 4 ? a[from] : b[from];
    });
}

// Interleaves the numbers from `first` on of each 16 bytes of `a` and `b`, until 16 bytes are full.
template <class Vector>
__m512i unpack(Vector a, Vector b, int first) {
    const int group = 16 / sizeof a[0];
    return (__m512i)each<Vector>([&](int i) {
        const int from = i / group * group + first + i % group / 2;
        return i % 2 ? b[from] : a[from];
    });
}

inline uint16_t one_of(Uint16 a, Uint16 b, int from) {
    return from & 32 ? b[from & 31] : a[from & 31];
}

template <class Vector, class... Numbers>
__m512i reversed(Numbers... numbers) {
    const decltype(Vector{}[0] + 0) all[] = {numbers...};
    return (__m512i)each<Vector>([&](int i) { return all[sizeof...(numbers) - 1 - i]; });
}

inline int32_t integer(float x) {
    return std::fabs(x) < 0x1p31f ? std::lrint(x) : INT32_MIN;
}

inline int32_t dot(Uint8 a, Int8 b, int first) {
    int32_t sum = 0;
    for (int i = first; i < first + 4; i++) sum += int32_t{a[i]} * int32_t{b[i]};
    return sum;
}

// The instructions. The kernels see nothing else. The value of lane i is an expression of i.
#define LANES(Vector, result, name, arguments, ...) \
    inline result name arguments {                                         \
        return (result)each<Vector>([&](int i) { return __VA_ARGS__; });   \
    }
#define LANES_UNDER(Vector, result, name, arguments, ...)                        \
    inline result name arguments {                                               \
        return (result)each<Vector>([&](int i) { return __VA_ARGS__; }, mask);   \
    }
#define WHICH(lanes, result, name, arguments, ...) \
    inline result name arguments { return which(lanes, [&](int i) { return __VA_ARGS__; }); }

namespace instructions {

// Memory.
inline void _mm_prefetch(const void*, int) {}
inline void _mm_pause() {}
inline unsigned _mm_getcsr() { return __builtin_ia32_stmxcsr(); }
inline void _mm_setcsr(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
inline __m512 _mm512_load_ps(const void* from) { return aligned<__m512>(from); }
inline __m512i _mm512_load_si512(const void* from) { return aligned<__m512i>(from); }
inline void _mm512_store_ps(void* to, __m512 x) { aligned<__m512>(to) = x; }
inline void _mm512_store_si512(void* to, __m512i x) { aligned<__m512i>(to) = x; }
inline void _mm512_mask_store_ps(void* to, __mmask16 mask, __m512 x) {
    return store<float>(&aligned<__m512>(to), mask, x);
}
inline __m512 _mm512_loadu_ps(const void* from) { return load<__m512>(from); }
inline __m512i _mm512_loadu_si512(const void* from) { return (__m512i)load<Int8>(from); }
inline __m256i _mm256_loadu_si256(const void* from) { return (__m256i)load<Half>(from); }
inline __m128i _mm_loadu_si128(const void* from) { return (__m128i)load<Bytes>(from); }
inline void _mm512_storeu_ps(void* to, __m512 x) { return store<float>(to, ALL, x); }
inline void _mm512_storeu_si512(void* to, __m512i x) { return store<int64_t>(to, ALL, x); }
inline void _mm256_storeu_si256(void* to, __m256i x) { return store<int64_t>(to, ALL, x); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
    return load<__m512>(from, mask);
}
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* from) {
    return (__m512i)load<Int32>(from, mask);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
    return (__m512i)load<Uint16>(from, mask);
}
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
    return (__m256i)load<Half>(from, mask);
}
inline void _mm512_mask_storeu_ps(void* to, __mmask16 mask, __m512 x) {
    return store<float>(to, mask, x);
}
inline void _mm512_mask_storeu_epi32(void* to, __mmask16 mask, __m512i x) {
    return store<int32_t>(to, mask, (Int32)x);
}
inline void _mm512_mask_storeu_epi16(void* to, __mmask32 mask, __m512i x) {
    return store<uint16_t>(to, mask, (Uint16)x);
}
inline void _mm256_mask_storeu_epi16(void* to, __mmask16 mask, __m256i x) {
    return store<uint16_t>(to, mask, (Half)x);
}

// Constants and casts.
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
inline __m512i _mm512_set1_epi32(int32_t x) { return (__m512i)(Int32{} + x); }
inline __m512i _mm512_set1_epi16(uint16_t x) { return (__m512i)(Uint16{} + x); }
template <class... Numbers>
__m512i _mm512_set_epi32(Numbers... numbers) { return reversed<Int32>(numbers...); }
template <class... Numbers>
__m512i _mm512_set_epi16(Numbers... numbers) { return reversed<Uint16>(numbers...); }
inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
inline float _mm512_cvtss_f32(__m512 x) { return x[0]; }

// Numbers.
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
LANES_UNDER(__m512, __m512, _mm512_maskz_div_ps, (__mmask16 mask, __m512 a, __m512 b), a[i] / b[i])
LANES(__m512, __m512, _mm512_fmadd_ps, (__m512 a, __m512 b, __m512 c), std::fma(a[i], b[i], c[i]))
LANES(__m512, __m512, _mm512_fnmadd_ps, (__m512 a, __m512 b, __m512 c), std::fma(-a[i], b[i], c[i]))
LANES(__m512, __m512, _mm512_max_ps, (__m512 a, __m512 b), larger(a[i], b[i]))
LANES(__m512, __m512, _mm512_mask_max_ps, (__m512 other, __mmask16 mask, __m512 a, __m512 b),
      mask >> i & 1 ? larger(a[i], b[i]) : other[i])
LANES(__m512, __m512, _mm512_min_ps, (__m512 a, __m512 b), a[i] < b[i] ? a[i] : b[i])
LANES(__m512, __m512, _mm512_abs_ps, (__m512 x), std::fabs(x[i]))
LANES(__m512, __m512, _mm512_sqrt_ps, (__m512 x), std::sqrt(x[i]))
LANES(__m512, __m512, _mm512_rcp14_ps, (__m512 x), reciprocal(x[i]))
LANES(__m512, __m512, _mm512_scalef_ps, (__m512 a, __m512 b), scale(a[i], b[i]))
LANES(__m512, __m512, _mm512_roundscale_ps, (__m512 x, int), std::nearbyint(x[i]))
inline float _mm512_reduce_add_ps(__m512 x) {
    return reduce(x, [](float a, float b) { return a + b; });
}
inline float _mm512_reduce_max_ps(__m512 x) { return reduce(x, larger); }

// bf16 and integers.
LANES(Half, __m256bh, _mm512_cvtneps_pbh, (__m512 x), narrow(x[i]))
LANES(Uint16, __m512bh, _mm512_cvtne2ps_pbh, (__m512 high, __m512 low),
      narrow(i < 16 ? low[i] : high[i - 16]))
LANES(__m512, __m512, _mm512_dpbf16_ps, (__m512 sum, __m512bh a, __m512bh b),
      add_product(add_product(sum[i], a[2 * i + 1], b[2 * i + 1]), a[2 * i], b[2 * i]))
LANES(Int32, __m512i, _mm512_dpbusd_epi32, (__m512i sum, __m512i a, __m512i b),
      ((Int32)sum)[i] + dot((Uint8)a, (Int8)b, 4 * i))
LANES(__m512, __m512, _mm512_cvtepi32_ps, (__m512i x), ((Int32)x)[i])
LANES_UNDER(Int32, __m512i, _mm512_maskz_cvtps_epi32, (__mmask16 mask, __m512 x), integer(x[i]))
LANES(Int32, __m512i, _mm512_cvtepu16_epi32, (__m256i x), ((Half)x)[i])
LANES(Int32, __m512i, _mm512_cvtepu8_epi32, (__m128i x), ((Bytes)x)[i])
LANES(Int32, __m512i, _mm512_cvtepi8_epi32, (__m128i x), int8_t(((Bytes)x)[i]))
LANES(__m512, __m512, _mm512_cvtph_ps, (__m256i x), from_float16(((Half)x)[i]))
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((Uint32)a + (Uint32)b); }
inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return (__m512i)((Uint32)a - (Uint32)b); }
inline __m512i _mm512_slli_epi32(__m512i x, int count) { return (__m512i)((Uint32)x << count); }
inline __m512i _mm512_srli_epi32(__m512i x, int count) { return (__m512i)((Uint32)x >> count); }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }

// Comparisons and choices.
WHICH(16, __mmask16, _mm512_cmp_ps_mask, (__m512 a, __m512 b, int how), holds(a[i], how, b[i]))
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int how) {
    return mask & _mm512_cmp_ps_mask(a, b, how);
}
WHICH(16, __mmask16, _mm512_cmple_epi32_mask, (__m512i a, __m512i b),
      ((Int32)a)[i] <= ((Int32)b)[i])
WHICH(16, __mmask16, _mm512_cmpgt_epi32_mask, (__m512i a, __m512i b), ((Int32)a)[i] > ((Int32)b)[i])
WHICH(32, __mmask32, _mm512_cmpeq_epi16_mask, (__m512i a, __m512i b),
      ((Uint16)a)[i] == ((Uint16)b)[i])
LANES(__m512, __m512, _mm512_mask_blend_ps, (__mmask16 mask, __m512 a, __m512 b),
      mask >> i & 1 ? b[i] : a[i])
inline __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 x) {
    return _mm512_mask_blend_ps(mask, other, x);
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 x) {
    return _mm512_mask_blend_ps(mask, __m512{}, x);
}

// Permutations.
inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return unpack((Int32)a, (Int32)b, 0); }
inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return unpack((Int32)a, (Int32)b, 2); }
inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return unpack(a, b, 0); }
inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return unpack(a, b, 1); }
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int order) { return groups(a, b, order); }
LANES(Uint16, __m512i, _mm512_permutexvar_epi16, (__m512i from, __m512i x),
      ((Uint16)x)[((Uint16)from)[i] & 31])
LANES(Uint16, __m512i, _mm512_permutex2var_epi16, (__m512i a, __m512i from, __m512i b),
      one_of((Uint16)a, (Uint16)b, ((Uint16)from)[i]))

}  // namespace instructions

#undef LANES
#undef LANES_UNDER
#undef WHICH

}  // namespace emulated

using namespace emulated::instructions;

// AMX. An instruction ends the process if a tile is not configured, or has another shape.

namespace emulated {

struct Tile {
    int rows, bytes;
    char data[16][64];
};
inline thread_local Tile tiles[8];

inline Tile& tile(int number) {
    if (tiles[number].rows == 0) __builtin_trap();
    return tiles[number];
}

}  // namespace emulated

inline void _tile_release() { std::memset(emulated::tiles, 0, sizeof emulated::tiles); }

inline void _tile_loadconfig(const void* shapes) {
    const unsigned char* from = static_cast<const unsigned char*>(shapes);
    if (from[0] != 1) __builtin_trap();
    _tile_release();
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        std::memcpy(&bytes, from + 16 + 2 * i, 2);
        if (bytes > 64 || from[48 + i] > 16) __builtin_trap();
        emulated::tiles[i].rows = from[48 + i], emulated::tiles[i].bytes = bytes;
    }
}

inline void _tile_zero(int to) {
    std::memset(emulated::tile(to).data, 0, sizeof emulated::tile(to).data);
}

inline void _tile_loadd(int to, const void* from, int64_t stride) {
    emulated::Tile& tile = emulated::tile(to);
    _tile_zero(to);
    for (int r = 0; r < tile.rows; r++)
        std::memcpy(tile.data[r], static_cast<const char*>(from) + r * stride, tile.bytes);
}

inline void _tile_stored(int from, void* to, int64_t stride) {
    const emulated::Tile& tile = emulated::tile(from);
    for (int r = 0; r < tile.rows; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, tile.data[r], tile.bytes);
}

// The products of the pairs' first numbers and of their second numbers have separate sums, which are
// then added to `to`.
inline void _tile_dpbf16ps(int to, int a, int b) {
    using namespace emulated;
    Tile &sums = tile(to), &rows = tile(a), &pairs = tile(b);
    if (sums.rows != rows.rows || sums.bytes != pairs.bytes || rows.bytes != pairs.rows * 4)
        __builtin_trap();
    for (int r = 0; r < rows.rows; r++)
        for (int n = 0; n < sums.bytes / 4; n++) {
            float sum[2] = {}, before;
            for (int k = 0; k < 2 * pairs.rows; k++) {
                uint16_t x, y;
                std::memcpy(&x, rows.data[r] + 2 * k, 2);
                std::memcpy(&y, pairs.data[k / 2] + 4 * n + 2 * (k % 2), 2);
                sum[k % 2] = add_product(sum[k % 2], x, y);
            }
            std::memcpy(&before, sums.data[r] + 4 * n, 4);
            before = flush(flush(before) + flush(sum[0] + sum[1]));
            std::memcpy(sums.data[r] + 4 * n, &before, 4);
        }
}
