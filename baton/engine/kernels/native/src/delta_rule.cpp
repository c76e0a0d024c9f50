// Linear attention by the gated delta rule. Computes what kernels/torch/delta_rule.py does, its reference.
#include <cmath>
#include <vector>

#include "kernels.h"

namespace baton {
namespace {

constexpr int TOKENS = MAX_PROPOSED;  // between which a tile of a matrix stays in the core's cache
constexpr int TILE_VECTORS = 4;   // columns of a tile, in vectors
constexpr float L2_EPS = 1e-6f;

inline f32x16 rounded(f32x16 value) {
    if constexpr (std::is_same_v<Activation, bf16>) return widen_bf16(round_bf16(value));
    return value;
}

inline float rounded(float value) {
    const f32x16 all = rounded(splat(value));
    return all[0];
}

// One key head of one sequence: its rows of the batch, and the rows of its state.
class HeadRun {
   public:
    HeadRun(const DeltaRule& rule)
        : rule_(rule),
          group_(rule.values_per_key),
          keys_(rule.key_size),
          values_(rule.value_size),
          channels_(2 * keys_ + group_ * values_),
          width_(channels_ + group_ * values_),
          matrix_rows_(group_ * keys_),
          rows_(matrix_rows_ + parts((rule.kernel - 1) * channels_, values_)),
          inner_(size_t(TOKENS) * channels_),
          out_(size_t(TOKENS) * group_ * values_),
          tile_(size_t(keys_) * TILE_VECTORS) {}

    void run(const Activation* mixed, const Activation* gates, const Span& span, int head,
             Activation* out) {
        locate(span, head);
        if (!span.context)
            for (float* row : rows_) std::memset(row, 0, values_ * sizeof(float));
        mixed_stride_ = size_t(rule_.key_heads) * width_;
        mixed_ = mixed + span.first_row * mixed_stride_ + size_t(head) * width_;
        int count;
        for (int first = 0; first < span.count; first += count) {
            keeps_ = first < span.kept;
            count = std::min(TOKENS, (keeps_ ? span.kept : span.count) - first);
            convolve(head, first, count);
            for (int i = 0; i < group_; i++) {
                const int value_head = head * group_ + i;
                open_gates(gates, span.first_row + first, count, head, i);
                in_parts<TILE_VECTORS>(0, values_ / LANES, [&](auto vectors, int at) {
                    advance<vectors()>(i, at * LANES, count);
                });
                write(value_head, i, first, count,
                      out + (span.first_row + first) * size_t(rule_.key_heads) * group_ * values_);
            }
        }
        keep_inputs(span.kept);
    }

   private:
    void locate(const Span& span, int head) {
        const int of_kv_head = rule_.key_heads / rule_.kv_heads, kv_head = head / of_kv_head;
        int row = (rule_.layer * of_kv_head + head % of_kv_head) * int(rows_.size());
        for (float*& at : rows_) {
            const int chunk = row / rule_.chunk_rows;
            const size_t block = span.table[chunk / rule_.block_chunks];
            const size_t first = block * rule_.block_chunks + chunk % rule_.block_chunks;
            at = (float*)(rule_.pool + (first * rule_.kv_heads + kv_head) * rule_.chunk_bytes) +
                 row % rule_.chunk_rows * values_;
            row++;
        }
    }

    // A place among the inputs that the state keeps; adjacent ones up to a multiple of LANES.
    float* kept(int input, int channel) const {
        const int at = input * channels_ + channel;
        return rows_[matrix_rows_ + at / values_] + at % values_;
    }

    // The input of a token of the sequence's rows, or before them.
    f32x16 input(int token, int channel) const {
        if (token >= 0) return load_floats(mixed_ + token * mixed_stride_ + channel);
        return load<f32x16>(kept(rule_.kernel - 1 + token, channel));
    }

    // Query, key and values of each token, by silu of the convolution; the first two of unit length.
    void convolve(int head, int first, int count) {
        const float* weights = rule_.conv + size_t(head) * rule_.kernel * channels_;
        for (int token = 0; token < count; token++) {
            float* to = inner_.data() + size_t(token) * channels_;
            for (int c = 0; c < channels_; c += LANES) {
                f32x16 total{};
                for (int i = 0; i < rule_.kernel; i++)
                    total = multiply_add(input(first + token - rule_.kernel + 1 + i, c),
                                         load<f32x16>(weights + size_t(i) * channels_ + c), total);
                total = rounded(total);
                store(to + c, rounded(total * sigmoid(total)));
            }
            scale_to_unit(to, 1.0f / std::sqrt(float(keys_)));
            scale_to_unit(to + keys_, 1.0f);
        }
    }

    void scale_to_unit(float* vector, float length) const {
        f32x16 squares{};
        for (int i = 0; i < keys_; i += LANES) {
            const f32x16 value = load<f32x16>(vector + i);
            squares = multiply_add(value, value, squares);
        }
        const float factor = length / std::sqrt(sum(squares) + L2_EPS);
        for (int i = 0; i < keys_; i += LANES)
            store(vector + i, load<f32x16>(vector + i) * factor);
    }

    // beta_ and decay_ of each token for value head i of the key head.
    void open_gates(const Activation* gates, int row, int count, int head, int i) {
        const int value_head = head * group_ + i;
        const auto number = [&](int token, int part) {
            const size_t at = (size_t(row + token) * rule_.key_heads + head) * 2 + part;
            return load_floats(gates + at * group_ + i, 1)[0];
        };
        for (int token = 0; token < count; token++) {
            beta_[token] = rounded(1.0f / (1.0f + std::exp(-number(token, 0))));
            const float x = number(token, 1) + rule_.decay_bias[value_head];
            const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
            decay_[token] = std::exp(rule_.decay[value_head] * softplus);
        }
    }

    // Advances some columns of the matrix of value head i by the tokens, and reads it with their queries.
    template <int VECTORS>
    void advance(int i, int column, int count) {
        float* const* rows = rows_.data() + i * keys_;
        f32x16* tile = tile_.data();
        for (int k = 0; k < keys_; k++)
            for (int j = 0; j < VECTORS; j++)
                tile[k * VECTORS + j] = load<f32x16>(rows[k] + column + j * LANES);
        for (int token = 0; token < count; token++) {
            const float* query = inner_.data() + size_t(token) * channels_;
            const float* key = query + keys_;
            const float* value = key + keys_ + i * values_ + column;
            f32x16 read[VECTORS] = {}, out[VECTORS] = {};
            for (int k = 0; k < keys_; k++)
                for (int j = 0; j < VECTORS; j++)
                    read[j] = multiply_add(splat(key[k]), tile[k * VECTORS + j], read[j]);
            const float decay = decay_[token];
            for (int j = 0; j < VECTORS; j++)
                read[j] = (load<f32x16>(value + j * LANES) - read[j] * decay) * beta_[token];
            for (int k = 0; k < keys_; k++)
                for (int j = 0; j < VECTORS; j++) {
                    f32x16& at = tile[k * VECTORS + j];
                    at = multiply_add(splat(key[k]), read[j], at * decay);
                    out[j] = multiply_add(splat(query[k]), at, out[j]);
                }
            for (int j = 0; j < VECTORS; j++)
                store(out_.data() + size_t(token) * values_ + column + j * LANES, out[j]);
        }
        for (int k = 0; keeps_ && k < keys_; k++)
            for (int j = 0; j < VECTORS; j++)
                store(rows[k] + column + j * LANES, tile[k * VECTORS + j]);
    }

    // The outputs of value head i, normed, times silu of their gates.
    void write(int value_head, int i, int first, int count, Activation* out) {
        for (int token = 0; token < count; token++) {
            const float* from = out_.data() + size_t(token) * values_;
            const Activation* gate =
                mixed_ + (first + token) * mixed_stride_ + channels_ + i * values_;
            Activation* to =
                out + (size_t(token) * rule_.key_heads * group_ + value_head) * values_;
            f32x16 squares{};
            for (int c = 0; c < values_; c += LANES) {
                const f32x16 value = rounded(load<f32x16>(from + c));
                squares = multiply_add(value, value, squares);
            }
            const float factor = 1.0f / std::sqrt(sum(squares) / float(values_) + rule_.eps);
            for (int c = 0; c < values_; c += LANES) {
                const f32x16 unit = rounded(rounded(load<f32x16>(from + c)) * factor);
                const f32x16 normed = rounded(unit * rounded(load<f32x16>(rule_.scale + c)));
                const f32x16 open = load_floats(gate + c);
                store_floats(to + c, normed * (open * sigmoid(open)));
            }
        }
    }

    // Keeps the last inputs of the convolution. Those kept before are read ahead of where it writes.
    void keep_inputs(int count) {
        for (int i = 0; i < rule_.kernel - 1; i++)
            for (int c = 0; c < channels_; c += LANES)
                store(kept(i, c), input(count - rule_.kernel + 1 + i, c));
    }

    const DeltaRule& rule_;
    const int group_, keys_, values_;
    const int channels_;  // of the convolution
    const int width_;     // of a key head's mixed inputs: channels, then output gates
    const int matrix_rows_;
    std::vector<float*> rows_;   // of the state
    std::vector<float> inner_;   // [TOKENS][channels]
    std::vector<float> out_;     // [TOKENS][value_size], of one value head
    std::vector<f32x16> tile_;   // [key_size][vectors]
    float beta_[TOKENS], decay_[TOKENS];
    const Activation* mixed_ = nullptr;
    size_t mixed_stride_ = 0;
    bool keeps_ = true;  // whether the state keeps the current tokens
};

}  // namespace

void delta_rule(Team& team, const Activation* mixed, const Activation* gates, const Span* spans,
                int num_spans, const DeltaRule& rule, Activation* out) {
    HeadRun head_run(rule);
    team.share(num_spans * rule.key_heads, [&](int i) {
        const Span& span = spans[num_spans - 1 - i / rule.key_heads];  // the longest come last
        head_run.run(mixed, gates, span, i % rule.key_heads, out);
    });
}

extern "C" void baton_delta_rule(int threads, const Activation* mixed, const Activation* gates,
                                 const Span* spans, int num_spans, const DeltaRule* rule,
                                 Activation* out) {
    with_team(threads,
              [&](Team& team) { delta_rule(team, mixed, gates, spans, num_spans, *rule, out); });
}

}  // namespace baton
