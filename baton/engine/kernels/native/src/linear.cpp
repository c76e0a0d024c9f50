// Products with dense and int8 weights, packed into panels.
#include "panels.h"

namespace baton {
namespace {

constexpr int GROUP_LINES = PANEL * 4 / LINE;  // lines of one group of a panel

// A product of few rows is bound by memory, one of many rows by arithmetic. In between, the next weights
// must arrive while all rows are multiplied with the present ones. So the depth is cut into chunks, and
// the next chunk is prefetched: a short one, for the first-level cache, with few rows; otherwise as long
// as the second-level cache allows, because sums are stored between chunks.
constexpr int MANY_ROWS = 3 * TILE_ROWS + 1;
#ifdef __AVX512F__
constexpr int SHORT_CHUNK = 64, LONG_CHUNK = 1024;  // in groups of 256 bytes of weights
constexpr int LONE_ROWS = 2;  // up to LONE_ROWS rows, the hardware's prefetch suffices
#else
// Narrow tiles read a panel several times, in steps that hardware prefetch does not recognise.
constexpr int SHORT_CHUNK = 64, LONG_CHUNK = 64;
constexpr int LONE_ROWS = 0;
#endif

// Where tiles are narrow, or weights narrower than the type they are multiplied in, products of
// WIDENED_ROWS rows or more widen a chunk of weights first and lay it out in the order of tiles.
template <class Weight>
constexpr bool WIDENS = REGISTER < 64 || !std::is_same_v<Operand<Weight>, Weight>;
constexpr int WIDENED_ROWS = 9;
constexpr int WIDENED_STEPS = 256;  // depth of a chunk, in 32 bits a column

// The left operand of a product: activations, or quantised activations.
template <class Weight>
struct Left {
    const typename Product<Weight>::Left* rows;
    size_t stride;        // elements between rows
    const float* scales;  // int8: one for each row
};

// A part of the depth, processed for all rows of a block before the next.
struct Chunk {
    int first, groups;
    bool ends;  // whether it is the last
};

// Converts the sums of sixteen columns to outputs.
struct Finish {
    f32x16 bias{}, scales{};
    i32x16 offsets{};

    Finish(const Linear& weights, int column, int count) {
        if (weights.bias) bias = load_floats(weights.bias + column, count);
        if (!weights.offsets) return;
        scales = load_floats((const float*)weights.scales + column, count);
        offsets = load_some<i32x16>(weights.offsets + column, count);
    }
    f32x16 operator()(f32x16 sums, float) const { return sums + bias; }
    f32x16 operator()(i32x16 sums, float row_scale) const {  // exact up to here
        return __builtin_convertvector(sums - offsets, f32x16) * (scales * row_scale) + bias;
    }
};

// The product of 64 columns of the weights with a block of rows.
template <class Weight>
struct Panel {
    typedef Product<Weight> P;
    typedef typename P::Sum Sum;

    const Linear& weights;
    const Left<Weight>& left;
    const Weight* b;
    int column;      // first column
    int begin, end;  // rows
    Results y;
    Sum (*kept)[PANEL / LANES];  // partial sums of each row of the block
    Operand<Weight>* widened;    // scratch for a chunk

    // Multiplies a chunk with all rows, in tiles of nearly equal height.
    void run(const Chunk& chunk, const Weight* next) const {
        const int tiles = parts(end - begin, DIRECT_ROWS<Weight>);
        const int passes = tiles * (PANEL / LANES / tile_vectors(parts(end - begin, tiles)));
        const int lines = end - begin > LONE_ROWS ? parts(GROUP_LINES, passes) : 0;
        const size_t bytes = size_t(chunk.groups) * GROUP_LINES * LINE;
        Fetch fetch{(const char*)next, (const char*)next + bytes, lines};
        in_parts<DIRECT_ROWS<Weight>>(begin, end, [&](auto rows, int row) {
            constexpr int VECTORS = tile_vectors(rows());
            for (int vector = 0; vector < PANEL / LANES; vector += VECTORS) {
                this->template tile<rows(), VECTORS>(row, vector, chunk, fetch);
                fetch.advance(chunk.groups);
            }
        });
    }

    // `run` over a widened copy of the chunk. Tiles of the same columns run one after the other, so that
    // the columns stay in the cache.
    void run_widened(const Chunk& chunk, const Weight* next) const {
        widen(chunk);
        const size_t bytes = size_t(chunk.groups) * GROUP_LINES * LINE;
        Fetch fetch{(const char*)next, (const char*)next + bytes, 1};
        for (int vector = 0; vector < PANEL / LANES; vector += TILE_VECTORS)
            in_parts<TILE_ROWS>(begin, end, [&](auto rows, int row) {
                this->template tile<rows(), TILE_VECTORS, true>(row, vector, chunk, fetch);
                fetch.advance(chunk.groups * Lanes<Weight>::PARTS);
            });
    }

    // -> [tiles][groups][parts][columns of a tile], 32 bits each.
    void widen(const Chunk& chunk) const {
        typedef Lanes<Weight> L;
        constexpr int OF_TILE = TILE_VECTORS * LANES, TILES = PANEL / OF_TILE;
        const Weight* from = b + size_t(chunk.first) * PANEL * P::WIDTH;
        uint32_t* to = (uint32_t*)widened;
        for (int g = 0; g < chunk.groups; g++, to += L::PARTS * OF_TILE)
            for (int tile = 0; tile < TILES; tile++)
                for (int i = 0; i < OF_TILE; i += WORDS, from += WORDS * P::WIDTH)
                    for (int part = 0; part < L::PARTS; part++)
                        store(to + (size_t(tile) * chunk.groups * L::PARTS + part) * OF_TILE + i,
                              L::right(from, part));
    }

    template <int ROWS, int VECTORS, bool WIDENED = false>
    void tile(int row, int vector, const Chunk& chunk, const Fetch& fetch) const {
        const auto* a = left.rows + row * left.stride + chunk.first * P::GROUP;
        const Weight* from = b + (size_t(chunk.first) * PANEL + vector * LANES) * P::WIDTH;
        Sum sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = chunk.first == 0 ? Sum{} : kept[row - begin + r][vector + v];
        if constexpr (WIDENED) {
            typedef Operand<Weight> Wide;
            constexpr int WIDTH = VECTORS * LANES * Product<Wide>::WIDTH;
            const int steps = chunk.groups * Lanes<Weight>::PARTS;
            const Wide* columns = widened + size_t(vector / VECTORS) * steps * WIDTH;
            multiply(a, left.stride, columns, WIDTH, steps, sums, fetch);
        } else
            multiply(a, left.stride, from, size_t(PANEL) * P::WIDTH, chunk.groups, sums, fetch);
        if (chunk.ends) {
            if constexpr (std::is_same_v<typename P::Left, Weight>)
                if (weights.in % P::GROUP) add_rest(a, from, chunk.groups, sums);
            for (int v = 0; v < VECTORS; v++)
                finish(&sums[0][v], VECTORS, row, ROWS, column + (vector + v) * LANES);
            return;
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) kept[row - begin + r][vector + v] = sums[r][v];
    }

    // Adds a last group that is not full: memory after the row may hold anything, also a NaN.
    template <int ROWS, int VECTORS>
    void add_rest(const Weight* a, const Weight* from, int groups, Sum (&sums)[ROWS][VECTORS]) const {
        Weight padded[ROWS * P::GROUP] = {};
        for (int r = 0; r < ROWS; r++)
            std::memcpy(padded + r * P::GROUP, a + r * left.stride + size_t(groups) * P::GROUP,
                        weights.in % P::GROUP * sizeof(Weight));
        multiply(padded, P::GROUP, from + size_t(groups) * PANEL * P::GROUP, 0, 1, sums);
    }

    // Writes sixteen columns of a tile, whose rows' sums lie `step` apart. Not inlined: inlining doubles
    // the compile time and is no faster.
    [[gnu::noinline]] void finish(const Sum* sums, int step, int row, int rows, int first) const {
        const int count = weights.out - first;
        if (count <= 0) return;
        const Finish outputs(weights, first, count);
        for (int r = 0; r < rows; r++) {
            const float row_scale = left.scales ? left.scales[row + r] : 1.0f;
            const size_t at = size_t(row + r) * y.stride + y.first + first;
            write(y, at, outputs(sums[r * step], row_scale), count);
        }
    }
};

template <class Weight>
inline int chunk_groups(int rows, int groups) {
    int longest = rows > LONE_ROWS && rows < MANY_ROWS ? SHORT_CHUNK : LONG_CHUNK;
    if (WIDENS<Weight> && rows >= WIDENED_ROWS) longest = WIDENED_STEPS / Lanes<Weight>::PARTS;
    return groups ? parts(groups, parts(groups, longest)) : 1;
}

template <class Weight>
void product(Team& team, const Left<Weight>& left, int rows, const Linear& weights, Results y) {
    typedef Product<Weight> P;
    if (rows == 0) return;
    const int panels = parts(weights.out, PANEL), block = block_rows(rows, panels, team.threads());
    const int whole = weights.in / P::GROUP, groups = chunk_groups<Weight>(block, whole);
    const size_t panel_size = size_t(parts(weights.in, P::GROUP)) * P::WIDTH * PANEL;
    team.share(panels * parts(rows, block), [&](int i) {
        alignas(64) typename P::Sum kept[BLOCK][PANEL / LANES];
        alignas(64) uint32_t widened[WIDENS<Weight> ? WIDENED_STEPS * PANEL : 1];
        const int begin = i / panels * block, end = begin + block < rows ? begin + block : rows;
        const Weight* b = (const Weight*)weights.packed + i % panels * panel_size;
        const Weight* following = b + team.threads() * panel_size;  // most likely this thread's next
        const Panel<Weight> panel{weights, left, b, i % panels * PANEL,       begin,
                                  end,     y,    kept, (Operand<Weight>*)widened};
        for (int first = 0; first == 0 || first < whole; first += groups) {
            const int now = whole - first < groups ? whole - first : groups;
            const bool ends = first + now == whole;
            const Weight* next = b + size_t(first + now) * PANEL * P::WIDTH;
            const Chunk chunk{first, now, ends};
            if constexpr (WIDENS<Weight>)
                if (block >= WIDENED_ROWS) {
                    panel.run_widened(chunk, ends ? following : next);
                    continue;
                }
            panel.run(chunk, ends ? following : next);
        }
    });
}

// Elements of a left operand's row in scratch memory, a multiple of the group.
template <class Weight>
inline size_t scratch_stride(int in) {
    return size_t(parts(in, Product<Weight>::GROUP)) * Product<Weight>::GROUP;
}

// Rows as the left operand of weights of the same type.
template <class Element>
Left<Element> widened(Team& team, const Element* x, int rows, int in, void* scratch) {
    if constexpr (std::is_same_v<Operand<Element>, Element>) {
        return {x, size_t(in), nullptr};
    } else {
        const size_t stride = scratch_stride<Element>(in);
        Operand<Element>* to = (Operand<Element>*)scratch;
        team.share(rows, [&](int row) {
            for (int i = 0; i < in; i += LANES)
                store_floats(to + row * stride + i, load_floats(x + size_t(row) * in + i, in - i),
                             int(stride) - i);
        });
        return {to, stride, nullptr};
    }
}

// Sixteen bytes, or the first `count`, as the left operand of int8 weights.
inline void store_bytes(int8_t* to, u8x16 bytes, int count) { store_some(to, bytes, count); }

inline void store_bytes(int16_t* to, u8x16 bytes, int count) {  // 0 and 2 of each four, then 1 and 3
    typedef uint64_t u64x4 __attribute__((vector_size(32)));
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
    const u64x4 fours = __builtin_convertvector((u32x4)bytes, u64x4);
    store_some(to, (fours & 0xff00ff) | (fours << 24 & 0xff00ff00000000), count);
}

// Writes one row as bytes 128 + q, where x is about q times the returned scale.
template <class Left>
float quantize(const Activation* x, int size, Left* to, int stride) {
    const Units units(x, size);
    for (int i = 0; i < size; i += LANES) {
        const u8x16 bytes = round_bytes(load_floats(x + i, size - i) * units.inverse, 128);
        store_bytes(to + i, bytes, stride - i);
    }
    return units.scale;
}

}  // namespace

size_t linear_scratch(const Linear& weights, int rows) {
    size_t size = 0;
    if (weights.next) size = linear_scratch(*weights.next, rows);
    if (weights.group)
        return std::max(size, weights.format < BITS4 ? group_scaled_scratch(weights, rows)
                                                     : gguf_scratch(weights, rows));
    if (weights.scales)
        size = std::max(size, rows * (scratch_stride<int8_t>(weights.in) * sizeof(Int8Operand) +
                                      sizeof(float)));
    else if (!std::is_same_v<Operand<Activation>, Activation>)
        size = std::max(size, rows * scratch_stride<Activation>(weights.in) *
                                  sizeof(Operand<Activation>));
    return size;
}

namespace {

// `linear` for one of the weights whose outputs are side by side.
void one_linear(Team& team, const Activation* x, int rows, const Linear& weights, Results y,
                void* scratch) {
    const size_t in = weights.in;
    if (weights.group)
        return weights.format < BITS4 ? group_scaled_linear(team, x, rows, weights, y, scratch)
                                      : gguf_linear(team, x, rows, weights, y, scratch);
    Linear padded = weights;  // to whole groups, as weights and rows in scratch memory are
    if (!weights.scales) {
        const Left<Activation> left = widened(team, x, rows, weights.in, scratch);
        padded.in = int(left.stride);
        return product(team, left, rows, padded, y);
    }
    const size_t stride = scratch_stride<int8_t>(weights.in);
    padded.in = int(stride);
    float* scales = (float*)scratch;
    Int8Operand* bytes = (Int8Operand*)(scales + rows);
    team.share(rows, [&](int row) {
        scales[row] = quantize(x + row * in, weights.in, bytes + row * stride, int(stride));
    });
    product(team, Left<int8_t>{bytes, stride, scales}, rows, padded, y);
}

}  // namespace

template <class Output>
void linear(Team& team, const Activation* x, int rows, const Linear& weights, Output* to,
            void* scratch) {
    Results y{to, std::is_same_v<Output, float>, 0, 0};
    for (const Linear* part = &weights; part; part = part->next) y.stride += part->out;
    for (const Linear* part = &weights; part; part = part->next) {
        Linear one = *part;
        if (weights.bias) one.bias = weights.bias + y.first;
        one_linear(team, x, rows, one, y, scratch);
        y.first += part->out;
    }
}

template void linear(Team&, const Activation*, int, const Linear&, Activation*, void*);
#ifdef BATON_BF16
template void linear(Team&, const Activation*, int, const Linear&, float*, void*);
#endif

extern "C" {
void baton_linear(int threads, const Activation* x, int rows, const Linear* weights, void* y,
                  bool floats, void* scratch) {
    with_team(threads, [&](Team& team) {
        if (floats)
            linear(team, x, rows, *weights, (float*)y, scratch);
        else
            linear(team, x, rows, *weights, (Activation*)y, scratch);
    });
}

size_t baton_linear_scratch(const Linear* weights, int rows) { return linear_scratch(*weights, rows); }
}

}  // namespace baton
