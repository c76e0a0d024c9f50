// One step of a model: rows in, logits out, KV written to the pool.
//
// Computes what `DecoderModel` in baton/engine/models/decoder.py does, its reference, in one call a step,
// so that nothing is dispatched or allocated between its hundreds of operations.
#include <vector>

#include "kernels.h"
#include "ranks.h"

namespace baton {

struct Expert {
    Linear gate_up, down;
};

struct Layer {
    Norm input_norm, mlp_norm, attention_norm, output_norm;  // the latter two: of outputs before they are added
    Linear qkv, o, gate_up, down, router, shared_gate;
    const float* correction;  // [num_experts], see `route`; or null
    int64_t* expert_tokens;   // [num_experts], counts of rows that took each expert
    const Expert* experts;   // this rank's, or null; gate_up and down are then the shared expert's, or
                             // null
    AttentionShape attention;
    Lora qkv_lora, o_lora, gate_up_lora, down_lora;
};

struct Model {
    Embedding embedding;
    Norm final_norm;
    const Layer* layers;
    Linear lm_head;  // of this rank's tokens
    Ranks ranks;
    int32_t vocab_size, num_layers, hidden, heads, kv_heads, head_size;
    int32_t num_experts, first_expert, own_experts;  // of the layers with experts
    RoutingOptions routing;
    Gate activation;
    float eps, logit_scale, logit_cap, embedding_scale, residual_scale;
};

struct Step {
    const int32_t* token_ids;     // [rows]
    const int32_t* context_lens;  // [sequences]
    const int32_t* query_lens;    // [sequences]
    const int32_t* block_tables;  // [sequences][width]
    const int32_t* logit_rows;    // [num_logits]
    const int32_t* lora_slots;    // [rows], or null: no row has an adapter
    float* logits;                // [num_logits][vocab_size], on rank 0
    float* own_logits;            // with several ranks, [num_logits][this rank's tokens]
    Activation* hidden;           // [num_logits][model.hidden], or null
    void* workspace;              // `baton_workspace` bytes
    Pool pool;
    int32_t rows, sequences, width, num_logits;
};

namespace {

constexpr size_t ALIGNMENT = 64;

// Hands out memory of a step piece by piece.
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
    Activation *hidden, *normed, *output, *qkv, *attended, *gate_up, *inner;
    Activation *gathered, *expert_outputs;  // of experts
    float *squares, *scores, *shared_gate, *lora;
    Routing routing;
    void* scratch;

    Buffers(Workspace& space, const Model& model, size_t rows) {
        const size_t q_size = size_t(model.heads) * model.head_size;
        hidden = space.take<Activation>(rows * model.hidden);
        normed = space.take<Activation>(rows * model.hidden);
        output = space.take<Activation>(rows * model.hidden);
        qkv = space.take<Activation>(rows * (q_size + 2 * size_t(model.kv_heads) * model.head_size));
        attended = space.take<Activation>(rows * q_size);
        squares = space.take<float>(2 * rows);
        size_t scratch_size = linear_scratch(model.lm_head, int(rows)), inner_size = 0, lora_size = 0;
        const auto fit = [&](const Linear& weights) {
            scratch_size = std::max(scratch_size, linear_scratch(weights, int(rows)));
        };
        const auto fit_mlp = [&](const Linear& up, const Linear& down) {
            fit(up), fit(down);
            inner_size = std::max(inner_size, size_t(down.in));
        };
        for (int i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            fit(layer.qkv), fit(layer.o), fit(layer.router), fit(layer.shared_gate);
            fit_mlp(layer.gate_up, layer.down);
            for (int j = 0; layer.experts && j < model.own_experts; j++)
                fit_mlp(layer.experts[j].gate_up, layer.experts[j].down);
            for (const Lora& one : {layer.qkv_lora, layer.o_lora, layer.gate_up_lora, layer.down_lora})
                lora_size = std::max(lora_size, size_t(one.sections) * one.max_rank);
        }
        gate_up = space.take<Activation>(rows * 2 * inner_size);
        inner = space.take<Activation>(rows * inner_size);
        scratch = space.take<char>(scratch_size);
        lora = space.take<float>(rows * lora_size);
        const size_t slots = rows * model.routing.per_token;
        gathered = space.take<Activation>(slots * model.hidden);
        expert_outputs = space.take<Activation>(slots * model.hidden);
        scores = space.take<float>(rows * model.num_experts);
        shared_gate = space.take<float>(rows);
        routing = {space.take<float>(slots), space.take<int32_t>(slots), space.take<int32_t>(slots),
                   space.take<int32_t>(model.num_experts + 1), model.first_expert,
                   model.first_expert + model.own_experts};
    }
};

// The rows of each sequence.
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

// A span for each row whose logits are wanted, after `move_wanted`.
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

// Moves the rows whose logits are wanted to the front. They are ascending, so none is overwritten.
void move_wanted(const Step& step, int size, Activation* rows) {
    for (int i = 0; i < step.num_logits; i++)
        if (step.logit_rows[i] != i)
            std::memcpy(rows + size_t(i) * size, rows + size_t(step.logit_rows[i]) * size,
                        size * sizeof(Activation));
}

// The adapter of each row whose logits are wanted, after `move_wanted`.
std::vector<int32_t> wanted_lora_slots(const Step& step) {
    std::vector<int32_t> wanted;
    for (int i = 0; step.lora_slots && i < step.num_logits; i++)
        wanted.push_back(step.lora_slots[step.logit_rows[i]]);
    return wanted;
}

// One thread's part of a step.
struct Forward {
    Team& team;
    const Model& model;
    const Step& step;
    const Buffers& at;
    Exchanges exchanges;

    // Adds an output to the residual stream; returns the norm of the stream, or itself without a norm.
    const Activation* norm(const Activation* added, Norm norm, int rows) {
        add_rms_norm(team, at.hidden, added, model.residual_scale, norm, model.eps, rows,
                     model.hidden, at.normed);
        return norm.weight ? at.normed : at.hidden;
    }

    // Norms an output before it is added, if the model has a norm there.
    void norm_output(Norm norm, int rows) {
        if (norm.weight)
            add_rms_norm(team, at.output, nullptr, 1.0f, norm, model.eps, rows, model.hidden,
                         at.output);
    }

    template <class Output>
    void product(const Activation* x, int rows, const Linear& weights, Output* y) {
        linear(team, x, rows, weights, y, at.scratch);
    }

    // The product with what the rows' adapters add to it.
    void product(const Activation* x, int rows, const int32_t* slots, const Linear& weights,
                 const Lora& lora, Activation* y) {
        product(x, rows, weights, y);
        if (slots && lora.a) add_lora(team, x, rows, slots, lora, y, at.lora);
    }

    void mlp(const Activation* x, int rows, const Linear& up, const Linear& down, Activation* y,
             const int32_t* slots = nullptr, const Lora& up_lora = {}, const Lora& down_lora = {}) {
        product(x, rows, slots, up, up_lora, at.gate_up);
        act_mul(team, at.gate_up, rows, down.in, model.activation, at.inner);
        product(at.inner, rows, slots, down, down_lora, y);
    }

    void moe(const Layer& layer, const Activation* x, int rows) {
        const Routing& routing = at.routing;
        product(x, rows, layer.router, at.scores);
        route(team, at.scores, rows, model.num_experts, model.routing, layer.correction, routing);
        if (team.thread == 0)
            for (int i = 0; i < model.num_experts; i++)
                layer.expert_tokens[i] += routing.first[i + 1] - routing.first[i];
        gather(team, x, rows, model.routing.per_token, model.hidden, routing, at.gathered);
        for (int i = routing.own_begin; i < routing.own_end; i++) {
            const int first = routing.first[i], count = routing.first[i + 1] - first;
            const size_t begin = size_t(first) * model.hidden;
            const Expert& expert = layer.experts[i - routing.own_begin];
            if (count)
                mlp(at.gathered + begin, count, expert.gate_up, expert.down, at.expert_outputs + begin);
        }
        const bool gated = layer.shared_gate.packed, shared = layer.gate_up.packed;
        if (gated) product(x, rows, layer.shared_gate, at.shared_gate);
        if (shared) mlp(x, rows, layer.gate_up, layer.down, at.output);
        mix(team, at.expert_outputs, rows, model.routing.per_token, model.hidden, routing, shared,
            gated ? at.shared_gate : nullptr, at.output);
    }

    // A layer up to where all its K and V are in the pool.
    void store_keys(int index, const std::vector<Span>& spans) {
        const Layer& layer = model.layers[index];
        const Activation* x = norm(index ? at.output : nullptr, layer.input_norm, step.rows);
        product(x, step.rows, step.lora_slots, layer.qkv, layer.qkv_lora, at.qkv);
        const AttentionShape& shape = layer.attention;
        float* squares = model.ranks.exchange && shape.row_norms ? at.squares : nullptr;
        if (squares) {
            mean_squares(team, at.qkv, step.rows, shape, step.pool, model.ranks.count, squares);
            exchanges.all_reduce(squares, size_t(step.rows) * 2);
        }
        rotate_and_store(team, at.qkv, spans.data(), int(spans.size()), shape, step.pool, squares);
    }

    // The rest of the layer: attention and MLP, whose output is left in `output`.
    void attend_and_mlp(int index, int rows, const int32_t* slots, const std::vector<Span>& spans) {
        const Layer& layer = model.layers[index];
        attend(team, at.qkv, spans.data(), int(spans.size()), layer.attention, step.pool, at.attended);
        product(at.attended, rows, slots, layer.o, layer.o_lora, at.output);
        exchanges.all_reduce(at.output, size_t(rows) * model.hidden);
        norm_output(layer.attention_norm, rows);
        const Activation* x = norm(at.output, layer.mlp_norm, rows);
        if (layer.experts)
            moe(layer, x, rows);
        else
            mlp(x, rows, layer.gate_up, layer.down, at.output, slots, layer.gate_up_lora,
                layer.down_lora);
        exchanges.all_reduce(at.output, size_t(rows) * model.hidden);
        norm_output(layer.output_norm, rows);
    }

    void run(const std::vector<Span>& spans, const std::vector<Span>& wanted,
             const std::vector<int32_t>& wanted_slots) {
        const int last = model.num_layers - 1;
        embed(team, model.embedding, step.token_ids, step.rows, model.hidden,
              model.embedding_scale, at.hidden);
        exchanges.all_reduce(at.hidden, size_t(step.rows) * model.hidden);
        for (int i = 0; i < last; i++) {
            store_keys(i, spans);
            attend_and_mlp(i, step.rows, step.lora_slots, spans);
        }
        // In the last layer, rows without logits only write their K and V.
        store_keys(last, spans);
        if (!step.num_logits) return exchanges.finish();
        if (team.thread == 0) {
            move_wanted(step, model.hidden, at.hidden);
            move_wanted(step, (model.heads + 2 * model.kv_heads) * model.head_size, at.qkv);
        }
        team.barrier();
        const int32_t* slots = step.lora_slots ? wanted_slots.data() : nullptr;
        attend_and_mlp(last, step.num_logits, slots, wanted);
        const Activation* x = norm(at.output, model.final_norm, step.num_logits);
        if (step.hidden && team.thread == 0)
            std::memcpy(step.hidden, x, size_t(step.num_logits) * model.hidden * sizeof(Activation));
        float* logits = model.ranks.exchange ? step.own_logits : step.logits;
        product(x, step.num_logits, model.lm_head, logits);
        if (model.logit_scale != 1.0f || model.logit_cap != 0.0f)
            scale_logits(team, logits, step.num_logits, model.lm_head.out, model.logit_scale,
                         model.logit_cap);
        if (model.ranks.exchange)
            exchanges.gather(logits, step.num_logits, model.vocab_size, step.logits);
    }
};

}  // namespace

extern "C" {
// Returns false if another rank failed; the results are then invalid.
bool baton_step(int threads, const Model* model, const Step* step) {
    Workspace space{uintptr_t(step->workspace)};
    const Buffers at(space, *model, step->rows);
    const std::vector<Span> spans = spans_of(*step), wanted = wanted_spans(*step, spans);
    const std::vector<int32_t> wanted_slots = wanted_lora_slots(*step);
    with_team(threads,
              [&](Team& team) {
                  Forward{team, *model, *step, at, Exchanges(team, model->ranks)}.run(spans, wanted,
                                                                                      wanted_slots);
              });
    return !model->ranks.exchange || !model->ranks.exchange->aborted.load();
}

// Bytes of `Step::workspace` for `rows` rows.
size_t baton_workspace(const Model* model, int rows) {
    Workspace space{0};
    Buffers(space, *model, rows);
    return space.next + ALIGNMENT;
}
}

}  // namespace baton
