// Rotary embedding, the paged KV cache and attention over it.
#pragma once

#include "simd.h"
#include "team.h"

namespace baton {

constexpr int MAX_HEAD_SIZE = 256;
constexpr int MAX_QUERIES = 128;  // query heads that share a KV head

// The pool [blocks][layers][2][kv_heads][block_size][row], K at 0 and V at 1. A row is head_size
// elements of the compute type, or head_size int8 followed by their float scale.
struct Pool {
    void* data;
    int32_t layers;
    int32_t kv_heads;
    int32_t block_size;  // a multiple of 16
    int32_t head_size;   // a multiple of 16, at most MAX_HEAD_SIZE
    int32_t int8;        // 1: rows are int8 with a scale
};

// Rows of one sequence: [first_row, first_row + count) of the batch, at positions
// [context, context + count).
struct Span {
    int32_t first_row;
    int32_t count;
    int32_t context;
    const int32_t* table;  // its blocks
};

struct AttentionShape {
    int32_t heads;
    int32_t layer;
    int32_t window;        // tokens a row sees, its own included; 0: all
    float scale;
    float eps;             // of q_norm and k_norm
    const float* cos;      // [max_context][head_size]
    const float* sin;
    const void* q_norm;    // [head_size] of Element, or null
    const void* k_norm;
};

// qkv [rows][(heads + 2 * kv_heads) * head_size]: normalises and turns q in place, and writes k
// (normalised, turned) and v to the pool. Called by the whole team.
template <class Element>
void rotate_and_store(Team& team, Element* qkv, const Span* spans, int num_spans,
                      const AttentionShape& shape, const Pool& pool);

// Attention of each row over its sequence's KV in the pool -> out [rows][heads * head_size].
// Called by the whole team. A row's bits depend on its own query and its sequence's KV alone, not
// on how many rows share its span, batch or chunk.
template <class Element>
void attend(Team& team, const Element* qkv, const Span* spans, int num_spans,
            const AttentionShape& shape, const Pool& pool, Element* out);

}  // namespace baton
