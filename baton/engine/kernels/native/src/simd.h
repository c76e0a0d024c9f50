// Vectors of sixteen lanes (float, bf16 pairs or int8 quads), and the product tile of all kernels.
//
// Written in GCC's vector extensions, which become registers of AVX-512, AVX2 or NEON, with intrinsics
// where an instruction has no other expression.
#pragma once

#ifdef __aarch64__
#include "neon.h"
#else
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace baton {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

constexpr int LANES = 16;

#ifdef __AVX512F__
constexpr int REGISTER = 64;  // bytes
#elif defined(__aarch64__)
constexpr int REGISTER = 16;
#else
constexpr int REGISTER = 32;
#endif

struct bf16 {
    uint16_t bits;
};

// The type of activations and of unquantised weights and KV: a library is compiled for one of them.
#ifdef BATON_BF16
typedef bf16 Activation;
#else
typedef float Activation;
#endif

template <class Vector, class Element>
inline Vector load(const Element* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class Vector, class Element>
inline void store(Element* to, Vector value) {
    std::memcpy(to, &value, sizeof value);
}

inline f32x16 splat(float value) { return f32x16{} + value; }

template <class Element>
struct RegisterOf {
    typedef Element type __attribute__((vector_size(REGISTER)));
};

// work(vectors...) of sixteen lanes, register by register: the compiler splits comparisons of wider
// vectors lane by lane.
template <class Work, class... Vectors>
inline f32x16 by_registers(const Work& work, Vectors... vectors) {
#ifdef __AVX512F__
    return (f32x16)work(vectors...);
#else
    f32x16 result;
    for (int first = 0; first < LANES; first += REGISTER / 4)
        store((float*)&result + first,
              work(load<typename RegisterOf<std::remove_reference_t<decltype(vectors[0])>>::type>(
                  (const float*)&vectors + first)...));
    return result;
#endif
}

inline f32x16 larger(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__aarch64__)
    return by_registers([](auto a, auto b) { return a > b ? a : b; }, a, b);
#else
    return by_registers([](auto a, auto b) { return _mm256_max_ps(a, b); }, a, b);
#endif
}

// The first `count` lanes of a vector; the others are zeros.
template <class Vector, class Element>
inline Vector load_some(const Element* from, int count) {
    if (size_t(count) * sizeof(Element) >= sizeof(Vector)) return load<Vector>(from);
    Vector value{};
    std::memcpy(&value, from, count * sizeof(Element));
    return value;
}

template <class Vector, class Element>
inline void store_some(Element* to, Vector value, int count) {
    if (size_t(count) * sizeof(Element) >= sizeof(Vector)) return store(to, value);
    std::memcpy(to, &value, count * sizeof(Element));
}

inline f32x16 widen_bf16(u16x16 bits) {
#if defined(__AVX512F__) || defined(__aarch64__)
    return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
#else
    __m128i halves[2];
    std::memcpy(halves, &bits, sizeof halves);
    const __m256i words[2] = {_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves[0]), 16),
                              _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves[1]), 16)};
    return load<f32x16>(words);
#endif
}

// To the nearest, ties to even.
inline u16x16 round_bf16(f32x16 value) {
#ifdef __AVX512BF16__
    return (u16x16)_mm512_cvtneps_pbh((__m512)value);
#else
    const auto round = [](auto value, auto bits) {
        const auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const auto quiet = (bits >> 16) | 0x40;  // a NaN stays one
        return value == value ? rounded : quiet;
    };
    return __builtin_convertvector((u32x16)by_registers(round, value, (u32x16)value), u16x16);
#endif
}

// Elements as floats, and floats as elements: sixteen, or the first `count`.
inline f32x16 load_floats(const float* from, int count = LANES) {
    return load_some<f32x16>(from, count);
}

inline f32x16 load_floats(const bf16* from, int count = LANES) {
    return widen_bf16(load_some<u16x16>(from, count));
}

// Sixteen int8 as floats.
inline f32x16 load_floats(const int8_t* from) {
    const i8x16 bytes = load<i8x16>(from);
#ifdef __AVX512F__
    const i32x16 whole = (i32x16)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)bytes);
#elif defined(__aarch64__)
    const i32x16 whole = __builtin_convertvector(bytes, i32x16);
#else
    const __m128i low = (__m128i)bytes, high = _mm_unpackhi_epi64(low, low);
    const __m256i halves[2] = {_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)};
    const i32x16 whole = load<i32x16>(halves);
#endif
    return __builtin_convertvector(whole, f32x16);
}

inline void store_floats(float* to, f32x16 value, int count = LANES) { store_some(to, value, count); }

inline void store_floats(bf16* to, f32x16 value, int count = LANES) {
    store_some(to, round_bf16(value), count);
}

// To the nearest whole numbers, ties to even, of a magnitude of 127 at most; plus an offset, as bytes.
inline u8x16 round_bytes(f32x16 value, uint8_t offset) {
#ifdef __AVX512F__
    const __m512i whole = _mm512_maskz_cvtps_epi32(0xffff, (__m512)value);
    return (u8x16)_mm512_maskz_cvtepi32_epi8(0xffff, whole) + offset;
#elif defined(__aarch64__)
    const auto whole = by_registers([](auto part) { return vcvtnq_s32_f32(part); }, value);
    return __builtin_convertvector((i32x16)whole, u8x16) + offset;
#else
    __m256 halves[2];
    std::memcpy(halves, &value, sizeof halves);
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(halves[0]),
                                             _mm256_cvtps_epi32(halves[1]));
    const __m256i ordered = _mm256_permute4x64_epi64(mixed, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered),
                                          _mm256_extracti128_si256(ordered, 1));
    return (u8x16)bytes + offset;
#endif
}

// a * b + c, rounded once: the compiler would decide by what is around it.
inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#ifdef __AVX512F__
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__aarch64__)
    return by_registers([](auto a, auto b, auto c) { return vfmaq_f32(c, a, b); }, a, b, c);
#else
    return by_registers([](auto a, auto b, auto c) { return _mm256_fmadd_ps(a, b, c); }, a, b, c);
#endif
}

inline float sum(f32x16 value) {
    // In a fixed order: halves, quarters, eighths, pairs.
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

inline float largest(f32x16 value) {
#ifdef __aarch64__
    f32x4 quarters[4];
    std::memcpy(quarters, &value, sizeof quarters);
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(quarters[0], quarters[1]),
                                vmaxq_f32(quarters[2], quarters[3])));
#else
    __m256 eights[2];
    std::memcpy(eights, &value, sizeof eights);
    const __m256 eight = _mm256_max_ps(eights[0], eights[1]);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#endif
}

inline float largest_magnitude(const auto* from, int size) {
    f32x16 peak{};
    for (int i = 0; i < size; i += LANES) {
        const f32x16 value = load_floats(from + i, size - i);
        peak = larger(peak, (f32x16)((u32x16)value & 0x7fffffffu));
    }
    return largest(peak);
}

// Quantisation of a row to integers up to 127: the factor of its elements, and the value of one unit. The
// formula of kernels/torch/row_quantization.py.
struct Units {
    float inverse, scale;

    Units(const auto* row, int size) {
        const float peak = largest_magnitude(row, size);
        inverse = 127.0f / (peak > 1e-36f ? peak : 1e-36f);  // of less it would be infinite
        scale = peak / 127.0f;
    }
};

// The type that elements are multiplied in: their own where an instruction multiplies groups of them.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
typedef bf16 Bf16Operand;
#else
typedef float Bf16Operand;
#endif
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
typedef int8_t Int8Operand;
#else
typedef int16_t Int8Operand;  // products of bytes would saturate
#endif
template <class Element>
using Operand = std::conditional_t<
    std::is_same_v<Element, bf16>, Bf16Operand,
    std::conditional_t<std::is_same_v<Element, int8_t>, Int8Operand, Element>>;

// How elements of one type are multiplied: `GROUP` neighbours along the depth in one 32-bit lane, which
// are `WIDTH` elements. The left operand is widened beforehand; that of int8 has 128 added, which the
// caller subtracts from the sums.
template <class Element>
struct Product {
    static constexpr int GROUP = 4 / sizeof(Element), WIDTH = GROUP;
    typedef Operand<Element> Left;
    typedef std::conditional_t<std::is_integral_v<Element>, i32x16, f32x16> Sum;
};

// Vectors of the CPU's register size, in which products are computed: without AVX-512 the compiler would
// keep vectors of sixteen lanes in memory.
#ifdef __AVX512F__
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;  // the largest tile whose sums stay in 24 of 32
constexpr int tile_vectors(int) { return TILE_VECTORS; }  // width of a tile of `rows` rows
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;  // 24 of 32
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;  // 12 of 16
// With few sums, each addition would wait for the one before.
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
typedef float Floats __attribute__((vector_size(REGISTER)));
typedef uint32_t Words __attribute__((vector_size(REGISTER)));
typedef int32_t Ints __attribute__((vector_size(REGISTER)));
typedef int16_t Shorts __attribute__((vector_size(REGISTER)));
constexpr int WORDS = REGISTER / 4;

#ifndef __AVX512F__
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#ifdef __aarch64__
    return vfmaq_f32(c, a, b);
#else
    return _mm256_fmadd_ps(a, b, c);
#endif
}
#endif

// One word in all lanes.
inline Words repeat(const void* from) {
#if defined(__AVX512F__) || defined(__aarch64__)
    return Words{} + load<uint32_t>((const char*)from);
#else
    // The compiler would make slower scalar arithmetic of the plain form.
    return (Words)_mm256_broadcastd_epi32(_mm_loadu_si32(from));
#endif
}

// How groups are multiplied in registers. Where the left operand is wider, they are widened in two parts,
// each of 32 bits a lane.
template <class Element>
struct Lanes {  // float
    static constexpr int PARTS = 1;
    typedef Floats Sum;
    static Floats left(const float* from, int) { return *from - Floats{}; }
    static Floats right(const float* from, int) { return load<Floats>(from); }
    static Sum add(Sum sum, Floats a, Floats b) { return sum + a * b; }
};

template <>
struct Lanes<bf16> {
    typedef Floats Sum;
#ifdef __AVX512BF16__
    static constexpr int PARTS = 1;
    static Words left(const bf16* from, int) { return repeat(from); }
    static Words right(const bf16* from, int) { return load<Words>(from); }
    static Sum add(Sum sum, Words a, Words b) {
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static constexpr int PARTS = 1;
    static Words left(const bf16* from, int) { return repeat(from); }
    static Words right(const bf16* from, int) { return load<Words>(from); }
    static Sum add(Sum sum, Words a, Words b) { return dot_bf16(sum, a, b); }
#else
    static constexpr int PARTS = 2;
    static Floats left(const float* from, int p) { return from[p] - Floats{}; }
    static Floats right(const bf16* from, int p) {
        const Words pairs = load<Words>(from);
        return (Floats)(p ? pairs & 0xffff0000u : pairs << 16);
    }
    static Sum add(Sum sum, Floats a, Floats b) { return sum + a * b; }
#endif
};

template <>
struct Lanes<int16_t> {
    static constexpr int PARTS = 1;
    typedef Ints Sum;
    static Shorts left(const int16_t* from, int) { return (Shorts)repeat(from); }
    static Shorts right(const int16_t* from, int) { return load<Shorts>(from); }
    static Sum add(Sum sum, Shorts a, Shorts b) {
#ifdef __AVX512BW__
        return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__aarch64__)
        return sum + dot_int16(a, b);
#else
        return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
    }
};

template <>
struct Lanes<int8_t> {
    typedef Ints Sum;
#ifdef __AVX512VNNI__
    static constexpr int PARTS = 1;
    static Ints left(const int8_t* from, int) { return (Ints)repeat(from); }
    static Ints right(const int8_t* from, int) { return load<Ints>(from); }
    static Sum add(Sum sum, Ints a, Ints b) {
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
    }
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr int PARTS = 1;
    static Ints left(const int8_t* from, int) { return (Ints)repeat(from); }
    static Ints right(const int8_t* from, int) { return load<Ints>(from); }
    static Sum add(Sum sum, Ints a, Ints b) { return dot_int8(sum, a, b); }
#else
    static constexpr int PARTS = 2;  // bytes 0 and 2 of each four, then 1 and 3: of both operands
    static Shorts left(const int16_t* from, int p) { return (Shorts)repeat(from + 2 * p); }
    static Shorts right(const int8_t* from, int p) {
        const Shorts bytes = load<Shorts>(from);
        return (p ? bytes : bytes << 8) >> 8;
    }
    static Sum add(Sum sum, Shorts a, Shorts b) { return Lanes<int16_t>::add(sum, a, b); }
#endif
};

struct Nothing {
    void operator()() const {}
};

// sums[r][v] += rows of a times columns of b, over `groups` groups of the depth, in order.
//
// a: ROWS rows of elements, `a_stride` elements apart · b: packed `[groups][columns][WIDTH]`, the
// 16 * VECTORS columns of one group next to each other, groups `b_stride` elements apart ·
// meanwhile: called once a group, to prefetch.
// A sum depends on its own row and column only, and is always added in the same order.
template <int ROWS, int VECTORS, class Element, class Meanwhile = Nothing>
inline void multiply(const typename Product<Element>::Left* a, size_t a_stride, const Element* b,
                     size_t b_stride, int groups,
                     typename Product<Element>::Sum (&sums)[ROWS][VECTORS],
                     Meanwhile meanwhile = {}) {
    typedef Lanes<Element> L;
    constexpr int GROUP = Product<Element>::GROUP, WIDTH = Product<Element>::WIDTH;
    constexpr int REGISTERS = VECTORS * LANES / WORDS;
    typename L::Sum held[ROWS][REGISTERS];
    // Register by register, because whole vectors would stay in memory.
    const auto at = [&](int r, int v) { return (int32_t*)sums[r] + v * WORDS; };
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < REGISTERS; v++) held[r][v] = load<typename L::Sum>(at(r, v));
    for (int g = 0; g < groups; g++) {
#pragma GCC unroll 16
        for (int part = 0; part < L::PARTS; part++) {
            decltype(L::right(b, part)) columns[REGISTERS];
            for (int v = 0; v < REGISTERS; v++) columns[v] = L::right(b + v * WORDS * WIDTH, part);
            for (int r = 0; r < ROWS; r++) {
                const auto left = L::left(a + r * a_stride, part);
                for (int v = 0; v < REGISTERS; v++) held[r][v] = L::add(held[r][v], left, columns[v]);
            }
        }
        meanwhile();
        a += GROUP;
        b += b_stride;
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < REGISTERS; v++) store(at(r, v), held[r][v]);
}

inline int parts(int count, int size) { return (count + size - 1) / size; }

// Calls work with a size of 1 to MAX as a constant.
template <int MAX, class Work>
inline void with_constant(int size, const Work& work) {
    if constexpr (MAX > 0) {
        if (size == MAX) return work(std::integral_constant<int, MAX>{});
        with_constant<MAX - 1>(size, work);
    }
}

// Calls work(size, first) for parts of [first, end): as few as a size of MAX allows, about equal; `size`
// is a constant.
template <int MAX, class Work>
inline void in_parts(int first, int end, const Work& work) {
    for (int left = parts(end - first, MAX); left; left--) {
        const int size = parts(end - first, left);
        with_constant<MAX>(size, [&](auto constant) { work(constant, first); });
        first += size;
    }
}

constexpr float LOG2_E = 1.44269504f;

// 2^x of x <= 0, within two units in the last place; below -126 it is 0.
inline f32x16 power_of_two(f32x16 x) {
    // Adding and taking off 1.5 * 2^23 rounds to a whole number.
    const float magic = 12582912.0f;
    const f32x16 shifted = x + magic;
    const f32x16 r = x - (shifted - magic);
    f32x16 p = r * 1.535336188e-4f + 1.339887440e-3f;  // Cephes' exp2f
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    const i32x16 power = (i32x16)shifted << 23;  // the magic's own bits are shifted out
    return by_registers([](auto x, auto result) { return x < -126 ? decltype(result){} : result; }, x,
                        (f32x16)((i32x16)p + power));
}

// 1 / (1 + e^-x), by the power of the negative magnitude alone, which cannot overflow.
inline f32x16 sigmoid(f32x16 x) {
    const f32x16 power = power_of_two((f32x16)((u32x16)x | 0x80000000u) * LOG2_E);
    return by_registers([](auto x, auto p) { return (x < 0 ? p : decltype(p){} + 1) / (p + 1); }, x,
                        power);
}

// c * tanh(x / c) of a cap c, as 2 / (1 + e^(-2x / c)) - 1.
inline f32x16 softcapped(f32x16 x, float cap) {
    return (sigmoid(x * (2.0f / cap)) * 2.0f - 1.0f) * cap;
}

}  // namespace baton
