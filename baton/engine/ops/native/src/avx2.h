// Products in registers of eight lanes, for CPUs without AVX-512.
//
// Included by simd.h. In intrinsics: the compiler would keep vectors of sixteen lanes in memory.
#pragma once

namespace baton {

// The largest tile whose sums stay in registers: 8 of 16, which leaves room for columns in parts.
constexpr int TILE_ROWS = 4, TILE_VECTORS = 1;

// How wide a tile of so many rows is: with few sums, each addition would wait for the one before.
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

// How groups are multiplied: of float at once, of bf16 or int8 in two parts, so that only one part
// of the columns is in registers.
template <class Element>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr int COUNT = 8, PARTS = 1;
    typedef __m256 Sum;
    typedef __m256 Factor;
    static Factor left(const float* from, int) { return _mm256_broadcast_ss(from); }
    static Factor right(const float* from, int) { return _mm256_loadu_ps(from); }
    static Sum add(Sum sum, Factor a, Factor b) { return _mm256_fmadd_ps(a, b, sum); }
};

template <>
struct Lanes<bf16> {
    static constexpr int COUNT = 8, PARTS = 2;
    typedef __m256 Sum;
    typedef __m256 Factor;
    static Factor part(__m256i pairs, int part) {
        const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
        return (__m256)(part ? _mm256_and_si256(pairs, high) : _mm256_slli_epi32(pairs, 16));
    }
    static Factor left(const bf16* from, int p) {
        return part(_mm256_set1_epi32(load<int32_t>(from)), p);
    }
    static Factor right(const bf16* from, int p) {
        return part(_mm256_loadu_si256((const __m256i*)from), p);
    }
    static Sum add(Sum sum, Factor a, Factor b) { return _mm256_fmadd_ps(a, b, sum); }
};

template <>
struct Lanes<int8_t> {
    static constexpr int COUNT = 8;
    typedef __m256i Sum;
    typedef __m256i Factor;
    // As pairs of 16 bits, bytes 0 and 2, then 1 and 3: products of bytes would saturate.
    static constexpr int PARTS = 2;
    static Factor left(const int8_t* from, int part) {
        const __m256i bytes = _mm256_set1_epi32(load<int32_t>(from));
        return part ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
    }
    static Factor right(const int8_t* from, int part) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
        return _mm256_srai_epi16(part ? bytes : _mm256_slli_epi16(bytes, 8), 8);
    }
    static Sum add(Sum sum, Factor a, Factor b) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    }
};

}  // namespace baton
