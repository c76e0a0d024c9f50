// The operations of a step: products, what happens to rows one by one, rotation, attention.
// All are called by the whole team, and return when their results are complete.
#pragma once

#include "simd.h"
#include "team.h"

namespace baton {

// y = x @ weight.T + bias. Mirrored by a ctypes structure in Python.
struct Linear {
    const void* packed;      // [panels][groups][PANEL][GROUP]; depth and columns padded with zeros
    const float* scales;     // int8 weights: [out], of each output; otherwise null
    const int32_t* offsets;  // int8 weights: [out], 128 times the sum of an output's weights
    const Activation* bias;  // [out], or null
    int32_t in, out;
};

constexpr int PANEL = 64;  // columns packed side by side

// Bytes of scratch that `linear` needs for int8 weights; 0 for others.
size_t linear_scratch(const Linear& weights, int rows);

// x [rows][in] -> y [rows][out] of Output (Activation or float). Rows do not influence each other's
// bits.
template <class Output>
void linear(Team& team, const Activation* x, int rows, const Linear& weights, Output* y,
            void* scratch);

// hidden[row] = table[token_ids[row]], rows of `size` elements.
void embed(Team& team, const Activation* table, const int32_t* token_ids, int rows, int size,
           Activation* hidden);

// hidden += added (unless null); out = hidden scaled to unit mean square, times weight.
void add_rms_norm(Team& team, Activation* hidden, const Activation* added, const Activation* weight,
                  float eps, int rows, int size, Activation* out);

// out = silu(gate) * up, of gate_up [rows][2 * size], gate first.
void silu_mul(Team& team, const Activation* gate_up, int rows, int size, Activation* out);

constexpr int MAX_HEAD_SIZE = 256;
constexpr int MAX_QUERIES = 128;  // query heads that share a KV head

// The pool [blocks][layers][2][kv_heads][block_size][row], K at 0 and V at 1. A row is head_size
// elements of the compute type, or head_size int8 followed by their float scale.
struct Pool {
    void* data;
    int32_t layers, kv_heads;
    int32_t block_size, head_size;  // multiples of 16, the latter at most MAX_HEAD_SIZE
    int32_t int8;                   // 1: rows are int8 with a scale
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
    int32_t heads, layer;
    int32_t window;                     // tokens a row sees, its own included; 0: all
    float scale, eps;                   // of scores; of q_norm and k_norm
    const float *cos, *sin;             // [max_context][head_size]
    const Activation *q_norm, *k_norm;  // [head_size], or null
};

// qkv [rows][(heads + 2 * kv_heads) * head_size]: normalises and turns q in place, and writes k
// (normalised, turned) and v to the pool.
void rotate_and_store(Team& team, Activation* qkv, const Span* spans, int num_spans,
                      const AttentionShape& shape, const Pool& pool);

// Attention of each row over its sequence's KV in the pool -> out [rows][heads * head_size]. A row's
// bits depend on its own query and its sequence's KV alone, not on what shares its span or batch.
void attend(Team& team, const Activation* qkv, const Span* spans, int num_spans,
            const AttentionShape& shape, const Pool& pool, Activation* out);

}  // namespace baton
