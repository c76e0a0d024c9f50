// Rotary embedding, and the writing of K and V to the pool.
#include <cmath>

#include "kernels.h"
#include "paged.h"

namespace baton {
namespace {

constexpr int ROWS_AT_ONCE = 16;

// Scales a head to unit mean square, times weight; rounds where `rms_norm` of decoder.py does.
void normalise(Activation* head, const Activation* weight, float eps, int size) {
    f32x16 squares{};
    for (int i = 0; i < size; i += LANES) {
        const f32x16 value = load_floats(head + i);
        squares += value * value;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    for (int i = 0; i < size; i += LANES) {
        store_floats(head + i, load_floats(head + i) * factor);
        store_floats(head + i, load_floats(head + i) * load_floats(weight + i));
    }
}

// Turns each pair (d, d + size / 2) of a head by its angle.
void turn(Activation* head, const float* cos, const float* sin, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i += LANES) {
        const int count = std::min(LANES, half - i);
        const auto take = [&](const auto* from) { return load_floats(from + i, count); };
        const f32x16 first = take(head), second = take(head + half);
        store_floats(head + i, first * take(cos) - second * take(sin), count);
        store_floats(head + half + i, second * take(cos + half) + first * take(sin + half), count);
    }
}

// A head as int8, and behind it the float that one unit stands for.
void quantise(const Activation* head, int size, char* row) {
    const float peak = largest_magnitude(head, size);
    const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f, scale = peak / 127.0f;
    for (int i = 0; i < size; i += LANES) {
        const i32x16 units = round_whole(load_floats(head + i) * inverse);
        store(row + i, __builtin_convertvector(units, i8x16));
    }
    std::memcpy(row + size, &scale, sizeof scale);
}

void store_head(const Activation* head, const Pool& pool, char* row) {
    if (pool.int8)
        quantise(head, pool.head_size, row);
    else
        std::memcpy(row, head, pool.head_size * sizeof(Activation));
}

// One row of the batch: `heads` [q of all heads, k, v], at a position of the sequence of `table`.
void rotate_row(Activation* heads, int position, const int32_t* table, const AttentionShape& shape,
                const Pool& pool) {
    const int size = pool.head_size, turned = shape.heads + pool.kv_heads;
    const float* cos = shape.cos + size_t(position) * size;
    const float* sin = shape.sin + size_t(position) * size;
    for (int i = 0; i < turned; i++) {
        const Activation* weight = i < shape.heads ? shape.q_norm : shape.k_norm;
        if (weight) normalise(heads + i * size, weight, shape.eps, size);
        turn(heads + i * size, cos, sin, size);
    }
    const Activation* kv[] = {heads + shape.heads * size, heads + turned * size};
    for (int i = 0; i < pool.kv_heads; i++)
        for (Part part : {KEYS, VALUES}) {
            char* row = PagedRows(pool, shape.layer, i, part, table).at(position);
            store_head(kv[part] + i * size, pool, row);
        }
}

}  // namespace

void rotate_and_store(Team& team, Activation* qkv, const Span* spans, int num_spans,
                      const AttentionShape& shape, const Pool& pool) {
    const size_t stride = size_t(shape.heads + 2 * pool.kv_heads) * pool.head_size;
    Pieces pieces(spans, num_spans, ROWS_AT_ONCE, 1);
    team.share(pieces.count(), [&](int i) {
        const Piece piece = pieces.at(i);
        const Span& span = *piece.span;
        for (int row = piece.first; row < piece.first + piece.count; row++)
            rotate_row(qkv + (span.first_row + row) * stride, span.context + row, span.table, shape,
                       pool);
    });
}

extern "C" void baton_rotate(int threads, Activation* qkv, const Span* spans, int num_spans,
                             const AttentionShape* shape, const Pool* pool) {
    with_team(threads, [&](Team& team) {
        rotate_and_store(team, qkv, spans, num_spans, *shape, *pool);
    });
}

}  // namespace baton
