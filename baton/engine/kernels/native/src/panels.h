// How products go through the panels of packed weights, whatever these are made of.
#pragma once

#include "kernels.h"

namespace baton {

constexpr int LINE = 64;  // bytes that memory delivers together

// Rows of a tile that takes its columns from the weights themselves: their parts need registers.
template <class Weight>
constexpr int DIRECT_ROWS = REGISTER == 32 && Lanes<Weight>::PARTS > 1 ? 4 : TILE_ROWS;

// Rows that go through a panel together: the sums of more would not stay in the cache.
constexpr int BLOCK = 48 * TILE_ROWS;
constexpr int SMALL_BLOCK = 8 * TILE_ROWS;
constexpr int PIECES_PER_THREAD = 8;  // at least, so that all threads end at nearly the same time

inline int block_rows(int rows, int panels, int threads) {
    const int wanted = threads > 1 ? parts(PIECES_PER_THREAD * threads, panels) : 1;
    const int possible = rows < 2 * SMALL_BLOCK ? 1 : rows / SMALL_BLOCK;
    const int blocks = wanted < possible ? wanted : possible, needed = parts(rows, BLOCK);
    return parts(rows, blocks > needed ? blocks : needed);
}

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

// Sixteen of a row's results, or as many as there are columns left.
inline void write(Results y, size_t at, f32x16 result, int count) {
    if (y.floats)
        store_floats((float*)y.rows + at, result, count);
    else
        store_floats((Activation*)y.rows + at, result, count);
}

}  // namespace baton
