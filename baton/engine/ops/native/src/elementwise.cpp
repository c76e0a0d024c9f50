#include "kernels.h"

#include <cmath>

namespace baton {
namespace {

inline f32x16 rounded(f32x16 value, const float*) { return value; }

inline f32x16 rounded(f32x16 value, const bf16*) { return widen_bf16(round_bf16(value)); }

// 1 / (1 + e^-x), by the power of the negative magnitude alone, which cannot overflow.
inline f32x16 sigmoid(f32x16 x) {
    const f32x16 power = power_of_two((x < 0 ? x : -x) * LOG2_E);
    return (x < 0 ? power : splat(1.0f)) / (power + 1.0f);
}

}  // namespace

void embed(Team& team, const Activation* table, const int32_t* token_ids, int rows, int size,
           Activation* hidden) {
    team.share(rows, [&](int row) {
        std::memcpy(hidden + size_t(row) * size, table + size_t(token_ids[row]) * size,
                    size * sizeof(Activation));
    });
}

void add_rms_norm(Team& team, Activation* hidden, const Activation* added, const Activation* weight,
                  float eps, int rows, int size, Activation* out) {
    team.share(rows, [&](int row) {
        const size_t begin = size_t(row) * size;
        f32x16 squares{};
        for (int i = 0; i < size; i += LANES) {
            f32x16 value = load_floats(hidden + begin + i, size - i);
            if (added) {
                value = rounded(value + load_floats(added + begin + i, size - i), hidden);
                store_floats(hidden + begin + i, value, size - i);
            }
            squares += value * value;
        }
        const float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
        for (int i = 0; i < size; i += LANES) {
            const f32x16 unit = rounded(load_floats(hidden + begin + i, size - i) * factor, hidden);
            store_floats(out + begin + i, unit * load_floats(weight + i, size - i), size - i);
        }
    });
}

void silu_mul(Team& team, const Activation* gate_up, int rows, int size, Activation* out) {
    team.share(rows, [&](int row) {
        const Activation* gate = gate_up + size_t(row) * 2 * size;
        const Activation* up = gate + size;
        for (int i = 0; i < size; i += LANES) {
            const f32x16 x = load_floats(gate + i, size - i);
            const f32x16 silu = rounded(x * sigmoid(x), out);
            store_floats(out + size_t(row) * size + i, silu * load_floats(up + i, size - i), size - i);
        }
    });
}

extern "C" {
void baton_add_rms_norm(int threads, Activation* hidden, const Activation* added,
                        const Activation* weight, float eps, int rows, int size, Activation* out) {
    with_team(threads,
              [&](Team& team) { add_rms_norm(team, hidden, added, weight, eps, rows, size, out); });
}

void baton_silu_mul(int threads, const Activation* gate_up, int rows, int size, Activation* out) {
    with_team(threads, [&](Team& team) { silu_mul(team, gate_up, rows, size, out); });
}
}

}  // namespace baton
