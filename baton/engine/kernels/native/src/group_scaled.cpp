// Products with group-scaled weights: int4 and MXFP4 (W4A16), and fp8 blocks (W8A16).
//
// The result for a row and an output is the sum over groups, in order, of
// scale * sum of x * value + minimum * sum of x. bf16 and float hold values exactly, so products of few
// rows, which unpack weights in registers, and of many rows, which unpack a piece of the weights once for
// all rows, have the same bits.
#include "panels.h"

namespace baton {
namespace {

// The type that activations and unpacked values are multiplied in.
#if defined(__AVX512BF16__) && defined(BATON_BF16)
typedef bf16 Wide;
#else
typedef float Wide;
#endif

// Eight values of 4 bits, with 8 added. Input i is at bit 4 * (i / 2) + 16 * (i % 2), so that a shift
// moves two neighbours to where a pair of bf16 has them.
struct Int4 {
    uint32_t word;
};

// Eight values, each twice an E2M1 number, at the same bits.
struct Mxfp4 {
    uint32_t word;
};

// Four values of float8_e4m3fn, of inputs 0, 2, 1 and 3, for the same reason.
struct Fp8 {
    uint32_t word;
};

template <int VALUES>
struct PackedProduct {
    static constexpr int GROUP = VALUES, WIDTH = 1;
    typedef Wide Left;
    typedef f32x16 Sum;
};

template <int VALUES>
struct PackedLanes : Lanes<Wide> {
    static constexpr int PARTS = VALUES / Product<Wide>::GROUP;
    static auto left(const Wide* from, int p) {
        return Lanes<Wide>::left(from + p * Product<Wide>::GROUP, 0);
    }
};

}  // namespace

template <>
struct Product<Int4> : PackedProduct<8> {};
template <>
struct Product<Mxfp4> : PackedProduct<8> {};
template <>
struct Product<Fp8> : PackedProduct<4> {};

#if defined(__AVX512BF16__) && defined(BATON_BF16)
// Pair p of eight values, looked up as bf16. The table holds its 16 numbers twice, because the fifth bit
// of an index belongs to the next value.
inline Words looked_up(const void* from, int p, const uint16_t (&table)[32]) {
    const __m512i values = (__m512i)(load<Words>(from) >> 4 * p);
    return (Words)_mm512_permutexvar_epi16(values, _mm512_load_si512(table));
}
#endif

template <>
struct Lanes<Int4> : PackedLanes<8> {
#if defined(__AVX512BF16__) && defined(BATON_BF16)
    static Words right(const Int4* from, int p) {
        alignas(64) static constexpr uint16_t TABLE[32] = {  // from -8 to 7
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
            0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
            0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        return looked_up(from, p, TABLE);
    }
#else
    static Floats right(const Int4* from, int p) {
        // With the exponent of 2^23 the lowest bits count ones, so no conversion is needed.
        const Words bits = load<Words>(from) >> (p / 2 * 4 + p % 2 * 16) & 15;
        return (Floats)(bits | 0x4b000000u) - (8388608.0f + 8.0f);
    }
#endif
};

template <>
struct Lanes<Mxfp4> : PackedLanes<8> {
#if defined(__AVX512BF16__) && defined(BATON_BF16)
    static Words right(const Mxfp4* from, int p) {
        alignas(64) static constexpr uint16_t TABLE[32] = {  // 0, 1, 2, 3, 4, 6, 8, 12, and negative
            0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0x8000, 0xbf80, 0xc000,
            0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0,
            0x4100, 0x4140, 0x8000, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140};
        return looked_up(from, p, TABLE);
    }
#else
    static Floats right(const Mxfp4* from, int p) {
        // The exponent is moved to its place and increased by the difference of biases. A subnormal
        // value lacks the leading digit of 2, which is subtracted.
        const Words bits = load<Words>(from) >> (p / 2 * 4 + p % 2 * 16), size = bits & 7;
        const Words small = (Words)(size < 2);
        const Floats value = (Floats)(((size | (small & 2)) << 22) + (127u << 23));
        const Floats exact = value - (Floats)(small & (128u << 23));
        return (Floats)((Words)exact | (bits & 8) << 28);
    }
#endif
};

template <>
struct Lanes<Fp8> : PackedLanes<4> {
    // The exponent is moved to its place and increased by the difference of biases. A subnormal value
    // lacks the leading digit of 2^-6, which is subtracted.
#if defined(__AVX512BF16__) && defined(BATON_BF16)
    static Words right(const Fp8* from, int p) {
        alignas(64) static constexpr uint16_t SMALL[32] = {
            0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
        typedef uint16_t Halves __attribute__((vector_size(REGISTER)));
        const Halves bytes = (Halves)(load<Words>(from) >> 8 * p);
        const __m512i bits = (__m512i)(bytes & 0x7f);
        const __m512i value = (__m512i)(((Halves)bits << 4) + (120 << 7));
        const __m512i exact = _mm512_mask_permutexvar_epi16(
            value, _mm512_cmplt_epu16_mask(bits, _mm512_set1_epi16(8)), bits, _mm512_load_si512(SMALL));
        return (Words)((Halves)exact | (bytes & 0x80) << 8);
    }
#else
    static Floats right(const Fp8* from, int p) {
        const Words byte = load<Words>(from) >> (p / 2 * 8 + p % 2 * 16), bits = byte & 0x7f;
        const Words small = (Words)(bits < 8);
        const Floats value = (Floats)(((bits | (small & 8)) << 20) + (120u << 23));
        const Floats exact = value - (Floats)(small & (121u << 23));
        return (Floats)((Words)exact | (byte & 0x80) << 24);
    }
#endif
};

namespace {

// Up to FEW_ROWS rows, weights are unpacked in registers for each tile, few_vectors wide.
template <class Weight>
constexpr int FEW_ROWS = (REGISTER == 64 ? 4 : 1) * DIRECT_ROWS<Weight>;
#ifdef __AVX512F__
constexpr int few_vectors(int rows) { return tile_vectors(rows); }
#else
constexpr int few_vectors(int rows) { return rows <= 2 ? 2 : 1; }
#endif

constexpr int FEW_CHUNK = 512, MANY_CHUNK = 1024;  // inputs processed for all rows at a time

// The product of 64 columns of the weights with a block of rows.
template <class Weight>
struct Panel {
    const Linear& weights;
    const Wide* x;      // [rows][in]
    const float* sums;  // with minimums: [rows][in / group], sums of a row's elements
    int column;         // first column
    int begin, end;     // rows
    f32x16 (*kept)[PANEL / LANES];  // partial sums of each row of the block

    // Adds groups [first, last) to all rows.
    void run(int first, int last, const Weight* packed, Wide* values) const {
        typedef Product<Weight> P;
        typedef Lanes<Weight> L;
        const int words = (last - first) * weights.group / P::GROUP;
        const char* next = (const char*)(packed + size_t(words) * PANEL);
        Fetch fetch{next, next + size_t(words) * PANEL * 4, 1};
        if (end - begin <= FEW_ROWS<Weight>) {
            const int tiles = parts(end - begin, DIRECT_ROWS<Weight>);
            const int passes = tiles * (PANEL / LANES / few_vectors(parts(end - begin, tiles)));
            fetch.lines = parts(PANEL * 4 / LINE, passes);
            return all_tiles(first, last, packed, fetch);
        }
        for (int i = 0; i < words; i++)
            for (int p = 0; p < L::PARTS; p++)
                for (int lane = 0; lane < PANEL; lane += WORDS)
                    store((char*)values + ((i * L::PARTS + p) * PANEL + lane) * 4,
                          L::right(packed + i * PANEL + lane, p));
        all_tiles(first, last, (const Wide*)values, fetch);
    }

    // b: weights of these groups, packed or unpacked.
    template <class Element>
    void all_tiles(int first, int last, const Element* b, Fetch fetch) const {
        in_parts<DIRECT_ROWS<Element>>(begin, end, [&](auto rows, int row) {
            constexpr bool UNPACKED = std::is_same_v<Element, Wide>;
            constexpr int VECTORS = UNPACKED ? tile_vectors(rows()) : few_vectors(rows());
            for (int vector = 0; vector < PANEL / LANES; vector += VECTORS) {
                const Element* from = b + vector * LANES * Product<Element>::WIDTH;
                this->template tile<rows(), VECTORS>(row, vector, first, last, from, fetch);
                fetch.advance((last - first) * weights.group / Product<Element>::GROUP);
            }
        });
    }

    // Not inlined, because the compiler would keep fewer sums in registers.
    template <int ROWS, int VECTORS, class Element>
    [[gnu::noinline]] void tile(int row, int vector, int first, int last, const Element* b,
                                Fetch fetch) const {
        typedef Product<Element> P;
        constexpr int STEP = PANEL * P::WIDTH;
        const int count = weights.in / weights.group, size = weights.group / P::GROUP;
        const Wide* a = x + size_t(row) * weights.in + first * weights.group;
        for (int g = first; g < last; g++) {
            const size_t lane = (size_t(column / PANEL) * count + g) * PANEL + vector * LANES;
            f32x16 found[ROWS][VECTORS] = {};
            multiply(a, weights.in, b, STEP, size, found, fetch);
            for (int v = 0; v < VECTORS; v++) {
                const f32x16 scales = load_floats((const float*)weights.scales + lane + v * LANES);
                for (int r = 0; r < ROWS; r++) {
                    f32x16& total = kept[row - begin + r][vector + v];
                    total = multiply_add(found[r][v], scales, total);
                }
                if (!sums) continue;
                const f32x16 minimums = load_floats((const float*)weights.minimums + lane + v * LANES);
                for (int r = 0; r < ROWS; r++) {
                    f32x16& total = kept[row - begin + r][vector + v];
                    total = multiply_add(minimums, splat(sums[size_t(row + r) * count + g]), total);
                }
            }
            a += weights.group;
            b += size * STEP;
            fetch.advance(size);
        }
    }
};

template <class Weight>
void product(Team& team, const Wide* x, const float* sums, int rows, const Linear& weights,
             Results y) {
    typedef Product<Weight> P;
    if (rows == 0) return;
    const int panels = parts(weights.out, PANEL), block = block_rows(rows, panels, team.threads());
    const int count = weights.in / weights.group;
    const int chunk = (block <= FEW_ROWS<Weight> ? FEW_CHUNK : MANY_CHUNK) / weights.group;
    const size_t group_size = size_t(weights.group) / P::GROUP * PANEL;
    team.share(panels * parts(rows, block), [&](int i) {
        alignas(64) f32x16 kept[BLOCK][PANEL / LANES];
        alignas(64) Wide values[MANY_CHUNK * PANEL];
        const int column = i % panels * PANEL;
        const int begin = i / panels * block, end = std::min(begin + block, rows);
        const Weight* b = (const Weight*)weights.packed + i % panels * count * group_size;
        const Panel<Weight> panel{weights, x, sums, column, begin, end, kept};
        std::memset(kept, 0, (end - begin) * sizeof *kept);
        for (int first = 0; first < count; first += chunk)
            panel.run(first, std::min(first + chunk, count), b + first * group_size, values);
        write_panel(kept, weights, column, begin, end, y);
    });
}

inline void copy_one(const Activation* from, Activation* to) { *to = *from; }

inline void copy_one(const bf16* from, float* to) { *to = load_floats(from, 1)[0]; }

bool copies(const Linear& weights) {
    return weights.order || !std::is_same_v<Wide, Activation>;
}

}  // namespace

size_t group_scaled_scratch(const Linear& weights, int rows) {
    const size_t sums = weights.minimums ? weights.in / weights.group * sizeof(float) : 0;
    return rows * (sums + (copies(weights) ? weights.in * sizeof(Wide) : 0));
}

void group_scaled_linear(Team& team, const Activation* x, int rows, const Linear& weights, Results y,
                    void* scratch) {
    const size_t in = weights.in, count = in / weights.group;
    float* sums = weights.minimums ? (float*)scratch : nullptr;
    Wide* copied = copies(weights) ? (Wide*)((float*)scratch + (sums ? rows * count : 0)) : nullptr;
    if (copied || sums)
        team.share(rows, [&](int row) {
            const Activation* from = x + row * in;
            Wide* to = copied + row * in;
            if (weights.order)
                for (size_t i = 0; i < in; i++) copy_one(from + weights.order[i], to + i);
            else if (copied)
                for (size_t i = 0; i < in; i += LANES) store_floats(to + i, load_floats(from + i));
            for (size_t g = 0; sums && g < count; g++) {
                f32x16 lanes{};
                for (int i = g * weights.group; i < int(g + 1) * weights.group; i += LANES)
                    lanes += copied ? load_floats(to + i) : load_floats(from + i);
                sums[row * count + g] = sum(lanes);
            }
        });
    const Wide* left = copied ? copied : (const Wide*)x;
    switch (weights.format) {
        case INT4: return product<Int4>(team, left, sums, rows, weights, y);
        case FP8: return product<Fp8>(team, left, sums, rows, weights, y);
        case MXFP4: return product<Mxfp4>(team, left, sums, rows, weights, y);
        default: return;  // gguf.cpp's
    }
}

}  // namespace baton
