// Where a sequence's KV lies in the pool, and how a step's rows are cut into pieces of work.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace baton {

// Positions next to each other in one block, from a multiple of RUN on.
constexpr int RUN = 16;

enum Part { KEYS, VALUES };

// The K or V rows of one sequence, layer and KV head.
struct PagedRows {
    const int32_t* table;
    int block_size;
    size_t stride;  // bytes from a row to the next one of its block
    size_t block_bytes;
    char* begin;

    PagedRows(const Pool& pool, int layer, int kv_head, Part part, const int32_t* table)
        : table(table),
          block_size(pool.block_size),
          stride(pool.int8 ? pool.head_size + sizeof(float) : pool.head_size * sizeof(Activation)) {
        const size_t head_bytes = stride * block_size;
        block_bytes = head_bytes * pool.kv_heads * 2 * pool.layers;
        const size_t head = (size_t(layer) * 2 + part) * pool.kv_heads + kv_head;
        begin = (char*)pool.data + head * head_bytes;
    }

    // The row of a position that the table has a block for.
    char* at(int position) const {
        const size_t block = table[position / block_size], offset = position % block_size;
        return begin + block * block_bytes + offset * stride;
    }
};

// Some rows of a span, [first, first + count) of its own rows.
struct Piece {
    const Span* span;
    int first;
    int count;
    int kv_head;
};

// All spans' rows in pieces of at most `rows`, each once for each KV head; the last rows come first,
// because in causal attention they take longest. A cursor: it may skip pieces, but not go back.
class Pieces {
   public:
    Pieces(const Span* spans, int num_spans, int rows, int kv_heads)
        : spans_(spans), rows_(rows), kv_heads_(kv_heads), span_(num_spans) {
        for (int i = 0; i < num_spans; i++) total_ += pieces_of(spans[i]);
    }

    int count() const { return total_ * kv_heads_; }

    Piece at(int index) {
        while (index >= end_) {
            span_--;
            begin_ = end_;
            end_ += pieces_of(spans_[span_]) * kv_heads_;
        }
        const Span& span = spans_[span_];
        const int from_end = (index - begin_) / kv_heads_;
        const int first = (pieces_of(span) - 1 - from_end) * rows_;
        return Piece{&span, first, std::min(rows_, span.count - first), (index - begin_) % kv_heads_};
    }

   private:
    int pieces_of(const Span& span) const { return parts(span.count, rows_); }

    const Span* spans_;
    const int rows_, kv_heads_;
    int span_, total_ = 0;
    int begin_ = 0, end_ = 0;  // indices of the current span's pieces
};

}  // namespace baton
