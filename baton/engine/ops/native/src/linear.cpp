#include "kernels.h"

namespace baton {
namespace {

constexpr int LINE = 64;                       // bytes that memory delivers together
constexpr int GROUP_LINES = PANEL * 4 / LINE;  // of one group of a panel

// A product of few rows waits for memory, one of many for the multipliers. In between, weights must
// arrive while all rows go through those that are here. So the depth is cut into chunks, and while
// one is in use the next is fetched: into a corner of the first-level cache where there are few
// rows, otherwise as long as the second-level cache allows, for sums are kept between chunks.
constexpr int MANY_ROWS = 3 * TILE_ROWS + 1;
#ifdef __AVX512F__
constexpr int SHORT_CHUNK = 64, LONG_CHUNK = 1024;  // groups, of 256 bytes of weights
constexpr int LONE_ROWS = 2;  // so few need no help: the memory's own look-ahead is fast enough
#else
// Narrow tiles go through a panel several times, in steps that look-ahead does not recognise.
constexpr int SHORT_CHUNK = 64, LONG_CHUNK = 64;
constexpr int LONE_ROWS = 0;
#endif

// Rows that go through a panel together: the sums of more would not stay in the cache.
constexpr int BLOCK = 48 * TILE_ROWS;
constexpr int SMALL_BLOCK = 8 * TILE_ROWS;
constexpr int PIECES_PER_THREAD = 8;  // at least, so that all threads end at nearly the same time

// The left operand of a product: activations as they are, or quantised.
template <class Weight>
struct Left {
    const typename Product<Weight>::Left* rows;
    size_t stride;        // elements from row to row
    const float* scales;  // int8: of each row
};

// Part of the depth, which all rows of a block go through before the next.
struct Chunk {
    int first, groups;
    bool ends;  // the depth
};

// Fetches some lines of the next weights a group, while a product is computed from others.
struct Fetch {
    const char* from;
    const char* end;
    int lines;

    void operator()() {
        for (int i = 0; i < lines; i++, from += LINE) __builtin_prefetch(from);
    }
    void advance(int groups) {
        from += size_t(groups) * lines * LINE;
        if (from >= end) lines = 0;
    }
};

// Makes outputs of the sums of sixteen columns.
struct Finish {
    f32x16 bias{}, scales{};
    i32x16 offsets{};

    Finish(const Linear& weights, int column, int count) {
        if (weights.bias) bias = load_floats(weights.bias + column, count);
        if (!weights.offsets) return;
        scales = load_floats(weights.scales + column, count);
        offsets = load_some<i32x16>(weights.offsets + column, count);
    }
    f32x16 operator()(f32x16 sums, float) const { return sums + bias; }
    f32x16 operator()(i32x16 sums, float row_scale) const {  // exact up to here
        return __builtin_convertvector(sums - offsets, f32x16) * (scales * row_scale) + bias;
    }
};

// Sixty-four columns of the weights, and a block of rows to go through them.
template <class Weight, class Output>
struct Panel {
    typedef Product<Weight> P;
    typedef typename P::Sum Sum;

    const Linear& weights;
    const Left<Weight>& left;
    const Weight* b;
    int column;      // its first
    int begin, end;  // rows
    Output* y;
    Sum (*kept)[PANEL / LANES];  // sums between chunks, of each row of the block

    // All rows, in tiles of nearly equal height.
    void take(const Chunk& chunk, const Weight* next) const {
        const int tiles = parts(end - begin, TILE_ROWS);
        const int passes = tiles * (PANEL / LANES / tile_vectors(parts(end - begin, tiles)));
        const int lines = end - begin > LONE_ROWS ? parts(GROUP_LINES, passes) : 0;
        const size_t bytes = size_t(chunk.groups) * GROUP_LINES * LINE;
        Fetch fetch{(const char*)next, (const char*)next + bytes, lines};
        in_parts<TILE_ROWS>(begin, end, [&](auto rows, int row) {
            constexpr int VECTORS = tile_vectors(rows());
            for (int vector = 0; vector < PANEL / LANES; vector += VECTORS) {
                this->template tile<rows(), VECTORS>(row, vector, chunk, fetch);
                fetch.advance(chunk.groups);
            }
        });
    }

    template <int ROWS, int VECTORS>
    void tile(int row, int vector, const Chunk& chunk, const Fetch& fetch) const {
        const auto* a = left.rows + row * left.stride + chunk.first * P::GROUP;
        const Weight* from = b + (size_t(chunk.first) * PANEL + vector * LANES) * P::WIDTH;
        Sum sums[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = chunk.first == 0 ? Sum{} : kept[row - begin + r][vector + v];
        multiply(a, left.stride, from, size_t(PANEL) * P::WIDTH, chunk.groups, sums, fetch);
        if (chunk.ends) {
            if (weights.in % P::GROUP) add_rest(a, from, chunk.groups, sums);
            for (int v = 0; v < VECTORS; v++) write(sums, v, row, column + (vector + v) * LANES);
            return;
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) kept[row - begin + r][vector + v] = sums[r][v];
    }

    // A last group that is not full: what follows the row in memory may be anything, a NaN too.
    template <int ROWS, int VECTORS>
    void add_rest(const Weight* a, const Weight* from, int groups, Sum (&sums)[ROWS][VECTORS]) const {
        Weight padded[ROWS * P::GROUP] = {};
        for (int r = 0; r < ROWS; r++)
            std::memcpy(padded + r * P::GROUP, a + r * left.stride + size_t(groups) * P::GROUP,
                        weights.in % P::GROUP * sizeof(Weight));
        multiply(padded, P::GROUP, from + size_t(groups) * PANEL * P::GROUP, 0, 1, sums);
    }

    // Not inlined for every tile: that would be half of the compiler's time, and no faster.
    template <int ROWS, int VECTORS>
    [[gnu::noinline]] void write(const Sum (&sums)[ROWS][VECTORS], int v, int row, int first) const {
        const int count = weights.out - first;
        if (count <= 0) return;
        const Finish finish(weights, first, count);
        for (int r = 0; r < ROWS; r++) {
            const float row_scale = left.scales ? left.scales[row + r] : 1.0f;
            Output* to = y + size_t(row + r) * weights.out + first;
            store_floats(to, finish(sums[r][v], row_scale), count);
        }
    }
};

inline int chunk_groups(int rows, int groups) {
    const int longest = rows > LONE_ROWS && rows < MANY_ROWS ? SHORT_CHUNK : LONG_CHUNK;
    return groups ? parts(groups, parts(groups, longest)) : 1;
}

inline int block_rows(int rows, int panels, int threads) {
    const int wanted = threads > 1 ? parts(PIECES_PER_THREAD * threads, panels) : 1;
    const int possible = rows < 2 * SMALL_BLOCK ? 1 : rows / SMALL_BLOCK;
    const int blocks = wanted < possible ? wanted : possible, needed = parts(rows, BLOCK);
    return parts(rows, blocks > needed ? blocks : needed);
}

template <class Weight, class Output>
void product(Team& team, const Left<Weight>& left, int rows, const Linear& weights, Output* y) {
    typedef Product<Weight> P;
    if (rows == 0) return;
    const int panels = parts(weights.out, PANEL), block = block_rows(rows, panels, team.threads());
    const int whole = weights.in / P::GROUP, groups = chunk_groups(block, whole);
    const size_t panel_size = size_t(parts(weights.in, P::GROUP)) * P::WIDTH * PANEL;
    team.share(panels * parts(rows, block), [&](int i) {
        alignas(64) typename P::Sum kept[BLOCK][PANEL / LANES];
        const int begin = i / panels * block, end = begin + block < rows ? begin + block : rows;
        const Weight* b = (const Weight*)weights.packed + i % panels * panel_size;
        const Weight* following = b + team.threads() * panel_size;  // most likely this thread's
        const Panel<Weight, Output> panel{weights, left, b,    i % panels * PANEL,
                                                   begin,   end,  y, kept};
        for (int first = 0; first == 0 || first < whole; first += groups) {
            const int now = whole - first < groups ? whole - first : groups;
            const bool ends = first + now == whole;
            const Weight* next = b + size_t(first + now) * PANEL * P::WIDTH;
            panel.take(Chunk{first, now, ends}, ends ? following : next);
        }
    });
}

inline size_t quantized_stride(int in) {
    return size_t(parts(in, Product<int8_t>::GROUP)) * Product<int8_t>::GROUP;
}

// One row as bytes 128 + q, where x is about q times the scale that is returned.
float quantize(const Activation* x, int size, uint8_t* to) {
    const float peak = largest_magnitude(x, size);
    const float inverse = 127.0f / (peak > 1e-36f ? peak : 1e-36f);  // of less it would be infinite
    for (int i = 0; i < size; i += LANES) {
        const i32x16 bytes = round_whole(load_floats(x + i, size - i) * inverse) + 128;
        store_some(to + i, __builtin_convertvector(bytes, u8x16), size - i);
    }
    return peak / 127.0f;
}

}  // namespace

size_t linear_scratch(const Linear& weights, int rows) {
    if (weights.group) return grouped_scratch(weights, rows);
    if (!weights.scales) return 0;
    return size_t(rows) * (quantized_stride(weights.in) + sizeof(float));
}

template <class Output>
void linear(Team& team, const Activation* x, int rows, const Linear& weights, Output* y,
            void* scratch) {
    const size_t in = weights.in;
    if (weights.group) {
        const Results results{y, std::is_same_v<Output, float>};
        return grouped_linear(team, x, rows, weights, results, scratch);
    }
    if (!weights.scales)
        return product(team, Left<Activation>{x, in, nullptr}, rows, weights, y);
    const size_t stride = quantized_stride(weights.in);
    float* scales = (float*)scratch;
    uint8_t* bytes = (uint8_t*)(scales + rows);
    team.share(rows, [&](int row) {
        uint8_t* to = bytes + row * stride;
        for (size_t i = weights.in; i < stride; i++) to[i] = 0;  // the weights there are zeros
        scales[row] = quantize(x + row * in, weights.in, to);
    });
    Linear padded = weights;
    padded.in = int(stride);  // as the bytes and the weights are
    const Left<int8_t> left{(const int8_t*)bytes, stride, scales};
    product(team, left, rows, padded, y);
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
