// What happens to rows one by one between the products.
#pragma once

#include "simd.h"
#include "team.h"

namespace baton {

// hidden[row] = table[token_ids[row]], rows of `size` elements.
template <class Element>
void embed(Team& team, const Element* table, const int32_t* token_ids, int rows, int size,
           Element* hidden);

// hidden += added (unless null); out = hidden scaled to unit mean square, times weight.
template <class Element>
void add_rms_norm(Team& team, Element* hidden, const Element* added, const Element* weight, float eps,
                  int rows, int size, Element* out);

// out = silu(gate) * up, of gate_up [rows][2 * size], gate first.
template <class Element>
void silu_mul(Team& team, const Element* gate_up, int rows, int size, Element* out);

}  // namespace baton
