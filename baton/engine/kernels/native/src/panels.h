// Tiling, prefetching and writing of products with packed weights of any format.
#pragma once

#include "kernels.h"

namespace baton {

constexpr int LINE = 64;  // bytes of a cache line

// Rows of a tile that reads packed weights directly: unpacking them needs registers.
template <class Weight>
constexpr int DIRECT_ROWS = REGISTER == 32 && Lanes<Weight>::PARTS > 1 ? 4 : TILE_ROWS;

// Rows that are multiplied with a panel at a time: the sums of more would not stay in the cache.
constexpr int BLOCK = 48 * TILE_ROWS;
constexpr int SMALL_BLOCK = 8 * TILE_ROWS;
constexpr int PIECES_PER_THREAD = 8;  // at least, so that threads end at nearly the same time

inline int block_rows(int rows, int panels, int threads) {
    const int wanted = threads > 1 ? parts(PIECES_PER_THREAD * threads, panels) : 1;
    const int possible = rows < 2 * SMALL_BLOCK ? 1 : rows / SMALL_BLOCK;
    const int blocks = wanted < possible ? wanted : possible, needed = parts(rows, BLOCK);
    return parts(rows, blocks > needed ? blocks : needed);
}

// Prefetches some lines of the next weights for each group that is multiplied.
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

// Writes the first `count` of sixteen results of a row.
inline void write(Results y, size_t at, f32x16 result, int count) {
    if (y.floats)
        store_floats((float*)y.rows + at, result, count);
    else
        store_floats((Activation*)y.rows + at, result, count);
}

// Writes rows [begin, end) of a panel's sums, row by row, because rows of results lie far apart in memory.
inline void write_panel(const f32x16 (*sums)[PANEL / LANES], const Linear& weights, int column, int begin,
                        int end, Results y) {
    for (int row = begin; row < end; row++)
        for (int v = 0; v < PANEL / LANES; v++) {
            const int first = column + v * LANES, count = weights.out - first;
            if (count <= 0) break;
            f32x16 result = sums[row - begin][v];
            if (weights.bias) result += load_floats(weights.bias + first, count);
            write(y, size_t(row) * y.stride + y.first + first, result, count);
        }
}

}  // namespace baton
