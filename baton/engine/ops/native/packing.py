"""Weights in the order in which the native products read them.

A product takes the outputs in panels of 64 columns. Along the depth, as many neighbours as fit
into 32 bits form a group, and a panel stores group after group:
`[panels][groups][64][group]`, depth and columns padded with zeros. Mirrors `src/kernels.h`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.weights.quantize import Fp8Weight, Int8Weight

PANEL = 64
ACTIVATION_OFFSET = 128  # added to int8 activations, which the product takes as unsigned bytes

# A large weight is packed so many panels at a time, so that no second copy of it comes into being.
PANELS_AT_ONCE = 64


@dataclass(frozen=True)
class PackedWeight:
    """A matrix `[out, in]` as native products read it.

    int8 ones have a float32 scale for each output, and what the activations' offset adds to each
    output's sum, int32 `[out]`, for the product to take off.
    """

    packed: Tensor
    outputs: int
    inputs: int
    scales: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor | Int8Weight | Fp8Weight) -> PackedWeight:
        """A matrix, packed. Native code has no fp8."""
        assert not isinstance(weight, Fp8Weight), "fp8 weights are for GPUs"
        outputs, inputs = weight.shape
        if not isinstance(weight, Int8Weight):
            return cls(pack(weight), outputs, inputs)
        offsets = weight.values.sum(1, dtype=torch.int32) * ACTIVATION_OFFSET
        return cls(pack(weight.values), outputs, inputs, weight.scales, offsets)


Matrix = Tensor | Int8Weight | Fp8Weight | PackedWeight
"""A weight `[out, in]`: as it is, in 8 bits, or as native code reads it."""


def pack(weight: Tensor) -> Tensor:
    """weight `[out, in]` float32, bfloat16 or int8 → `[panels, groups, 64, group]`."""
    outputs, depth = weight.shape
    group = 4 // weight.element_size()
    groups = -(-depth // group)
    packed = weight.new_zeros(-(-outputs // PANEL), groups, PANEL, group)
    for first in range(0, packed.shape[0], PANELS_AT_ONCE):
        panels = packed[first : first + PANELS_AT_ONCE]
        rows = weight[first * PANEL : (first + panels.shape[0]) * PANEL]
        padded = weight.new_zeros(panels.shape[0] * PANEL, groups * group)
        padded[: rows.shape[0], :depth] = rows
        panels.copy_(padded.view(-1, PANEL, groups, group).transpose(1, 2))
    return packed
