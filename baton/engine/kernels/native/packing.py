"""Weights in the order in which native products read them.

Outputs are divided into panels of 64 columns. As many neighbours along the depth as fit into 32
bits form a group: `[panels][groups][64][group]`, depth and columns padded with zeros. Mirrors
`src/kernels.h`; the order of 4-bit and fp8 values in a word is that of `src/group_scaled.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from baton.engine.kernels.native import library
from baton.engine.kernels.native.interface import Linear
from baton.engine.kernels.native.rows import NATIVE_ROW_OPS
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.group_scaled import FourBitWeight
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.mxfp4 import Mxfp4Weight

PANEL = 64
GROUP_FORMATS = ("int4", "fp8", "mxfp4")  # of group-scaled weights, in the order of `GroupFormat`
ACTIVATION_OFFSET = 128  # added to int8 activations, which the product takes as unsigned bytes

# Panels packed at a time, so that no second copy of a large weight exists.
PANELS_AT_ONCE = 64


@dataclass(frozen=True)
class PackedWeight(LinearWeight):
    """A matrix `[out, in]` as native products read it.

    int8: scales float32 `[out]` · offsets: int32 `[out]`, by which `ACTIVATION_OFFSET` increases an
    output's sum. Group-scaled: scales float32 `[panels][in / group][64]` · zeros: int4's 8 less
    zero points in the same order, or None where all are 8 · order: int4's int32 `[in]` · format: an
    index of `GROUP_FORMATS`.
    """

    packed: Tensor
    outputs: int
    inputs: int
    scales: Tensor | None = None
    offsets: Tensor | None = None
    zeros: Tensor | None = None
    order: Tensor | None = None
    group: int = 0
    format: int = 0

    ops = NATIVE_ROW_OPS

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @classmethod
    def from_weight(cls, weight: LinearWeight) -> PackedWeight:
        """Packs a weight, unless it is packed. Raises TypeError for W8A8 fp8, which is GPUs'."""
        match weight:
            case PackedWeight():
                return weight
            case DenseWeight(tensor):
                return cls(pack(tensor), *weight.shape)
            case Int8Weight(values, scales):
                offsets = values.sum(1, dtype=torch.int32) * ACTIVATION_OFFSET
                return cls(pack(values), *weight.shape, scales, offsets)
            case Fp8BlockWeight(values, scales):
                kind = GROUP_FORMATS.index("fp8")
                packed = pack_fp8(values)
                return cls(packed, *weight.shape, pack(scales), group=weight.group, format=kind)
            case Mxfp4Weight(_, scales):
                kind = GROUP_FORMATS.index("mxfp4")
                packed = pack_4_bits(weight)
                return cls(packed, *weight.shape, pack(scales), group=weight.group, format=kind)
            case Int4Weight(_, scales, zeros, order):
                return cls(
                    pack_4_bits(weight),
                    *weight.shape,
                    pack(scales),
                    zeros=None if zeros is None else pack(Int4Weight.MIDDLE - zeros.float()),
                    order=None if order is None else order.int(),
                    group=weight.group,
                )
        raise TypeError(f"native code has no {type(weight).__name__}")

    def linear(self, bias: Tensor | None = None) -> Linear:
        """The structure for native code; it does not keep these tensors alive."""
        made = Linear.from_buffer_copy(self._without_bias)
        made.bias = address(bias)
        return made

    @cached_property
    def _without_bias(self) -> Linear:
        tensors = (self.packed, self.scales, self.offsets, self.zeros, self.order, None)
        sizes = (self.inputs, self.outputs, self.group, self.format)
        return Linear(*map(address, tensors), *sizes)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        native, weights, rows = library.load(x.dtype), self.linear(bias), len(x)
        assert native is not None, "weights are packed for it"
        x, y = x.contiguous(), x.new_empty(rows, self.outputs)
        scratch = torch.empty(native.baton_linear_scratch(weights, rows), dtype=torch.uint8)
        threads, floats = torch.get_num_threads(), x.dtype == torch.float32
        native.baton_linear(
            threads, x.data_ptr(), rows, weights, y.data_ptr(), floats, scratch.data_ptr()
        )
        return y


def address(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "rows lie one after the other"
    return tensor.data_ptr()


def pack(weight: Tensor) -> Tensor:
    """weight `[out, in]` of 4, 2 or 1 bytes → `[panels, groups, 64, group]`."""
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


def pack_4_bits(weight: FourBitWeight) -> Tensor:
    """Values `[out, in]` → int32 `[panels, in / 8, 64, 1]`."""
    (outputs, depth), device = weight.shape, weight.values.device
    words = torch.zeros(
        -(-outputs // PANEL), depth // 8, PANEL, 1, dtype=torch.int32, device=device
    )
    shifts = [i // 2 * 4 + i % 2 * 16 for i in range(8)]
    at = torch.tensor(shifts, dtype=torch.int32, device=device)
    for first in range(0, words.shape[0], PANELS_AT_ONCE):
        rows = slice(first * PANEL, (first + PANELS_AT_ONCE) * PANEL)
        eights = weight.nibbles(rows).int().unflatten(1, (-1, 8))
        words[first : first + PANELS_AT_ONCE] = pack((eights << at).sum(-1, dtype=torch.int32))
    return words


def pack_fp8(values: Tensor) -> Tensor:
    """Values `[out, in]`, inputs a multiple of 4 → int8 `[panels, in / 4, 64, 4]`."""
    words = values.view(torch.int8).unflatten(1, (-1, 4))
    return pack(words[..., [0, 2, 1, 3]].flatten(1))
