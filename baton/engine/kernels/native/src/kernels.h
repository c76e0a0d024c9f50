// The operations of a step: products, norms and gates, rotary embedding, MoE, attention.
// All threads of a team call them, and they return when the results are complete. Structures are
// mirrored in baton/engine/kernels/native/interface.py, field for field.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace baton {

// The formats of group-scaled weights, in the order of GROUP_FORMATS in packing.py.
enum GroupFormat : int32_t { INT4, FP8, MXFP4, BITS4, BITS6, BITS8 };

// y = x @ weight.T + bias.
struct Linear {
    const void* packed;      // [panels][groups][PANEL][GROUP]; depth and columns padded with zeros
    const void* scales;      // int8: float [out]; group-scaled: [panels][in / group][PANEL]; otherwise null
    const int32_t* offsets;  // int8: [out], 128 times the sum of an output's weights
    const void* minimums;    // group-scaled: as `scales`, added to all values of a group, or null
    const float *units, *minimum_units;  // [panels][in / block][PANEL]: scales and minimums are int8, and
                                         // multiplied by these; or null: they are floats
    const int32_t* order;    // int4: [in], the input at each place in the depth, or null
    const Activation* bias;  // [out], also of `next`, or null
    const Linear* next;      // the weight whose outputs follow, with the same inputs, or null
    int32_t in, out;
    int32_t group;       // inputs that share a scale, a multiple of 16; 0: not group-scaled
    GroupFormat format;  // of group-scaled weights
    int32_t block;       // inputs that share a unit
    int32_t offset;      // from BITS4 on: what is subtracted from the unsigned numbers
};

constexpr int PANEL = 64;  // columns packed side by side

// Bytes of scratch memory that `linear` needs.
size_t linear_scratch(const Linear& weights, int rows);

// x [rows][in] -> y [rows][out] of Output (Activation or float). A row's bits do not depend on others.
template <class Output>
void linear(Team& team, const Activation* x, int rows, const Linear& weights, Output* y,
            void* scratch);

// Rows of results: floats or activations, `stride` apart, of which a weight's outputs begin at `first`.
struct Results {
    void* rows;
    bool floats;
    int stride, first;
};

// `linear_scratch` and `linear` for group-scaled weights.
size_t group_scaled_scratch(const Linear& weights, int rows);
void group_scaled_linear(Team& team, const Activation* x, int rows, const Linear& weights, Results y,
                    void* scratch);

// The same for the formats of GGUF, from BITS4 on.
size_t gguf_scratch(const Linear& weights, int rows);
void gguf_linear(Team& team, const Activation* x, int rows, const Linear& weights, Results y,
                 void* scratch);

// A norm's weight, or null. A wide one is of floats: rows are rounded only after multiplying with it.
struct Norm {
    const void* weight;
    int32_t wide;
};

// The embeddings [count][size] of tokens [first, first + count).
struct Embedding {
    const Activation* table;
    int32_t first, count;
};

// hidden[row] = table[token_ids[row] - first] * scale, rows of `size` elements; zeros for tokens outside
// the table.
void embed(Team& team, const Embedding& embedding, const int32_t* token_ids, int rows, int size,
           float scale, Activation* hidden);

// hidden += added * scale, unless added is null; out = RMS norm of hidden, unless the norm is null. out
// may be hidden.
void add_rms_norm(Team& team, Activation* hidden, const Activation* added, float scale, Norm norm,
                  float eps, int rows, int size, Activation* out);

// What LoRA adapters add to a product; as LoraMatrices in kernels/torch/lora.py.
struct Lora {
    const Activation* a;   // [slots][sections * max_rank][in], or null: adapters do not change this product
    const Activation* b;   // [slots][max_rank][out]
    const int32_t* ranks;  // [slots]
    int32_t in, out, max_rank, sections;
    int32_t ends[3];
};

// y [rows][out] += x [rows][in] @ a.T @ b of the slot of each row; none where it is negative. scratch:
// [rows][sections * max_rank]. A row's bits do not depend on others.
void add_lora(Team& team, const Activation* x, int rows, const int32_t* slots, const Lora& lora,
              Activation* y, float* scratch);

// Activation functions of the gate, in the order of kernels/activation.py.
enum Gate : int32_t { SILU, GELU_TANH, SWIGLU_OAI };

// out = activation(gate) * up, of gate_up [rows][2 * size], gate first; SWIGLU_OAI clamps both, and adds
// one to up.
void act_mul(Team& team, const Activation* gate_up, int rows, int size, Gate kind, Activation* out);

// logits [rows][size] *= scale, then cap * tanh(logit / cap) unless the cap is 0.
void scale_logits(Team& team, float* logits, int rows, int size, float scale, float cap);

// The experts of each row. A slot is one expert of one row.
struct Routing {
    float* shares;               // [rows][per_token]
    int32_t* taken;              // [rows][per_token], experts
    int32_t* place;              // [rows][per_token], index of the slot in the order of experts
    int32_t* first;              // [experts + 1], first place of each expert
    int32_t own_begin, own_end;  // this rank's experts

    bool is_own(int at) const { return at >= first[own_begin] && at < first[own_end]; }
};

// See baton/engine/kernels/moe_routing.py.
struct RoutingOptions {
    int32_t per_token, normed, sigmoid, groups, taken_groups, group_top;
    float scale;
};

// The experts that rows take by the router's logits [rows][experts], and their shares. correction:
// [experts], or null; added to scores to select experts.
void route(Team& team, const float* logits, int rows, int experts, const RoutingOptions& options,
           const float* correction, const Routing& to);

// x [rows][size] -> to [places][size], for slots of this rank's experts.
void gather(Team& team, const Activation* x, int rows, int per_token, int size,
            const Routing& routing, Activation* to);

// out [rows][size] = sum over a row's slots of own experts of outputs [places][size] times shares; if
// shared, plus out, with a gate [rows] times its sigmoid. Added in the row's own order.
void mix(Team& team, const Activation* outputs, int rows, int per_token, int size,
         const Routing& routing, bool shared, const float* gate, Activation* out);

constexpr int MAX_HEAD_SIZE = 640;
constexpr int MAX_QUERIES = 128;  // query heads that share a KV head

// The KV pool [blocks][layers][2][all_heads][head], K at 0 and V at 1, of which the heads
// [first_head, first_head + kv_heads) are used. A head of a block is [block_size][head_size] elements of
// the compute type, or of int8 followed by float scales [block_size].
//
// Where layers have heads of several sizes, `layers` and `all_heads` are those of this size, of which
// `shared_by` layers have their K and V, [all_heads][shared_by][block_size][head_size], in each K or V of
// the largest size.
//
// A latent pool is [blocks][layers][block_size][head_size]: its rows are K and V of all query heads, of
// which there are kv_heads groups.
struct Pool {
    void* data;
    int32_t layers, all_heads, first_head, kv_heads;
    int32_t block_size, head_size;  // multiples of 16, the latter at most MAX_HEAD_SIZE
    int32_t int8;                   // 1: rows are int8 and have scales
    int32_t groups;                 // of layers: a block table has an entry of each in turn
    int32_t latent;                 // 1: rows are K and V of all query heads
    int32_t shared_by;              // layers of these heads in the place of one; even, or at most 1
};

constexpr int MAX_PROPOSED = 64;  // tokens that are proposed for a sequence with a state

// Rows of one sequence: [first_row, first_row + count) of the batch, at positions
// [context, context + count).
struct Span {
    int32_t first_row;
    int32_t count;
    int32_t context;
    const int32_t* table;  // its blocks, one of each group of layers in turn
    int32_t kept;          // rows that a state keeps; at most MAX_PROPOSED follow
};

struct AttentionShape {
    int32_t heads, layer;
    int32_t window;          // most tokens that a row attends to, its own included; 0: all
    float scale, cap, eps;   // scale and softcap (or 0) of scores; eps of q_norm and k_norm
    const float *cos, *sin;  // [max_context][head_size]
    Norm q_norm, k_norm;     // over each head, or over all heads of a row
    int32_t row_norms;       // 1: over all heads of a row
    const float* sinks;      // [heads], a further score of each softmax with a value of 0; or null
    int32_t group;           // `layer` is the index in this group
    int32_t norms_rotated;   // 1: q_norm and k_norm are of rotated heads
    int32_t chunked;         // 1: the window of a position begins at a multiple of its length
    int32_t only_reads;      // 1: qkv has queries alone, and K and V are those of another layer
};

// qkv [rows][(heads + 2 * kv_heads) * head_size] -> out [rows][2], mean squares of q and k divided by the
// number of ranks, whose sum over ranks is that of all heads.
void mean_squares(Team& team, const Activation* qkv, int rows, const AttentionShape& shape,
                  const Pool& pool, int ranks, float* out);

// qkv as above: norms and rotates q in place, and writes k (normed, rotated) and v to the pool.
// mean_squares [rows][2]: of q and k, where they are normed over all ranks' heads; else null.
void rotate_and_store(Team& team, Activation* qkv, const Span* spans, int num_spans,
                      const AttentionShape& shape, const Pool& pool, const float* mean_squares);

// Attention of each row over its sequence's KV in the pool; with a latent one, qkv is
// [rows][heads * head_size]. -> out [rows][heads * head_size]. A row's
// bits depend on its own query and its sequence's KV alone, not on what shares its span or batch.
void attend(Team& team, const Activation* qkv, const Span* spans, int num_spans,
            const AttentionShape& shape, const Pool& pool, Activation* out);

// The gated delta rule of a layer; heads, rows and chunks as in kernels/delta_rule.py.
struct DeltaRule {
    const float* conv;                // [key_heads][kernel][channels of a key head]
    const float *decay, *decay_bias;  // [value heads]
    const float* scale;               // [value_size]
    char* pool;                       // [blocks][block_chunks][kv_heads][chunk_bytes]
    int32_t key_heads, values_per_key, key_size, value_size, kernel;  // sizes are multiples of 16
    int32_t layer, kv_heads, chunk_rows, block_chunks, chunk_bytes;
    float eps;
};

// Advances the states of spans, whose tables are those of states, by their kept rows: mixed [rows][key_heads]
// [query, key, values, output gates], gates [rows][key_heads][2][values_per_key] -> out [rows][value heads]
// [value_size]. A row's bits depend on its own sequence alone, not on how it is divided into spans.
void delta_rule(Team& team, const Activation* mixed, const Activation* gates, const Span* spans,
                int num_spans, const DeltaRule& rule, Activation* out);

// Adjacent positions of one block, from a multiple of RUN on.
constexpr int RUN = 16;

enum Part { KEYS, VALUES };

// The K or V rows of one sequence, layer and KV head.
struct PagedRows {
    const int32_t* table;  // from the layer's group on
    int groups, block_size;
    size_t stride;  // bytes from a row to the next one of its block
    size_t block_bytes;
    char* begin;

    PagedRows(const Pool& pool, const AttentionShape& shape, int kv_head, Part part,
              const int32_t* table)
        : table(table + shape.group),
          groups(pool.groups),
          block_size(pool.block_size),
          stride(pool.head_size * (pool.int8 ? sizeof(int8_t) : sizeof(Activation))) {
        const size_t head_bytes = (stride + (pool.int8 ? sizeof(float) : 0)) * block_size;
        block_bytes = head_bytes * pool.all_heads * (pool.latent ? 1 : 2) * pool.layers;
        begin = (char*)pool.data + index_of(pool, shape.layer, kv_head, part) * head_bytes;
    }

    // The row of a position that the table has a block for.
    char* at(int position) const { return block_of(position) + position % block_size * stride; }

    // The scale of a position's int8 row; those of its block's next positions follow.
    float* scale_at(int position) const {
        return (float*)(block_of(position) + block_size * stride) + position % block_size;
    }

   private:
    // The index of a head's rows among those of a block.
    static size_t index_of(const Pool& pool, int layer, int kv_head, Part part) {
        const int head = pool.first_head + kv_head, layers = pool.shared_by / 2;
        if (pool.latent) return layer;
        if (pool.shared_by < 2) return (size_t(layer) * 2 + part) * pool.all_heads + head;
        return (size_t(layer / layers) * pool.all_heads + head) * pool.shared_by + layer % layers * 2 + part;
    }

    char* block_of(int position) const {
        return begin + size_t(table[position / block_size * groups]) * block_bytes;
    }
};

// Rows [first, first + count) of a span, for some KV heads.
struct Piece {
    const Span* span;
    int first;
    int count;
    int first_head, kv_heads;
};

// Divides all spans' rows into pieces of at most `rows` rows and `heads_per_piece` KV heads. The last
// rows come first, because in causal attention they take longest. A cursor: indices must not decrease.
class Pieces {
   public:
    Pieces(const Span* spans, int num_spans, int rows, int kv_heads, int heads_per_piece)
        : spans_(spans),
          rows_(rows),
          heads_per_piece_(heads_per_piece),
          times_(kv_heads / heads_per_piece),
          span_(num_spans) {
        for (int i = 0; i < num_spans; i++) total_ += pieces_of(spans[i]);
    }

    int count() const { return total_ * times_; }

    Piece at(int index) {
        while (index >= end_) {
            span_--;
            begin_ = end_;
            end_ += pieces_of(spans_[span_]) * times_;
        }
        const Span& span = spans_[span_];
        const int from_end = (index - begin_) / times_;
        const int first = (pieces_of(span) - 1 - from_end) * rows_;
        const int first_head = (index - begin_) % times_ * heads_per_piece_;
        return Piece{&span, first, std::min(rows_, span.count - first), first_head, heads_per_piece_};
    }

   private:
    int pieces_of(const Span& span) const { return parts(span.count, rows_); }

    const Span* spans_;
    const int rows_, heads_per_piece_, times_;
    int span_, total_ = 0;
    int begin_ = 0, end_ = 0;  // indices of the current span's pieces
};

}  // namespace baton
