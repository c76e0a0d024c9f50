// Operations on rows: embedding, norms, the gate, rotary embedding and writing K and V.
#include <cmath>

#include "kernels.h"

namespace baton {
namespace {

constexpr int ROWS_AT_ONCE = 16;

inline f32x16 rounded(f32x16 value, const float*) { return value; }

inline f32x16 rounded(f32x16 value, const bf16*) { return widen_bf16(round_bf16(value)); }

// RMS norm of a row, rounded where `rms_norm` of kernels/torch/rms_norm.py rounds.
inline void normalise(const Activation* row, f32x16 squares, Norm norm, float eps, int size,
                      Activation* out) {
    const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
    const auto weigh = [&](const auto* weight, const auto* like) {
        for (int i = 0; i < size; i += LANES) {
            const f32x16 unit = rounded(load_floats(row + i, size - i) * factor, like);
            store_floats(out + i, unit * load_floats(weight + i, size - i), size - i);
        }
    };
    if (norm.wide)
        weigh((const float*)norm.weight, (const float*)nullptr);
    else
        weigh((const Activation*)norm.weight, row);
}

// Rotates each pair (d, d + size / 2) of a head by its angle.
void rotate(Activation* head, const float* cos, const float* sin, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i += LANES) {
        const int count = std::min(LANES, half - i);
        const auto take = [&](const auto* from) { return load_floats(from + i, count); };
        const f32x16 first = take(head), second = take(head + half);
        store_floats(head + i, first * take(cos) - second * take(sin), count);
        store_floats(head + half + i, second * take(cos + half) + first * take(sin + half), count);
    }
}

// Quantises a head to int8; *scale is the value of one unit.
void quantise(const Activation* head, int size, char* row, float* scale) {
    const Units units(head, size);
    for (int i = 0; i < size; i += LANES)
        store(row + i, round_bytes(load_floats(head + i) * units.inverse, 0));
    *scale = units.scale;
}

f32x16 squares_of(const Activation* x, int size) {
    f32x16 squares{};
    for (int i = 0; i < size; i += LANES) {
        const f32x16 value = load_floats(x + i);
        squares += value * value;
    }
    return squares;
}

// Norms queries or keys of a row in place, over each head or over all heads. mean_square: over all
// ranks' heads, or null.
void norm_heads(Activation* heads, int count, int size, Norm norm, const AttentionShape& shape,
                const float* mean_square) {
    if (!norm.weight) return;
    const int width = shape.row_norms ? count * size : size;
    for (Activation* part = heads; part < heads + count * size; part += width) {
        const f32x16 squares =
            mean_square ? splat(*mean_square * float(width) / LANES) : squares_of(part, width);
        normalise(part, squares, norm, shape.eps, width, part);
    }
}

// Norms, rotates and stores one row, `heads` [q of all heads, k, v], at a position of its sequence.
void rotate_row(Activation* heads, int position, const int32_t* table, const AttentionShape& shape,
                const Pool& pool, const float* mean_squares) {
    const int size = pool.head_size, kv_heads = shape.only_reads ? 0 : pool.kv_heads;
    const int rotated = shape.heads + kv_heads;
    const float* cos = shape.cos + size_t(position) * size;
    const float* sin = shape.sin + size_t(position) * size;
    const auto normalise_heads = [&] {
        norm_heads(heads, shape.heads, size, shape.q_norm, shape, mean_squares);
        norm_heads(heads + shape.heads * size, kv_heads, size, shape.k_norm, shape,
                   mean_squares ? mean_squares + 1 : nullptr);
    };
    if (!shape.norms_rotated) normalise_heads();
    for (int i = 0; i < rotated; i++) rotate(heads + i * size, cos, sin, size);
    if (shape.norms_rotated) normalise_heads();
    const Activation* kv[] = {heads + shape.heads * size, heads + rotated * size};
    for (int i = 0; i < kv_heads; i++)
        for (Part part : {KEYS, VALUES}) {
            const PagedRows rows(pool, shape, i, part, table);
            const Activation* head = kv[part] + i * size;
            if (pool.int8)
                quantise(head, size, rows.at(position), rows.scale_at(position));
            else
                std::memcpy(rows.at(position), head, size * sizeof(Activation));
        }
}

}  // namespace

void embed(Team& team, const Embedding& embedding, const int32_t* token_ids, int rows, int size,
           float scale, Activation* hidden) {
    team.share(rows, [&](int row) {
        const int token = token_ids[row] - embedding.first;
        const Activation* from = embedding.table + size_t(token) * size;
        Activation* to = hidden + size_t(row) * size;
        if (token < 0 || token >= embedding.count)
            std::memset(to, 0, size * sizeof(Activation));
        else if (scale == 1.0f)
            std::memcpy(to, from, size * sizeof(Activation));
        else
            for (int i = 0; i < size; i += LANES)
                store_floats(to + i, load_floats(from + i, size - i) * scale, size - i);
    });
}

void add_rms_norm(Team& team, Activation* hidden, const Activation* added, float scale, Norm norm,
                  float eps, int rows, int size, Activation* out) {
    team.share(rows, [&](int row) {
        const size_t begin = size_t(row) * size;
        f32x16 squares{};
        for (int i = 0; i < size; i += LANES) {
            f32x16 value = load_floats(hidden + begin + i, size - i);
            if (added) {
                f32x16 more = load_floats(added + begin + i, size - i);
                if (scale != 1.0f) more = rounded(more * scale, hidden);
                value = rounded(value + more, hidden);
                store_floats(hidden + begin + i, value, size - i);
            }
            squares += value * value;
        }
        if (norm.weight) normalise(hidden + begin, squares, norm, eps, size, out + begin);
    });
}

void act_mul(Team& team, const Activation* gate_up, int rows, int size, Gate kind, Activation* out) {
    constexpr float LIMIT = 7.0f, ALPHA = 1.702f;
    team.share(rows, [&](int row) {
        const Activation* gate = gate_up + size_t(row) * 2 * size;
        const Activation* up = gate + size;
        for (int i = 0; i < size; i += LANES) {
            f32x16 x = load_floats(gate + i, size - i), factor = load_floats(up + i, size - i);
            f32x16 slope = x;
            if (kind == GELU_TANH) {
                // (1 + tanh(y)) / 2 is the sigmoid of 2y, here of sqrt(2 / pi) * (x + 0.044715 * x^3).
                slope = x * (1.5957691216f + 0.0713548163f * x * x);
            } else if (kind == SWIGLU_OAI) {
                x = x > LIMIT ? splat(LIMIT) : x;
                factor = factor > LIMIT ? splat(LIMIT) : factor < -LIMIT ? splat(-LIMIT) : factor;
                factor += 1.0f;
                slope = x * ALPHA;
            }
            const f32x16 open = rounded(x * sigmoid(slope), out);
            store_floats(out + size_t(row) * size + i, open * factor, size - i);
        }
    });
}

void scale_logits(Team& team, float* logits, int rows, int size, float scale, float cap) {
    constexpr int PART = 4096;
    const size_t total = size_t(rows) * size;
    team.share(int((total + PART - 1) / PART), [&](int part) {
        const size_t end = std::min(total, size_t(part + 1) * PART);
        for (size_t i = size_t(part) * PART; i < end; i += LANES) {
            const int count = int(std::min(size_t(LANES), end - i));
            f32x16 value = load_floats(logits + i, count) * scale;
            if (cap != 0.0f) value = softcapped(value, cap);
            store_floats(logits + i, value, count);
        }
    });
}

void mean_squares(Team& team, const Activation* qkv, int rows, const AttentionShape& shape,
                  const Pool& pool, int ranks, float* out) {
    const int sizes[] = {shape.heads * pool.head_size, pool.kv_heads * pool.head_size};
    team.share(rows, [&](int row) {
        const Activation* x = qkv + size_t(row) * (sizes[0] + 2 * sizes[1]);
        out[2 * row] = sum(squares_of(x, sizes[0])) / float(sizes[0] * ranks);
        out[2 * row + 1] = sum(squares_of(x + sizes[0], sizes[1])) / float(sizes[1] * ranks);
    });
}

void rotate_and_store(Team& team, Activation* qkv, const Span* spans, int num_spans,
                      const AttentionShape& shape, const Pool& pool, const float* mean_squares) {
    const size_t stride = size_t(shape.heads + (shape.only_reads ? 0 : 2 * pool.kv_heads)) * pool.head_size;
    Pieces pieces(spans, num_spans, ROWS_AT_ONCE, 1, 1);
    team.share(pieces.count(), [&](int i) {
        const Piece piece = pieces.at(i);
        const Span& span = *piece.span;
        for (int at = piece.first; at < piece.first + piece.count; at++) {
            const int row = span.first_row + at;
            rotate_row(qkv + row * stride, span.context + at, span.table, shape, pool,
                       mean_squares ? mean_squares + 2 * row : nullptr);
        }
    });
}

extern "C" {
void baton_add_rms_norm(int threads, Activation* hidden, const Activation* added, const Norm* norm,
                        float eps, int rows, int size, Activation* out) {
    with_team(threads, [&](Team& team) {
        add_rms_norm(team, hidden, added, 1.0f, *norm, eps, rows, size, out);
    });
}

void baton_act_mul(int threads, const Activation* gate_up, int rows, int size, Gate kind,
                   Activation* out) {
    with_team(threads, [&](Team& team) { act_mul(team, gate_up, rows, size, kind, out); });
}

void baton_rotate(int threads, Activation* qkv, const Span* spans, int num_spans,
                  const AttentionShape* shape, const Pool* pool) {
    with_team(threads, [&](Team& team) {
        rotate_and_store(team, qkv, spans, num_spans, *shape, *pool, nullptr);
    });
}
}

}  // namespace baton
