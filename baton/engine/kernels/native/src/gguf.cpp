// Products with weights of GGUF's types: numbers of 4, 6 or 8 bits in groups of 16 or 32 inputs.
//
// A chunk of the weights is unpacked to one form, numbers without sign and float scales, and multiplied
// with all rows. Activations of bfloat16 are quantised to int8 in blocks of 32, each with a float unit, as
// llama.cpp does. The result for a row and an output is the sum over groups, in order, of
//
//     scale * unit * sum of x * (number - offset) + minimum * unit * sum of x
//
// Sums within a group are exact, so a row has the same bits whatever rows are multiplied with it. Float
// activations are multiplied as they are.
#include "panels.h"

namespace baton {
namespace {

// The type that unpacked numbers are multiplied in.
#if !defined(BATON_BF16)
typedef float Number;
#elif defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
typedef uint8_t Number;
#else
typedef int16_t Number;  // sums of products of bytes would saturate
#endif
constexpr bool FLOATS = std::is_same_v<Number, float>;

constexpr int BLOCK_INPUTS = 32;  // activations that share a unit
constexpr int CHUNK = FLOATS ? 64 : 256;  // inputs unpacked at a time: they stay in the first-level cache
constexpr int MIN_GROUP = 16;

}  // namespace

template <>
struct Product<uint8_t> {
    static constexpr int GROUP = 4, WIDTH = 4;
    typedef int8_t Left;
    typedef i32x16 Sum;
};

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
template <>
struct Lanes<uint8_t> {
    static constexpr int PARTS = 1;
    typedef Ints Sum;
    static Ints left(const int8_t* from, int) { return (Ints)repeat(from); }
    static Ints right(const uint8_t* from, int) { return load<Ints>(from); }
    static Sum add(Sum sum, Ints a, Ints b) {
#ifdef __AVX512VNNI__
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
#else
        return dot_int8(sum, b, a);
#endif
    }
};
#endif

namespace {

typedef Product<Number> P;
typedef P::Left Left;
constexpr int PARTS = 4 / P::GROUP;  // 32-bit lanes that four unpacked numbers take

// A tile's sums and totals are registers; of floats only the sums, which are longer.
#ifdef __AVX512F__
constexpr int ROWS = FLOATS ? 6 : 3, VECTORS = 4;
#else
constexpr int ROWS = 4, VECTORS = 1;
#endif

// The rows of a product.
struct Rows {
    const Left* values;   // [rows][in]
    const float* units;   // [rows][in / BLOCK_INPUTS]; null: they are 1
    const float* sums;    // with minimums: [rows][in / group], unit * sum of x; otherwise null
    const int32_t* starts;  // otherwise: [rows][in / group], -offset * sum of x; null: they are 0
};

// A part of the depth of a panel, unpacked.
struct Chunk {
    alignas(64) uint32_t values[CHUNK / P::GROUP * PANEL];
    f32x16 scales[CHUNK / MIN_GROUP][PANEL / LANES], minimums[CHUNK / MIN_GROUP][PANEL / LANES];

    // Fills in inputs [first, end) of a panel.
    void unpack(const Linear& weights, int panel, int first, int end) {
        offset = weights.offset;
        const int bits = weights.format == BITS4 ? 4 : weights.format == BITS6 ? 6 : 8;
        const size_t column_words = (size_t(panel) * weights.in + first) / 32 * bits;
        const Words* from = (const Words*)weights.packed + column_words * PANEL / WORDS;
        if (bits == 4) unpack_4_bits(from, end - first);
        if (bits == 6) unpack_6_bits(from, end - first);
        if (bits == 8) unpack_8_bits(from, end - first);
        const int groups = weights.in / weights.group;
        for (int g = first / weights.group; g < end / weights.group; g++)
            for (int v = 0; v < PANEL / LANES; v++) {
                const size_t at = (size_t(panel) * groups + g) * PANEL + v * LANES;
                const int blocks = weights.units ? weights.in / weights.block : 1;
                const int block = weights.units ? g * weights.group / weights.block : 0;
                const size_t unit_at = (size_t(panel) * blocks + block) * PANEL + v * LANES;
                const int to = g - first / weights.group;
                scales[to][v] = floats(weights.scales, weights.units, at, unit_at);
                if (weights.minimums)
                    minimums[to][v] = floats(weights.minimums, weights.minimum_units, at, unit_at);
            }
    }

   private:
    int offset;

    static f32x16 floats(const void* numbers, const float* units, size_t at, size_t unit_at) {
        if (!units) return load_floats((const float*)numbers + at);
        return load_floats((const int8_t*)numbers + at) * load_floats(units + unit_at);
    }

    // Stores the bytes of inputs [4 * index, 4 * index + 4) of some columns.
    void put(int index, int column, Words bytes) {
        for (int part = 0; part < PARTS; part++) {
            uint32_t* to = values + (index * PARTS + part) * PANEL + column;
            if constexpr (FLOATS) {
                // With the exponent of 2^23 the lowest bits count ones.
                const Floats counted = (Floats)((bytes >> 8 * part & 0xff) | 0x4b000000u);
                store(to, counted - (8388608.0f + float(offset)));
            } else if constexpr (PARTS == 2)  // bytes 0 and 2, then 1 and 3
                store(to, bytes >> 8 * part & 0x00ff00ff);
            else
                store(to, bytes);
        }
    }

    // Eight numbers a word: the lower halves of its bytes, then the higher ones.
    void unpack_4_bits(const Words* from, int inputs) {
        for (int i = 0; i < inputs / 4; i += 2)
            for (int column = 0; column < PANEL; column += WORDS) {
                const Words word = load<Words>(from++);
                put(i, column, word & 0x0f0f0f0f);
                put(i + 1, column, word >> 4 & 0x0f0f0f0f);
            }
    }

    // Sixteen numbers in three words of a column: the lower 4 bits of eight each in planes 0 and 1, as
    // above, and all higher bits in plane 2, two bits of each byte for each four numbers.
    void unpack_6_bits(const Words* from, int inputs) {
        for (int i = 0; i < inputs / 4; i += 4, from += 2 * PANEL / WORDS)
            for (int column = 0; column < PANEL; column += WORDS, from++) {
                const Words high = load<Words>(from + 2 * PANEL / WORDS);
                const Words low[2] = {load<Words>(from), load<Words>(from + PANEL / WORDS)};
                put(i, column, (low[0] & 0x0f0f0f0f) | (high << 4 & 0x30303030));
                put(i + 1, column, (low[0] >> 4 & 0x0f0f0f0f) | (high << 2 & 0x30303030));
                put(i + 2, column, (low[1] & 0x0f0f0f0f) | (high & 0x30303030));
                put(i + 3, column, (low[1] >> 4 & 0x0f0f0f0f) | (high >> 2 & 0x30303030));
            }
    }

    void unpack_8_bits(const Words* from, int inputs) {
        for (int i = 0; i < inputs / 4; i++)
            for (int column = 0; column < PANEL; column += WORDS)
                put(i, column, load<Words>(from++) ^ 0x80808080);
    }
};

// The product of an unpacked chunk with rows [begin, end).
struct Panel {
    const Linear& weights;
    const Rows& rows;
    int begin, end;
    f32x16 (*kept)[PANEL / LANES];  // sums so far of each row

    void run(const Chunk& chunk, int first, int end_input) const {
        for (int vector = 0; vector < PANEL / LANES; vector += VECTORS)
            in_parts<ROWS>(begin, end, [&](auto count, int row) {
                this->template tile<count()>(chunk, first, end_input, row, vector);
            });
    }

    template <int COUNT>
    [[gnu::noinline]] void tile(const Chunk& chunk, int first, int end_input, int row,
                                int vector) const {
        const size_t in = weights.in, groups = in / weights.group;
        const Number* b = (const Number*)chunk.values + vector * LANES * P::WIDTH;
        const int steps = weights.group / P::GROUP;
        f32x16 totals[COUNT][VECTORS];
        for (int r = 0; r < COUNT; r++)
            for (int v = 0; v < VECTORS; v++) totals[r][v] = kept[row - begin + r][vector + v];
        const int last = end_input / weights.group;
        for (int g = first / weights.group, at = 0; g < last; g++, at++) {
            P::Sum found[COUNT][VECTORS] = {};
            if constexpr (!FLOATS)
                for (int r = 0; rows.starts && r < COUNT; r++)
                    for (int v = 0; v < VECTORS; v++)
                        found[r][v] += rows.starts[(row + r) * groups + g];
            multiply(rows.values + row * in + size_t(g) * weights.group, in, b, PANEL * P::WIDTH, steps,
                     found);
            b += steps * PANEL * P::WIDTH;
            for (int r = 0; r < COUNT; r++) {
                const size_t block = g * weights.group / BLOCK_INPUTS;
                const float unit = FLOATS ? 1.0f : rows.units[(row + r) * (in / BLOCK_INPUTS) + block];
                for (int v = 0; v < VECTORS; v++) {
                    const f32x16 sum = __builtin_convertvector(found[r][v], f32x16);
                    const f32x16 scale = chunk.scales[at][vector + v] * unit;
                    totals[r][v] = multiply_add(sum, scale, totals[r][v]);
                    if (rows.sums)
                        totals[r][v] = multiply_add(chunk.minimums[at][vector + v],
                                                    splat(rows.sums[(row + r) * groups + g]),
                                                    totals[r][v]);
                }
            }
        }
        for (int r = 0; r < COUNT; r++)
            for (int v = 0; v < VECTORS; v++) kept[row - begin + r][vector + v] = totals[r][v];
    }
};

// Where a product's rows are in scratch memory.
struct Scratch {
    size_t sums, units, values, size;  // bytes

    Scratch(const Linear& weights, int rows) {
        const size_t in = weights.in, groups = in / weights.group;
        sums = 0;
        units = sums + (weights.minimums || !FLOATS ? rows * groups * 4 : 0);
        values = units + (FLOATS ? 0 : rows * (in / BLOCK_INPUTS) * 4);
        size = values + (FLOATS ? 0 : rows * in * sizeof(Left));
    }
};

#ifdef BATON_BF16
// Writes a row as x / unit, rounded, and its sums.
void quantize(const bf16* x, const Linear& weights, Left* to, float* units, float* sums,
              int32_t* starts) {
    for (int i = 0; i < weights.in; i += BLOCK_INPUTS) {
        const Units block(x + i, BLOCK_INPUTS);
        units[i / BLOCK_INPUTS] = block.scale;
        int32_t halves[2];
        for (int half = 0; half < 2; half++) {
            const int at = i + half * LANES;
            const f32x16 scaled = load_floats(x + at) * block.inverse;
            const u8x16 bytes = round_bytes(scaled, 0);
            if constexpr (PARTS == 1)
                store(to + at, bytes);
            else {  // 0 and 2 of each four, then 1 and 3
                typedef int16_t i16x16 __attribute__((vector_size(32)));
                const i16x16 wide = __builtin_convertvector((i8x16)bytes, i16x16);
                for (int j = 0; j < LANES; j++) to[at + j] = wide[j / 4 * 4 + j % 2 * 2 + j % 4 / 2];
            }
            halves[half] = 0;
            for (int j = 0; j < LANES; j++) halves[half] += int8_t(bytes[j]);
        }
        const bool whole = weights.group == BLOCK_INPUTS;
        for (int half = 0; half < (whole ? 1 : 2); half++) {
            const int32_t sum = whole ? halves[0] + halves[1] : halves[half];
            const int g = i / weights.group + half;
            if (sums)
                sums[g] = block.scale * float(sum);
            else
                starts[g] = -weights.offset * sum;
        }
    }
}
#endif

// Rows as the product reads them.
Rows prepare(Team& team, const Activation* x, int rows, const Linear& weights, char* scratch) {
    const Scratch at(weights, rows);
    const size_t in = weights.in, groups = in / weights.group;
    float* sums = weights.minimums ? (float*)(scratch + at.sums) : nullptr;
#ifdef BATON_BF16
    int32_t* starts = sums ? nullptr : (int32_t*)(scratch + at.sums);
    float* units = (float*)(scratch + at.units);
    Left* values = (Left*)(scratch + at.values);
    team.share(rows, [&](int row) {
        quantize(x + row * in, weights, values + row * in, units + row * (in / BLOCK_INPUTS),
                 sums ? sums + row * groups : nullptr, starts ? starts + row * groups : nullptr);
    });
    return {values, units, sums, starts};
#else
    if (sums)
        team.share(rows, [&](int row) {
            for (size_t g = 0; g < groups; g++) {
                f32x16 lanes{};
                for (int i = 0; i < weights.group; i += LANES)
                    lanes += load_floats(x + row * in + g * weights.group + i);
                sums[row * groups + g] = sum(lanes);
            }
        });
    return {x, nullptr, sums, nullptr};
#endif
}

}  // namespace

size_t gguf_scratch(const Linear& weights, int rows) { return Scratch(weights, rows).size; }

void gguf_linear(Team& team, const Activation* x, int rows, const Linear& weights, Results y,
                 void* scratch) {
    if (rows == 0) return;
    const Rows left = prepare(team, x, rows, weights, (char*)scratch);
    const int panels = parts(weights.out, PANEL), block = block_rows(rows, panels, team.threads());
    team.share(panels * parts(rows, block), [&](int i) {
        alignas(64) f32x16 kept[BLOCK][PANEL / LANES];
        Chunk chunk;
        const int begin = i / panels * block, end = std::min(begin + block, rows);
        const Panel panel{weights, left, begin, end, kept};
        std::memset(kept, 0, (end - begin) * sizeof *kept);
        for (int first = 0; first < weights.in; first += CHUNK) {
            const int last = std::min(first + CHUNK, weights.in);
            chunk.unpack(weights, i % panels, first, last);
            panel.run(chunk, first, last);
        }
        write_panel(kept, weights, i % panels * PANEL, begin, end, y);
    });
}

}  // namespace baton
