// Products in registers of sixteen lanes, with what the CPU has of VDPBF16PS and VPDPBUSD.
//
// Included by simd.h.
#pragma once

namespace baton {

// The largest tile whose sums stay in registers: 24 of 32.
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;

// How wide a tile of so many rows is.
constexpr int tile_vectors(int) { return TILE_VECTORS; }

// How groups are multiplied. One of bf16 or int8 is taken in two parts where no instruction takes
// it at once: then only one part of the columns is in registers.
template <class Element>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr int COUNT = 16, PARTS = 1;
    typedef f32x16 Sum;
    typedef f32x16 Factor;
    static Factor left(const float* from, int) { return splat(*from); }
    static Factor right(const float* from, int) { return load<f32x16>(from); }
    static Sum add(Sum sum, Factor a, Factor b) { return sum + a * b; }
};

template <>
struct Lanes<bf16> {
    static constexpr int COUNT = 16;
    typedef f32x16 Sum;
#ifdef __AVX512BF16__
    static constexpr int PARTS = 1;
    typedef u32x16 Factor;
    static Factor left(const bf16* from, int) { return u32x16{} + load<uint32_t>(from); }
    static Factor right(const bf16* from, int) { return load<u32x16>(from); }
    static Sum add(Sum sum, Factor a, Factor b) {
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
#else
    static constexpr int PARTS = 2;
    typedef f32x16 Factor;
    static Factor part(u32x16 pairs, int part) {
        return (f32x16)(part ? pairs & 0xffff0000u : pairs << 16);
    }
    static Factor left(const bf16* from, int p) { return part(u32x16{} + load<uint32_t>(from), p); }
    static Factor right(const bf16* from, int p) { return part(load<u32x16>(from), p); }
    static Sum add(Sum sum, Factor a, Factor b) { return sum + a * b; }
#endif
};

template <>
struct Lanes<int8_t> {
    static constexpr int COUNT = 16;
    typedef i32x16 Sum;
    typedef __m512i Factor;
#ifdef __AVX512VNNI__
    static constexpr int PARTS = 1;
    static Factor left(const int8_t* from, int) { return _mm512_set1_epi32(load<int32_t>(from)); }
    static Factor right(const int8_t* from, int) { return _mm512_loadu_si512(from); }
    static Sum add(Sum sum, Factor a, Factor b) {
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, a, b);
    }
#else
    // As pairs of 16 bits, bytes 0 and 2, then 1 and 3: products of bytes would saturate.
    static constexpr int PARTS = 2;
    static Factor left(const int8_t* from, int part) {
        const __m512i bytes = _mm512_set1_epi32(load<int32_t>(from));
        return part ? _mm512_srli_epi16(bytes, 8) : _mm512_and_si512(bytes, _mm512_set1_epi16(0xff));
    }
    static Factor right(const int8_t* from, int part) {
        const __m512i bytes = _mm512_loadu_si512(from);
        return _mm512_srai_epi16(part ? bytes : _mm512_slli_epi16(bytes, 8), 8);
    }
    static Sum add(Sum sum, Factor a, Factor b) { return sum + (i32x16)_mm512_madd_epi16(a, b); }
#endif
};

}  // namespace baton
