// Mixture of experts: routing, gathering each expert's rows, and the weighted sum of the outputs. The
// products in between are in forward.cpp.
#include <cmath>

#include "kernels.h"

namespace baton {

void route(Team& team, const float* scores, int rows, int experts, int per_token, bool normed,
           const Routing& to) {
    team.share(rows, [&](int row) {
        const float* own = scores + size_t(row) * experts;
        const float peak = *std::max_element(own, own + experts);
        float total = 0.0f, taken_total = 0.0f;
        for (int i = 0; i < experts; i++) total += std::exp(own[i] - peak);
        float* shares = to.shares + size_t(row) * per_token;
        int32_t* taken = to.taken + size_t(row) * per_token;
        for (int i = 0; i < per_token; i++) {
            int best = -1;
            for (int j = 0; j < experts; j++)
                if (std::find(taken, taken + i, j) == taken + i && (best < 0 || own[j] > own[best]))
                    best = j;
            taken[i] = best;
            shares[i] = std::exp(own[best] - peak) / total;
            taken_total += shares[i];
        }
        if (normed)
            for (int i = 0; i < per_token; i++) shares[i] /= taken_total;
    });
    if (team.thread == 0) {
        const int slots = rows * per_token;
        std::fill_n(to.first, experts + 1, 0);
        for (int i = 0; i < slots; i++) to.first[to.taken[i] + 1]++;
        for (int i = 0; i < experts; i++) to.first[i + 1] += to.first[i];
        // `first` is used as a counter, which ends at the next expert's first place, and restored.
        for (int i = 0; i < slots; i++) to.place[i] = to.first[to.taken[i]]++;
        for (int i = experts; i > 0; i--) to.first[i] = to.first[i - 1];
        to.first[0] = 0;
    }
    team.barrier();
}

void gather(Team& team, const Activation* x, int rows, int per_token, int size,
            const Routing& routing, Activation* to) {
    team.share(rows, [&](int row) {
        for (int i = 0; i < per_token; i++) {
            const int place = routing.place[size_t(row) * per_token + i];
            if (routing.is_own(place))
                std::copy_n(x + size_t(row) * size, size, to + size_t(place) * size);
        }
    });
}

void mix(Team& team, const Activation* outputs, int rows, int per_token, int size,
         const Routing& routing, const float* gate, Activation* out) {
    team.share(rows, [&](int row) {
        const float* shares = routing.shares + size_t(row) * per_token;
        const int32_t* places = routing.place + size_t(row) * per_token;
        Activation* to = out + size_t(row) * size;
        const f32x16 open = gate ? sigmoid(splat(gate[row])) : f32x16{};
        for (int i = 0; i < size; i += LANES) {
            f32x16 sum = gate ? load_floats(to + i, size - i) * open : f32x16{};
            for (int j = 0; j < per_token; j++)
                if (routing.is_own(places[j]))
                    sum += load_floats(outputs + size_t(places[j]) * size + i, size - i) * shares[j];
            store_floats(to + i, sum, size - i);
        }
    });
}

}  // namespace baton
