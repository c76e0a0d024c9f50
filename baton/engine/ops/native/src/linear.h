// Matrix products of activations and packed weights.
#pragma once

#include "simd.h"
#include "team.h"

namespace baton {

// y = x @ weight.T + bias. Mirrored by a ctypes structure in Python.
struct Linear {
    const void* packed;      // [panels][groups][PANEL][GROUP]; depth and columns padded with zeros
    const float* scales;     // int8 weights: [out], of each output; otherwise null
    const int32_t* offsets;  // int8 weights: [out], 128 times the sum of an output's weights
    const void* bias;        // [out] in the type of the activations, or null
    int32_t in;
    int32_t out;
};

constexpr int PANEL = 64;  // columns packed side by side

// Bytes of scratch that `linear` needs for int8 weights; 0 for others.
size_t linear_scratch(const Linear& weights, int rows);

// x [rows][in] of Element -> y [rows][out] of Output (Element or float). Called by the whole team;
// returns when y is complete. Rows do not influence each other's bits.
template <class Element, class Output>
void linear(Team& team, const Element* x, int rows, const Linear& weights, Output* y, void* scratch);

}  // namespace baton
