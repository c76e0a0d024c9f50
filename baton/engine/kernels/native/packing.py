"""Weights in the order in which native products read them.

Outputs are divided into panels of 64 columns. As many neighbours along the depth as fit into 32
bits form a group: `[panels][groups][64][group]`, depth and columns padded with zeros. Mirrors
`src/kernels.h`; the order of 4-bit and fp8 values in a word is that of `src/group_scaled.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels.native import library
from baton.engine.kernels.native.interface import Linear
from baton.engine.kernels.native.row_ops import NATIVE_ROW_OPS
from baton.engine.quantization.fp8 import Fp8BlockWeight
from baton.engine.quantization.gguf import GgufWeight
from baton.engine.quantization.group_scaled import FourBitWeight, GroupScaledWeight
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight, JoinedWeight, LinearWeight
from baton.engine.quantization.mxfp4 import Mxfp4Weight

PANEL = 64
# Formats of group-scaled weights, in the order of `GroupFormat`.
GROUP_FORMATS = ("int4", "fp8", "mxfp4", "bits4", "bits6", "bits8")
ACTIVATION_OFFSET = 128  # added to int8 activations, which the product takes as unsigned bytes

# Bit offsets of eight values of 4 bits in a word: neighbours are at a distance of 16 bits.
PAIRS = tuple(i // 2 * 4 + i % 2 * 16 for i in range(8))

# Panels packed at a time, so that no second copy of a large weight exists.
PANELS_AT_ONCE = 64


@dataclass(frozen=True)
class PackedWeight(LinearWeight):
    """A matrix `[out, in]` as native products read it.

    int8: scales float32 `[out]` · offsets: int32 `[out]`, by which `ACTIVATION_OFFSET` increases an
    output's sum. Group-scaled: scales float32 `[panels][in / group][64]`, or int8 that are
    multiplied by units float32 `[panels][in / block][64]` · minimums, minimum_units: as those, and
    added to a group's values, or None · order: int4's int32 `[in]` · format: an index of
    `GROUP_FORMATS` · following: the weight whose outputs follow, with the same inputs.
    """

    packed: Tensor
    outputs: int
    inputs: int
    scales: Tensor | None = None
    offsets: Tensor | None = None
    minimums: Tensor | None = None
    units: Tensor | None = None
    minimum_units: Tensor | None = None
    order: Tensor | None = None
    group: int = 0
    format: int = 0
    block: int = 0
    offset: int = 0
    following: PackedWeight | None = None

    ops = NATIVE_ROW_OPS

    @property
    def shape(self) -> tuple[int, int]:
        following = self.following.shape[0] if self.following else 0
        return self.outputs + following, self.inputs

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (self.following.num_bytes if self.following else 0)

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
            case JoinedWeight(parts):
                packed = [cls.from_weight(part) for part in parts]
                return reduce(lambda after, one: replace(one, following=after), reversed(packed))
            case GroupScaledWeight():
                return cls._from_groups(weight)
        raise TypeError(f"native code has no {type(weight).__name__}")

    @classmethod
    def _from_groups(cls, weight: GroupScaledWeight) -> PackedWeight:
        more: dict[str, Any] = {}
        match weight:
            case Fp8BlockWeight(values):
                packed, kind = pack_8_bits(values), "fp8"
            case Mxfp4Weight():
                packed, kind = pack_4_bits(weight), "mxfp4"
            case Int4Weight(_, scales, zeros, order):
                packed, kind = pack_4_bits(weight), "int4"
                if zeros is not None:
                    more["minimums"] = pack((Int4Weight.MIDDLE - zeros.float()) * scales)
                if order is not None:
                    more["order"] = order.int()
            case GgufWeight():
                packed, kind, more = _gguf_parts(weight)
            case _:
                raise TypeError(f"native code has no {type(weight).__name__}")
        kind_number, scales = GROUP_FORMATS.index(kind), pack_scales(weight.scales)
        return cls(packed, *weight.shape, scales, group=weight.group, format=kind_number, **more)

    def linear(self, bias: Tensor | None = None) -> Linear:
        """The structure for native code; it does not keep these tensors alive."""
        made = Linear.from_buffer_copy(self._without_bias)
        made.bias = address(bias)
        return made

    @cached_property
    def _without_bias(self) -> Linear:
        tensors = (
            *(self.packed, self.scales, self.offsets, self.minimums, self.units),
            *(self.minimum_units, self.order, None),
        )
        following = addressof(self.following._without_bias) if self.following else None
        sizes = (self.inputs, self.outputs, self.group, self.format, self.block, self.offset)
        return Linear(*map(address, tensors), following, *sizes)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        native, weights, rows = library.load(x.dtype), self.linear(bias), len(x)
        assert native is not None, "weights are packed for it"
        x, y = x.contiguous(), x.new_empty(rows, self.shape[0])
        scratch = torch.empty(native.baton_linear_scratch(weights, rows), dtype=torch.uint8)
        threads, floats = torch.get_num_threads(), x.dtype == torch.float32
        native.baton_linear(
            threads, x.data_ptr(), rows, weights, y.data_ptr(), floats, scratch.data_ptr()
        )
        return y


def _gguf_parts(weight: GgufWeight) -> tuple[Tensor, str, dict[str, Any]]:
    """A GGUF weight's packed numbers, their format, and the fields that not all formats have."""
    if weight.bits == 4:
        packed = pack_4_bits(weight, [i % 4 * 8 + i // 4 * 4 for i in range(8)])
    else:
        packed = pack_6_bits(weight) if weight.bits == 6 else pack(weight.values)
    more: dict[str, Any] = {"offset": weight.offset}
    if weight.minimums is not None:
        more["minimums"] = pack_scales(weight.minimums)
    if weight.minimum_units is not None:
        more["minimum_units"] = pack(weight.minimum_units)
    if weight.units is not None:
        more |= {"units": pack(weight.units), "block": weight.shape[1] // weight.units.shape[1]}
    return packed, f"bits{weight.bits}", more


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


def pack_scales(scales: Tensor) -> Tensor:
    """float32 or int8 `[out, groups]` → `[panels, groups, 64, 1]`."""
    return pack(scales.float()).to(scales.dtype)


def pack_4_bits(weight: FourBitWeight | GgufWeight, shifts: Sequence[int] = PAIRS) -> Tensor:
    """Values `[out, in]` → int32 `[panels, in / 8, 64, 1]`, each of eight at its shift."""
    (outputs, depth), device = weight.shape, weight.values.device
    words = torch.zeros(
        -(-outputs // PANEL), depth // 8, PANEL, 1, dtype=torch.int32, device=device
    )
    at = torch.tensor(shifts, dtype=torch.int32, device=device)
    for first in range(0, words.shape[0], PANELS_AT_ONCE):
        rows = slice(first * PANEL, (first + PANELS_AT_ONCE) * PANEL)
        eights = weight.nibbles(rows).int().unflatten(1, (-1, 8))
        words[first : first + PANELS_AT_ONCE] = pack((eights << at).sum(-1, dtype=torch.int32))
    return words


def pack_6_bits(weight: GgufWeight) -> Tensor:
    """Values `[out, in]` → int32 `[panels, in / 16, 3, 64]`."""
    outputs, depth = weight.shape
    words = torch.empty(-(-outputs // PANEL), depth // 16, 3, PANEL, dtype=torch.int32)
    bytes_of = torch.arange(0, 32, 8, dtype=torch.int32)
    two_bits = torch.arange(0, 8, 2, dtype=torch.int32)
    for first in range(0, words.shape[0], PANELS_AT_ONCE):
        rows = slice(first * PANEL, (first + PANELS_AT_ONCE) * PANEL)
        numbers = weight.values[rows].int() + weight.offset
        # [out, in / 16, four words of four bytes]
        fours = numbers.view(len(numbers), -1, 4, 4) << bytes_of
        low, high = (
            part.sum(-1, dtype=torch.int32)
            for part in (fours & 0x0F0F0F0F, fours >> 4 & 0x03030303)
        )
        halves = low[..., 0::2] | low[..., 1::2] << 4
        planes = (*halves.unbind(-1), (high << two_bits).sum(-1, dtype=torch.int32))
        for plane, part in enumerate(planes):
            words[first : first + PANELS_AT_ONCE, :, plane] = pack(part).squeeze(-1)
    return words


def pack_8_bits(values: Tensor) -> Tensor:
    """Values `[out, in]`, inputs a multiple of 4 → int8 `[panels, in / 4, 64, 4]`."""
    words = values.view(torch.int8).unflatten(1, (-1, 4))
    return pack(words[..., [0, 2, 1, 3]].flatten(1))
