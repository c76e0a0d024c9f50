// One step of a Llama-family model: rows in, next-token scores out, KV written to the pool.
//
// The same computation as `Model` in baton/engine/models/decoder.py, its reference; one call a step,
// so that nothing is dispatched or allocated between two of its hundreds of operations.
#include <chrono>
#include <vector>

#include "kernels.h"

namespace baton {

// The structures are mirrored in baton/engine/ops/native/model.py.

struct Layer {
    const Activation *input_norm, *post_norm;
    const Activation *q_norm, *k_norm;  // or null
    Linear qkv, o, gate_up, down;
    int32_t window;  // tokens a row sees; 0: all
};

struct Model {
    const Activation* embedding;  // [vocab][hidden]
    const Activation* final_norm;
    const float *cos, *sin;  // [max_context][head_size]
    const Layer* layers;
    Linear lm_head;
    int32_t num_layers, hidden, heads, kv_heads, head_size, inner;
    float eps, attention_scale;
};

enum Phase { NORMS, QKV, ROTATION, ATTENTION, O, GATE_UP, SILU, DOWN, LOGITS, PHASES };

struct Step {
    const int32_t* token_ids;     // [rows]
    const int32_t* context_lens;  // [sequences]
    const int32_t* query_lens;    // [sequences]
    const int32_t* block_tables;  // [sequences][width]
    const int32_t* logit_rows;    // [num_logits]
    float* logits;                // [num_logits][vocab]
    void* workspace;              // `baton_workspace` bytes
    double* seconds;              // [PHASES], added to; or null
    Pool pool;
    int32_t rows, sequences, width, num_logits;
};

namespace {

constexpr size_t ALIGNMENT = 64;

// Memory for what lives during a step, handed out piece by piece.
struct Workspace {
    uintptr_t next;

    template <class Element>
    Element* take(size_t count) {
        next = (next + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        Element* result = (Element*)next;
        next += count * sizeof(Element);
        return result;
    }
};

struct Buffers {
    Activation *hidden, *normed, *branch, *qkv, *mixed, *gate_up, *inner;
    void* scratch;

    Buffers(Workspace& space, const Model& model, size_t rows) {
        const size_t q_size = size_t(model.heads) * model.head_size;
        hidden = space.take<Activation>(rows * model.hidden);
        normed = space.take<Activation>(rows * model.hidden);
        branch = space.take<Activation>(rows * model.hidden);
        qkv = space.take<Activation>(rows * (q_size + 2 * size_t(model.kv_heads) * model.head_size));
        mixed = space.take<Activation>(rows * q_size);
        gate_up = space.take<Activation>(rows * 2 * model.inner);
        inner = space.take<Activation>(rows * model.inner);
        size_t scratch_size = linear_scratch(model.lm_head, int(rows));
        for (int i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            for (const Linear* weights : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
                scratch_size = std::max(scratch_size, linear_scratch(*weights, int(rows)));
        }
        scratch = space.take<char>(scratch_size);
    }
};

// Where a step's time goes, seen by one of its threads.
struct Clock {
    double* seconds;  // null where none are wanted
    std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();

    void lap(Phase phase) {
        if (!seconds) return;
        const auto now = std::chrono::steady_clock::now();
        seconds[phase] += std::chrono::duration<double>(now - last).count();
        last = now;
    }
};

// Each sequence's rows.
std::vector<Span> spans_of(const Step& step) {
    std::vector<Span> spans(step.sequences);
    int32_t row = 0;
    for (int i = 0; i < step.sequences; i++) {
        const int32_t* table = step.block_tables + size_t(i) * step.width;
        spans[i] = Span{row, step.query_lens[i], step.context_lens[i], table};
        row += step.query_lens[i];
    }
    return spans;
}

// The rows whose scores are wanted, once they have been moved to the front: one span each.
std::vector<Span> wanted_spans(const Step& step, const std::vector<Span>& spans) {
    std::vector<Span> wanted(step.num_logits);
    size_t at = 0;
    for (int i = 0; i < step.num_logits; i++) {
        const int32_t row = step.logit_rows[i];
        while (row >= spans[at].first_row + spans[at].count) at++;
        wanted[i] = Span{i, 1, spans[at].context + row - spans[at].first_row, spans[at].table};
    }
    return wanted;
}

// Moves the wanted rows to the front; they are ascending, so none is overwritten before.
void keep_wanted(const Step& step, int size, Activation* rows) {
    for (int i = 0; i < step.num_logits; i++)
        if (step.logit_rows[i] != i)
            std::memcpy(rows + size_t(i) * size, rows + size_t(step.logit_rows[i]) * size,
                        size * sizeof(Activation));
}

// One thread's way through a step.
struct Forward {
    Team& team;
    const Model& model;
    const Step& step;
    const Buffers& at;
    Clock clock;

    void norm(const Activation* added, const Activation* weight, int rows) {
        add_rms_norm(team, at.hidden, added, weight, model.eps, rows, model.hidden, at.normed);
        clock.lap(NORMS);
    }

    template <class Output>
    void product(Phase phase, const Activation* x, int rows, const Linear& weights, Output* y) {
        linear(team, x, rows, weights, y, at.scratch);
        clock.lap(phase);
    }

    AttentionShape shape(int index) const {
        const Layer& layer = model.layers[index];
        return {model.heads, index,     layer.window, model.attention_scale, model.eps,
                model.cos,   model.sin, layer.q_norm, layer.k_norm};
    }

    // A layer up to the point where all its K and V are in the pool.
    void store_keys(int index, const std::vector<Span>& spans) {
        const Layer& layer = model.layers[index];
        norm(index ? at.branch : nullptr, layer.input_norm, step.rows);
        product(QKV, at.normed, step.rows, layer.qkv, at.qkv);
        rotate_and_store(team, at.qkv, spans.data(), int(spans.size()), shape(index), step.pool);
        clock.lap(ROTATION);
    }

    // The rest of the layer: attention and MLP. What they add last is left in `branch`.
    void attend_and_mix(int index, int rows, const std::vector<Span>& spans) {
        const Layer& layer = model.layers[index];
        attend(team, at.qkv, spans.data(), int(spans.size()), shape(index), step.pool, at.mixed);
        clock.lap(ATTENTION);
        product(O, at.mixed, rows, layer.o, at.branch);
        norm(at.branch, layer.post_norm, rows);
        product(GATE_UP, at.normed, rows, layer.gate_up, at.gate_up);
        silu_mul(team, at.gate_up, rows, model.inner, at.inner);
        clock.lap(SILU);
        product(DOWN, at.inner, rows, layer.down, at.branch);
    }

    void run(const std::vector<Span>& spans, const std::vector<Span>& wanted) {
        const int last = model.num_layers - 1;
        embed(team, model.embedding, step.token_ids, step.rows, model.hidden, at.hidden);
        for (int i = 0; i < last; i++) {
            store_keys(i, spans);
            attend_and_mix(i, step.rows, spans);
        }
        // Of the last layer, rows without scores only have to leave their K and V.
        store_keys(last, spans);
        if (!step.num_logits) return;
        if (team.thread == 0) {
            keep_wanted(step, model.hidden, at.hidden);
            keep_wanted(step, (model.heads + 2 * model.kv_heads) * model.head_size, at.qkv);
        }
        team.barrier();
        attend_and_mix(last, step.num_logits, wanted);
        norm(at.branch, model.final_norm, step.num_logits);
        product(LOGITS, at.normed, step.num_logits, model.lm_head, step.logits);
    }
};

}  // namespace

extern "C" {
void baton_step(int threads, const Model* model, const Step* step) {
    Workspace space{uintptr_t(step->workspace)};
    const Buffers at(space, *model, step->rows);
    const std::vector<Span> spans = spans_of(*step), wanted = wanted_spans(*step, spans);
    with_team(threads, [&](Team& team) {
        double* seconds = team.thread == 0 ? step->seconds : nullptr;
        Forward{team, *model, *step, at, Clock{seconds}}.run(spans, wanted);
    });
}

// Bytes of `Step::workspace` for so many rows.
size_t baton_workspace(const Model* model, int rows) {
    Workspace space{0};
    Buffers(space, *model, rows);
    return space.next + ALIGNMENT;
}
}

}  // namespace baton
