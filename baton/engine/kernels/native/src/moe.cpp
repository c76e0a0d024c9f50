// Mixture of experts: routing, gathering each expert's rows, and the weighted sum of the outputs. The
// products in between are in forward.cpp.
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels.h"

namespace baton {

constexpr float LEFT_OUT = -std::numeric_limits<float>::infinity();

namespace {

// Leaves of `choice` [experts] the experts of the best groups, and makes the others' lowest.
void keep_best_groups(const RoutingOptions& options, std::vector<float>& choice) {
    const int size = int(choice.size()) / options.groups;
    thread_local std::vector<float> best, scores;
    scores.resize(options.groups);
    for (int i = 0; i < options.groups; i++) {
        best.assign(choice.begin() + i * size, choice.begin() + (i + 1) * size);
        const auto end = best.begin() + options.group_top;
        std::partial_sort(best.begin(), end, best.end(), std::greater<float>());
        scores[i] = std::accumulate(best.begin(), end, 0.0f);
    }
    for (int i = 0; i < options.groups - options.taken_groups; i++) {
        // Of equal groups the last is left out first.
        int worst = -1;
        for (int j = 0; j < options.groups; j++)
            if (scores[j] != LEFT_OUT && (worst < 0 || scores[j] <= scores[worst])) worst = j;
        scores[worst] = LEFT_OUT;
        std::fill_n(choice.begin() + worst * size, size, LEFT_OUT);
    }
}

}  // namespace

void route(Team& team, const float* logits, int rows, int experts, const RoutingOptions& options,
           const float* correction, const Routing& to) {
    const int per_token = options.per_token;
    team.share(rows, [&](int row) {
        const float* own = logits + size_t(row) * experts;
        const float peak = *std::max_element(own, own + experts);
        float total = 0.0f, taken_total = 0.0f;
        for (int i = 0; i < experts; i++) total += std::exp(own[i] - peak);
        const auto score = [&](int i) {
            return options.sigmoid ? 1.0f / (1.0f + std::exp(-own[i])) : std::exp(own[i] - peak) / total;
        };
        thread_local std::vector<float> choice;
        choice.assign(own, own + experts);  // the order of a softmax is that of its inputs
        if (options.sigmoid || correction || options.groups > 1)
            for (int i = 0; i < experts; i++) choice[i] = score(i) + (correction ? correction[i] : 0.0f);
        if (options.groups > 1) keep_best_groups(options, choice);
        float* shares = to.shares + size_t(row) * per_token;
        int32_t* taken = to.taken + size_t(row) * per_token;
        for (int i = 0; i < per_token; i++) {
            int best = -1;
            for (int j = 0; j < experts; j++)
                if (std::find(taken, taken + i, j) == taken + i && (best < 0 || choice[j] > choice[best]))
                    best = j;
            taken[i] = best;
            shares[i] = score(best);
            taken_total += shares[i];
        }
        for (int i = 0; i < per_token; i++) {
            if (options.normed) shares[i] /= taken_total;
            shares[i] *= options.scale;
        }
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
         const Routing& routing, bool shared, const float* gate, Activation* out) {
    team.share(rows, [&](int row) {
        const float* shares = routing.shares + size_t(row) * per_token;
        const int32_t* places = routing.place + size_t(row) * per_token;
        Activation* to = out + size_t(row) * size;
        const f32x16 open = gate ? sigmoid(splat(gate[row])) : splat(1.0f);
        for (int i = 0; i < size; i += LANES) {
            f32x16 sum = shared ? load_floats(to + i, size - i) * open : f32x16{};
            for (int j = 0; j < per_token; j++)
                if (routing.is_own(places[j]))
                    sum += load_floats(outputs + size_t(places[j]) * size + i, size - i) * shares[j];
            store_floats(to + i, sum, size - i);
        }
    });
}

}  // namespace baton
