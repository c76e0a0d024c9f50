// Steps of small models with made-up weights through the kernels: prints all scores, as `%a` does.
//
// Compiled for another kind of CPU and run in an emulator, it shows what that CPU would compute.
#include "forward.cpp"

#include <cmath>
#include <cstdio>
#include <deque>

using namespace baton;

namespace {

enum class Form { DENSE, INT8, INT4, Q4_K, Q6_K };
constexpr int HIDDEN = 128, HEADS = 6, KV_HEADS = 2, HEAD = 32, INNER = 192, VOCAB = 201;
constexpr int LAYERS = 2, CONTEXT = 256, BLOCK = 16, WIDTH = 10, EXPERTS = 5;
std::deque<std::vector<char>> kept;
uint64_t state = 42;

uint32_t random_bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
}

float random_number() { return int(random_bits() % 20001) / 10000.0f - 1.0f; }

template <class Element>
Element* room(size_t count) {
    kept.emplace_back(count * sizeof(Element) + 64);
    return (Element*)((uintptr_t(kept.back().data()) + 63) / 64 * 64);
}

Activation* activations(size_t count, float mean, float scale) {
    auto* made = room<Activation>(count);
    for (size_t i = 0; i < count; i++) {
        const float value = mean + scale * random_number();
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits &= 0xffff0000;  // a bf16
        std::memcpy(made + i, (char*)&bits + 4 - sizeof(Activation), sizeof(Activation));
    }
    return made;
}

float* scales(size_t count, float largest) {
    auto* made = room<float>(count);
    for (size_t i = 0; i < count; i++) made[i] = largest * (1.0f + random_bits() % 100 / 100.0f) / 2;
    return made;
}

Linear weight(int in, int out, Form form, bool bias = false) {
    Linear made{};
    made.in = in, made.out = out;
    const size_t columns = (out + PANEL - 1) / PANEL * PANEL;
    const float wide = 2.0f / std::sqrt(float(in));
    if (bias) made.bias = activations(out, 0, 1);
    if (form == Form::DENSE) {
        made.packed = activations(columns * in, 0, wide);
    } else if (form == Form::INT8) {
        auto* values = room<int8_t>(columns * in);
        auto* offsets = room<int32_t>(columns);
        std::fill(offsets, offsets + columns, 0);
        for (size_t i = 0; i < columns * in; i++) {
            values[i] = int8_t(random_bits() % 255 - 127);
            offsets[i / (PANEL * in) * PANEL + i / 4 % PANEL] += 128 * values[i];
        }
        made.packed = values, made.offsets = offsets, made.scales = scales(columns, wide / 127);
    } else if (form == Form::Q4_K || form == Form::Q6_K) {
        const int bits = form == Form::Q4_K ? 4 : 6;
        auto* words = room<uint32_t>(columns * in * bits / 32);
        for (size_t i = 0; i < columns * in * bits / 32; i++) words[i] = random_bits() ^ random_bits() << 16;
        made.packed = words, made.format = bits == 4 ? BITS4 : BITS6;
        made.group = bits == 4 ? 32 : 16, made.block = 64, made.offset = bits == 4 ? 0 : 32;
        const auto bytes = [&](int lowest) {
            auto* numbers = room<int8_t>(columns * in / made.group);
            for (size_t i = 0; i < columns * in / made.group; i++)
                numbers[i] = int8_t(lowest + int(random_bits() % 64));
            return numbers;
        };
        made.scales = bytes(0), made.units = scales(columns * in / made.block, wide / (1 << bits) / 32);
        if (bits == 4)
            made.minimums = bytes(-64), made.minimum_units = scales(columns * in / made.block, wide / 64);
    } else {
        auto* words = room<uint32_t>(columns * in / 8);
        for (size_t i = 0; i < columns * in / 8; i++) words[i] = random_bits() ^ random_bits() << 16;
        made.group = 32;
        auto* minimums = room<float>(columns * in / made.group);
        for (size_t i = 0; i < columns * in / made.group; i++) minimums[i] = (int(random_bits() % 16) - 8) * wide / 8;
        made.packed = words, made.minimums = minimums;
        made.scales = scales(columns * in / made.group, wide / 8);
    }
    return made;
}

Norm norm(int size) { return {activations(size, 1, 0.3f), 0}; }

Layer layer(Form form, int index, int window, float cap, const float* tables, bool experts) {
    Layer made{};
    made.input_norm = norm(HIDDEN), made.mlp_norm = norm(HIDDEN);
    made.qkv = weight(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD, form, true);
    made.o = weight(HEADS * HEAD, HIDDEN, form);
    made.attention = {HEADS, index, window, 0.2f, cap, 1e-6f, tables, tables + CONTEXT * HEAD,
                      norm(HEAD), norm(HEAD), 0, nullptr, 0, 0, 0, 0};
    if (experts) {
        auto* each = room<Expert>(EXPERTS);
        for (int i = 0; i < EXPERTS; i++)
            each[i] = {weight(HIDDEN, 2 * INNER, form), weight(INNER, HIDDEN, form)};
        made.experts = each, made.router = weight(HIDDEN, EXPERTS, Form::DENSE);
        made.expert_tokens = room<int64_t>(EXPERTS);
    } else {
        made.gate_up = weight(HIDDEN, 2 * INNER, form), made.down = weight(INNER, HIDDEN, form);
    }
    return made;
}

void run(Form form, bool int8_kv, float cap, bool experts) {
    auto* tables = room<float>(2 * CONTEXT * HEAD);
    for (int i = 0; i < CONTEXT * HEAD; i++) {
        const double turn = i / HEAD * std::pow(1e4, -2.0 * (i % (HEAD / 2)) / HEAD);
        tables[i] = float(std::cos(turn)), tables[CONTEXT * HEAD + i] = float(std::sin(turn));
    }
    const Layer layers[LAYERS] = {layer(form, 0, 0, cap, tables, experts),
                                  layer(form, 1, 20, cap, tables, experts)};
    Model model{};
    model.embedding = {activations(VOCAB * HIDDEN, 0, 1), 0, VOCAB}, model.vocab_size = VOCAB;
    model.final_norm = norm(HIDDEN), model.layers = layers;
    model.lm_head = weight(HIDDEN, VOCAB, form), model.num_layers = LAYERS, model.hidden = HIDDEN;
    model.heads = HEADS, model.kv_heads = KV_HEADS, model.head_size = HEAD;
    model.num_experts = experts ? EXPERTS : 0, model.own_experts = model.num_experts;
    model.routing.per_token = 2, model.routing.normed = 1, model.routing.scale = 1;
    model.activation = cap != 0 ? GELU_TANH : SILU, model.eps = 1e-6f;
    model.logit_scale = model.embedding_scale = model.residual_scale = 1;

    const size_t row = int8_kv ? HEAD + sizeof(float) : HEAD * sizeof(Activation);
    const size_t pool_size = 2 * WIDTH * LAYERS * 2 * KV_HEADS * BLOCK * row;
    char* pool = room<char>(pool_size);
    std::fill(pool, pool + pool_size, 0);
    int32_t block_tables[2 * WIDTH], context_lens[2] = {};
    for (int i = 0; i < WIDTH; i++) block_tables[i] = i * 7 % 10, block_tables[WIDTH + i] = 19 - i;
    const int32_t steps[][2] = {{70, 5}, {1, 33}, {1, 1}, {3, 17}};
    for (const auto& query_lens : steps) {
        const int rows = query_lens[0] + query_lens[1];
        std::vector<int32_t> token_ids(rows), logit_rows{query_lens[0] - 1, rows - 1};
        for (auto& id : token_ids) id = random_bits() % VOCAB;
        float logits[2 * VOCAB];
        const Step step{token_ids.data(), context_lens, query_lens, block_tables, logit_rows.data(),
                        nullptr, logits, nullptr, nullptr, room<char>(baton_workspace(&model, rows)),
                        {pool, LAYERS, KV_HEADS, 0, KV_HEADS, BLOCK, HEAD, int8_kv, 1, 0, 1}, rows, 2,
                        WIDTH, 2};
        baton_step(2, &model, &step);
        for (float score : logits) std::printf("%a\n", score);
        for (int i = 0; i < 2; i++) context_lens[i] += query_lens[i];
    }
}

}  // namespace

int main() {
    run(Form::DENSE, false, 0, false);
    run(Form::DENSE, false, 5, true);
    run(Form::INT8, true, 0, false);
    run(Form::INT4, true, 0, false);
    run(Form::Q4_K, false, 0, false);
    run(Form::Q6_K, false, 0, true);
}
