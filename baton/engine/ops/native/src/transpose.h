// Rows of elements brought into the order that `multiply` reads: neighbours in depth side by side.
#pragma once

#include "simd.h"

namespace baton {

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

#ifdef __AVX512BW__
typedef u32x16 Words;
typedef i32x16 SignedWords;
typedef f32x16 FloatWords;
typedef uint64_t WordPairs __attribute__((vector_size(64)));
constexpr Words LOW_WORDS{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
constexpr Words HIGH_WORDS{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
constexpr WordPairs LOW_PAIRS{0, 8, 2, 10, 4, 12, 6, 14}, HIGH_PAIRS{1, 9, 3, 11, 5, 13, 7, 15};

inline Words join(u32x4 a, u32x4 b, u32x4 c, u32x4 d) {
    __m512i words = _mm512_castsi128_si512((__m128i)a);
    words = _mm512_inserti32x4(words, (__m128i)b, 1);
    words = _mm512_inserti32x4(words, (__m128i)c, 2);
    return (Words)_mm512_inserti32x4(words, (__m128i)d, 3);
}

// Four words each of the rows 0, 4, 8 and 12.
inline Words take_words(const char* from, size_t stride) {
    return join(load<u32x4>(from), load<u32x4>(from + 4 * stride), load<u32x4>(from + 8 * stride),
                load<u32x4>(from + 12 * stride));
}
#else
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t SignedWords __attribute__((vector_size(32)));
typedef float FloatWords __attribute__((vector_size(32)));
typedef uint64_t WordPairs __attribute__((vector_size(32)));
constexpr Words LOW_WORDS{0, 8, 1, 9, 4, 12, 5, 13}, HIGH_WORDS{2, 10, 3, 11, 6, 14, 7, 15};
constexpr WordPairs LOW_PAIRS{0, 4, 2, 6}, HIGH_PAIRS{1, 5, 3, 7};

inline Words take_words(const char* from, size_t stride) {
    return __builtin_shufflevector(load<u32x4>(from), load<u32x4>(from + 4 * stride), 0, 1, 2, 3, 4,
                                   5, 6, 7);
}
#endif

constexpr int WORDS = sizeof(Words) / sizeof(uint32_t);

// WORDS rows of four words -> four rows of WORDS words.
inline void transpose(const char* from, size_t stride, Words (&to)[4]) {
    Words rows[4];
    for (int i = 0; i < 4; i++) rows[i] = take_words(from + i * stride, stride);
    for (int high = 0; high < 2; high++) {
        const Words mask = high ? HIGH_WORDS : LOW_WORDS;
        const WordPairs a = (WordPairs)__builtin_shuffle(rows[0], rows[1], mask);
        const WordPairs b = (WordPairs)__builtin_shuffle(rows[2], rows[3], mask);
        to[2 * high] = (Words)__builtin_shuffle(a, b, LOW_PAIRS);
        to[2 * high + 1] = (Words)__builtin_shuffle(a, b, HIGH_PAIRS);
    }
}

// One of the four int8 in each word, as the bits of a float.
inline Words widen_byte(Words words, int byte) {
    const SignedWords whole = (SignedWords)(words << (24 - 8 * byte)) >> 24;
    return (Words)__builtin_convertvector(whole, FloatWords);
}

// Stores words of a type of row as elements: words of four int8 become rows of words, `stride`
// elements apart.
template <class Row>
inline void store_words(Words words, Activation* to, size_t stride) {
    if constexpr (std::is_same_v<Row, Activation>) {
        store(to, words);
    } else if constexpr (sizeof(Activation) == 2) {
        for (int i = 0; i < 2; i++)  // a bf16 holds an int8 exactly, in the upper half of its float
            store(to + i * stride, widen_byte(words, 2 * i) >> 16 | widen_byte(words, 2 * i + 1));
    } else {
        for (int i = 0; i < 4; i++) store(to + i * stride, widen_byte(words, i));
    }
}

// Sixteen int8 as floats.
inline f32x16 load_floats(const int8_t* from) {
    const i8x16 bytes = load<i8x16>(from);
#ifdef __AVX512F__
    const i32x16 whole = (i32x16)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)bytes);
#else
    const __m128i low = (__m128i)bytes, high = _mm_unpackhi_epi64(low, low);
    const __m256i halves[2] = {_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)};
    const i32x16 whole = load<i32x16>(halves);
#endif
    return __builtin_convertvector(whole, f32x16);
}

// Rows of a type, as many as neighbours in depth lie side by side, -> one row of elements.
template <class Row>
inline void interleave(const Row* const (&rows)[1], float* to, int size) {
    for (int i = 0; i < size; i += LANES) store_floats(to + i, load_floats(rows[0] + i));
}

template <class Row>
inline void interleave(const Row* const (&rows)[2], bf16* to, int size) {
    int i = 0;
#ifdef __AVX512BW__
    typedef uint16_t u16x32 __attribute__((vector_size(64)));
    constexpr u16x32 FIRST{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    if constexpr (std::is_same_v<Row, bf16>)
        for (; i + 2 * LANES <= size; i += 2 * LANES) {
            const u16x32 a = load<u16x32>(rows[0] + i), b = load<u16x32>(rows[1] + i);
            store(to + 2 * i, __builtin_shuffle(a, b, FIRST));
            store(to + 2 * i + 2 * LANES, __builtin_shuffle(a, b, FIRST + LANES));
        }
#endif
    for (; i < size; i += LANES) {  // exact, as above
        const u32x16 even = (u32x16)load_floats(rows[0] + i), odd = (u32x16)load_floats(rows[1] + i);
        store(to + 2 * i, even >> 16 | odd);
    }
}

}  // namespace baton
