// Attention over the paged KV cache, for decode and prefill.
//
// The query heads that share a KV head, of all rows of a piece, are the rows of one product. Keys are
// processed in tiles aligned to position 0, so that the order of a row's additions does not depend on
// other rows.
#include "kernels.h"

#include <limits>

#include "key_tile.h"

namespace baton {
namespace {

// Online softmax, a tile of keys at a time (https://arxiv.org/abs/1805.02867). Uses powers of two: scores
// are multiplied by log2(e) beforehand.

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The keys of a tile that are visible to a query, [first, last].
struct Visible {
    int first, last;
    bool all() const { return first <= 0 && last >= TILE_KEYS - 1; }
};

inline f32x16 hide(f32x16 scores, Visible visible, int first_key) {
    const i32x16 key = i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first_key;
    return by_registers(
        [&](auto scores, auto key) {
            const auto seen = (key >= visible.first) & (key <= visible.last);
            return seen ? scores : decltype(scores){} + NEVER;
        },
        scores, key);
}

// State of a query's softmax.
struct Softmax {
    f32x16 total;  // sum of weights, by lane
    float peak;    // largest score
};

typedef float TileScores[TILE_KEYS];

// Scales and masks a query's scores in place; returns the largest. Like `weigh` not inlined: inlining
// triples the compile time and is no faster.
[[gnu::noinline]] inline float finish_scores(TileScores& scores, const float* scales,
                                             float cap, Visible visible) {
    f32x16 best = splat(NEVER);
    for (int i = 0; i < TILE_KEYS; i += LANES) {
        f32x16 score = load<f32x16>(scores + i) * load<f32x16>(scales + i);
        if (cap != 0.0f) score = softcapped(score, cap);
        if (!visible.all()) score = hide(score, visible, i);
        store(scores + i, score);
        best = larger(best, score);
    }
    return largest(best);
}

// Converts a query's scores to weights, and adds them to the corrected total.
[[gnu::noinline]] inline void weigh(const TileScores& scores, const float* value_scales,
                                    float correction, Softmax& state, Factor* weights) {
    f32x16 total = state.total * correction;
    for (int i = 0; i < TILE_KEYS; i += LANES) {
        const f32x16 weight = power_of_two(load<f32x16>(scores + i) - state.peak);
        total += weight;
        store_floats(weights + i, weight * load<f32x16>(value_scales + i));
    }
    state.total = total;
}

// Scores of some queries -> weights, and corrections by which earlier sums are to be multiplied.
template <int ROWS>
inline void softmax(TileScores (&scores)[ROWS], float cap, const Visible (&visible)[ROWS],
                    const KeyTile& tile, Softmax* states, float* corrections,
                    Factor (&weights)[ROWS][TILE_KEYS]) {
    static_assert(ROWS <= LANES);
    float lag[LANES] = {};
    for (int i = 0; i < ROWS; i++) {
        const float peak = finish_scores(scores[i], tile.key_scales, cap, visible[i]);
        lag[i] = states[i].peak;
        states[i].peak = peak > lag[i] ? peak : lag[i];
        lag[i] -= states[i].peak;
    }
    store(corrections, power_of_two(load<f32x16>(lag)));
    for (int i = 0; i < ROWS; i++)
        weigh(scores[i], tile.value_scales, corrections[i], states[i], weights[i]);
}

// Query rows of a piece. Packing a tile of keys costs as much as about ten.
constexpr int QUERIES_AT_ONCE = 128;

// Up to UNPACKED_QUERIES query rows, as in decode, keys and values are not packed.
constexpr int UNPACKED_QUERIES = 8;

// With at least SPANS_PER_THREAD sequences a thread, a piece has all KV heads, whose rows share pages.
constexpr int SPANS_PER_THREAD = 4;

class PieceAttention {
   public:
    PieceAttention(const AttentionShape& shape, const Pool& pool)
        : shape_(shape),
          pool_(pool),
          group_(shape.heads / pool.kv_heads),
          size_(pool.head_size),
          cap_(shape.cap * LOG2_E),
          tile_(pool.head_size, pool.int8, shape.scale * LOG2_E) {}

    // Computes a piece, and prefetches the first keys of the next one.
    void run(const Piece& piece, const Piece& next, const Activation* qkv, Activation* out) {
        first_ = piece.span->context + piece.first;
        count_ = piece.count;
        const size_t kv_heads = pool_.latent || shape_.only_reads ? 0 : 2 * pool_.kv_heads;
        const size_t stride = (shape_.heads + kv_heads) * size_;
        const size_t out_stride = size_t(shape_.heads) * size_;
        const size_t row = piece.span->first_row + piece.first;
        for (int i = 0; i < piece.kv_heads; i++) {
            const int kv_head = piece.first_head + i;
            const size_t column = size_t(kv_head) * group_ * size_;
            load_queries(qkv + row * stride + column, stride);
            init_softmax(kv_head * group_);
            if (i + 1 < piece.kv_heads)
                visit_tiles(piece, kv_head, piece, kv_head + 1);
            else
                visit_tiles(piece, kv_head, next, next.first_head);
            write_results(out + row * out_stride + column, out_stride);
        }
    }

   private:
    static constexpr int GROUP = Product<Factor>::GROUP;

    void load_queries(const Activation* from, size_t stride) {
        const size_t elements = group_ * size_;
        for (int i = 0; i < count_; i++)
            for (size_t j = 0; j < elements; j += LANES)
                store_floats(queries_ + i * elements + j, load_floats(from + i * stride + j));
        std::fill_n(sums_, count_ * elements, 0.0f);
    }

    // Initial states: empty, or with a head's sink, whose weight is 1 and whose value is 0.
    void init_softmax(int first_head) {
        for (int i = 0; i < count_ * group_; i++)
            states_[i] = shape_.sinks
                             ? Softmax{f32x16{1.0f}, shape_.sinks[first_head + i % group_] * LOG2_E}
                             : Softmax{f32x16{}, NEVER};
    }

    HeadRows rows_of(const Piece& piece, int kv_head) const {
        const Span& span = *piece.span;
        const auto part = [&](Part which) {
            return PagedRows(pool_, shape_, kv_head, which, span.table);
        };
        return HeadRows{part(KEYS), part(VALUES), span.context + span.count};
    }

    // Where the first tile begins that is visible to a piece.
    int first_tile(const Piece& piece) const {
        const int oldest = std::max(0, oldest_key(piece.span->context + piece.first));
        return oldest / TILE_KEYS * TILE_KEYS;
    }

    // The first key that is visible to a position; negative if its window is longer than its sequence.
    int oldest_key(int position) const {
        if (!shape_.window) return 0;
        return shape_.chunked ? position / shape_.window * shape_.window : position - shape_.window + 1;
    }

    // The first position to which a key and all before it are not visible.
    int end_of(int key) const {
        return shape_.chunked ? (key / shape_.window + 1) * shape_.window : key + shape_.window;
    }

    void visit_tiles(const Piece& piece, int kv_head, const Piece& next, int next_head) {
        const HeadRows rows = rows_of(piece, kv_head), rows_next = rows_of(next, next_head);
        const int end = first_ + count_;
        const bool packed = count_ * group_ > UNPACKED_QUERIES;
        for (int key = first_tile(piece); key < end; key += TILE_KEYS) {
            if (key + TILE_KEYS < end)
                tile_.begin(rows, key, rows, key + TILE_KEYS);
            else
                tile_.begin(rows, key, rows_next, first_tile(next));
            if (packed) tile_.pack();
            // Skips queries to which no key of the tile is visible.
            const int from = std::max(first_, key);
            const int to = shape_.window ? std::min(end, end_of(key + TILE_KEYS - 1)) : end;
            const int begin = (from - first_) * group_, last = (to - first_) * group_;
            if (packed)
                in_parts<TILE_ROWS>(begin, last, [&](auto rows, int query) {
                    this->template visit<rows(), true>(query, key);
                });
            else
                in_parts<UNPACKED_QUERIES>(begin, last, [&](auto rows, int query) {
                    this->template visit<rows(), false>(query, key);
                });
        }
    }

    // Adds a tile's keys to ROWS queries.
    template <int ROWS, bool PACKED>
    void visit(int query, int key) {
        alignas(64) TileScores scores[ROWS];
        alignas(64) Factor weights[ROWS][TILE_KEYS];
        float corrections[LANES];
        Visible visible[ROWS];
        for (int i = 0; i < ROWS; i++) {
            const int position = first_ + (query + i) / group_;
            visible[i] = Visible{shape_.window ? oldest_key(position) - key : 0, position - key};
        }
        const Factor* queries = queries_ + query * size_;
        float* sums = sums_ + query * size_;
        if constexpr (PACKED)
            accumulate<ROWS>(queries, size_, tile_.keys, TILE_KEYS, nullptr, scores[0]);
        else
            tile_.score(queries, scores);
        softmax(scores, cap_, visible, tile_, states_ + query, corrections, weights);
        if constexpr (PACKED)
            accumulate<ROWS>(weights[0], TILE_KEYS, tile_.values, size_, corrections, sums);
        else
            tile_.add_values(weights, corrections, sums);
    }

    // to [ROWS][columns] = to * each row's correction (null: 0) + rows of a, `depth` elements each, times
    // columns of b.
    template <int ROWS>
    static void accumulate(const Factor* a, int depth, const Factor* b, int columns,
                           const float* corrections, float* to) {
        in_parts<tile_vectors(ROWS)>(0, columns / LANES, [&](auto vectors, int first) {
            add_columns<ROWS, vectors()>(a, depth, b + first * LANES * GROUP, columns, corrections,
                                         to + first * LANES);
        });
    }

    template <int ROWS, int VECTORS>
#ifndef __AVX512F__
    [[gnu::noinline]]  // because the compiler would keep fewer sums in registers
#endif
    static void add_columns(const Factor* a, int depth, const Factor* b, int columns,
                            const float* corrections, float* to) {
        f32x16 sums[ROWS][VECTORS] = {};
        for (int i = 0; corrections && i < ROWS; i++)
            for (int j = 0; j < VECTORS; j++)
                sums[i][j] = load<f32x16>(to + i * columns + j * LANES) * corrections[i];
        multiply(a, depth, b, columns * GROUP, depth / GROUP, sums);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < VECTORS; j++) store(to + i * columns + j * LANES, sums[i][j]);
    }

    void write_results(Activation* out, size_t stride) {
        for (int query = 0; query < count_ * group_; query++) {
            const float* sums = sums_ + query * size_;
            Activation* to = out + query / group_ * stride + query % group_ * size_;
            const float total = sum(states_[query].total);
            // A weight of 0 times an unseen value may turn -0 into 0; adding 0 makes both 0.
            for (int i = 0; i < size_; i += LANES)
                store_floats(to + i, load_floats(sums + i) / total + 0.0f);
        }
    }

    const AttentionShape& shape_;
    const Pool& pool_;
    const int group_, size_;
    const float cap_;
    int first_, count_;  // positions of the piece's rows
    // The queries that share a KV head, and their partial results.
    alignas(64) Factor queries_[MAX_QUERIES * MAX_HEAD_SIZE];
    alignas(64) float sums_[MAX_QUERIES * MAX_HEAD_SIZE];  // of weighted values
    Softmax states_[MAX_QUERIES];
    KeyTile tile_;
};

}  // namespace

void attend(Team& team, const Activation* qkv, const Span* spans, int num_spans,
            const AttentionShape& shape, const Pool& pool, Activation* out) {
    const int group = shape.heads / pool.kv_heads;
    const int heads_per_piece = num_spans < SPANS_PER_THREAD * team.threads() ? 1 : pool.kv_heads;
    Pieces pieces(spans, num_spans, std::max(1, QUERIES_AT_ONCE / group), pool.kv_heads, heads_per_piece);
    Pieces upcoming = pieces;
    PieceAttention attention(shape, pool);
    team.share(pieces.count(), [&](int i) {
        // The next piece of this thread, if all threads advance at the same rate.
        const Piece next = upcoming.at(std::min(i + team.threads(), pieces.count() - 1));
        attention.run(pieces.at(i), next, qkv, out);
    });
}

extern "C" void baton_attend(int threads, const Activation* qkv, const Span* spans, int num_spans,
                             const AttentionShape* shape, const Pool* pool, Activation* out) {
    with_team(threads, [&](Team& team) { attend(team, qkv, spans, num_spans, *shape, *pool, out); });
}

}  // namespace baton
