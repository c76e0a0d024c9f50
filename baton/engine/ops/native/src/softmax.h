// The softmax of attention, a tile of keys at a time, corrected as larger scores come
// (https://arxiv.org/abs/1805.02867). In powers of two: scores come multiplied by log2(e).
#pragma once

#include <limits>

#include "key_tile.h"

namespace baton {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline f32x16 larger(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return (f32x16)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// Keys of a tile that a query sees, [first, last].
struct Visible {
    int first, last;
    bool all() const { return first <= 0 && last >= TILE_KEYS - 1; }
};

inline f32x16 hide(f32x16 scores, Visible visible, int first_key) {
    const i32x16 key = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first_key;
    const i32x16 seen = (key >= visible.first) & (key <= visible.last);
    return seen ? scores : splat(NEVER);
}

// What is known of a query after some tiles.
struct Softmax {
    f32x16 total;  // weights so far, added up in lanes
    float peak;    // the largest score so far
};

typedef float TileScores[TILE_KEYS];

// Scales and hides a query's scores, in place; returns the largest. Like `weigh` it is not inlined
// for each number of rows: that would be two thirds of the compiler's time, and no faster.
[[gnu::noinline]] inline float finish_scores(TileScores& scores, const float* scales,
                                             Visible visible) {
    f32x16 best = splat(NEVER);
    for (int i = 0; i < TILE_KEYS; i += LANES) {
        f32x16 score = load<f32x16>(scores + i) * load<f32x16>(scales + i);
        if (!visible.all()) score = hide(score, visible, i);
        store(scores + i, score);
        best = larger(best, score);
    }
    return largest(best);
}

// Turns a query's scores into weights; their sum is added to what was before, corrected.
template <class Element>
[[gnu::noinline]] inline void weigh(const TileScores& scores, const float* value_scales,
                                    float correction, Softmax& state, Element* weights) {
    f32x16 total = state.total * correction;
    for (int i = 0; i < TILE_KEYS; i += LANES) {
        const f32x16 weight = power_of_two(load<f32x16>(scores + i) - state.peak);
        total += weight;
        store_floats(weights + i, weight * load<f32x16>(value_scales + i));
    }
    state.total = total;
}

// Scores of some queries -> their weights, and what their earlier sums are to be multiplied by.
template <int ROWS, class Element>
inline void softmax(TileScores (&scores)[ROWS], const Visible (&visible)[ROWS],
                    const KeyTile<Element>& tile, Softmax* states, float* corrections,
                    Element (&weights)[ROWS][TILE_KEYS]) {
    static_assert(ROWS <= LANES);
    float lag[LANES] = {};
    for (int i = 0; i < ROWS; i++) {
        const float peak = finish_scores(scores[i], tile.key_scales, visible[i]);
        lag[i] = states[i].peak;
        states[i].peak = peak > lag[i] ? peak : lag[i];
        lag[i] -= states[i].peak;
    }
    store(corrections, power_of_two(load<f32x16>(lag)));
    for (int i = 0; i < ROWS; i++)
        weigh(scores[i], tile.value_scales, corrections[i], states[i], weights[i]);
}

}  // namespace baton
