// Products of LoRA adapters. Computes what kernels/torch/lora.py does, its reference.
#include "kernels.h"

namespace baton {
namespace {

constexpr int RANKS_AT_ONCE = 8;
constexpr int COLUMNS = 512;  // of a piece of work

// to[i] = x . a[i] for `count` rows of a, at most RANKS_AT_ONCE.
void shrink(const Activation* x, const Activation* a, int count, int size, float* to) {
    f32x16 sums[RANKS_AT_ONCE] = {};
    for (int i = 0; i < size; i += LANES) {
        const f32x16 value = load_floats(x + i, size - i);
        for (int j = 0; j < count; j++)
            sums[j] = multiply_add(value, load_floats(a + size_t(j) * size + i, size - i), sums[j]);
    }
    for (int j = 0; j < count; j++) to[j] = sum(sums[j]);
}

// y += inner @ b for `columns` columns of b, whose rows are `stride` elements apart.
void expand(const float* inner, const Activation* b, int rank, size_t stride, int columns,
            Activation* y) {
    for (int i = 0; i < columns; i += LANES) {
        f32x16 total{};
        for (int j = 0; j < rank; j++)
            total = multiply_add(splat(inner[j]), load_floats(b + j * stride + i, columns - i), total);
        store_floats(y + i, load_floats(y + i, columns - i) + total, columns - i);
    }
}

}  // namespace

void add_lora(Team& team, const Activation* x, int rows, const int32_t* slots, const Lora& lora,
              Activation* y, float* scratch) {
    const int width = lora.sections * lora.max_rank;
    const int groups = parts(lora.max_rank, RANKS_AT_ONCE);
    team.share(rows * lora.sections * groups, [&](int i) {
        const int row = i / (lora.sections * groups), section = i / groups % lora.sections;
        const int first = i % groups * RANKS_AT_ONCE, slot = slots[row];
        const int count = slot < 0 ? 0 : std::min(lora.ranks[slot] - first, RANKS_AT_ONCE);
        if (count <= 0) return;
        const size_t at = size_t(section) * lora.max_rank + first;
        shrink(x + size_t(row) * lora.in, lora.a + (slot * size_t(width) + at) * lora.in, count,
               lora.in, scratch + size_t(row) * width + at);
    });
    const int pieces = parts(lora.out, COLUMNS);
    team.share(rows * pieces, [&](int i) {
        const int row = i / pieces, slot = slots[row];
        if (slot < 0) return;
        const int begin = i % pieces * COLUMNS, end = std::min(begin + COLUMNS, lora.out);
        for (int section = 0, first = begin; section < lora.sections && first < end; section++) {
            const int last = std::min(lora.ends[section], end);
            if (last <= first) continue;
            expand(scratch + size_t(row) * width + size_t(section) * lora.max_rank,
                   lora.b + slot * size_t(lora.max_rank) * lora.out + first, lora.ranks[slot],
                   lora.out, last - first, y + size_t(row) * lora.out + first);
            first = last;
        }
    });
}

extern "C" {
size_t baton_lora_scratch(const Lora* lora, int rows) {
    return size_t(rows) * lora->sections * lora->max_rank * sizeof(float);
}

void baton_add_lora(int threads, const Activation* x, int rows, const int32_t* slots,
                    const Lora* lora, Activation* y, float* scratch) {
    with_team(threads, [&](Team& team) { add_lora(team, x, rows, slots, *lora, y, scratch); });
}
}

}  // namespace baton
