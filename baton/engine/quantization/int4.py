"""W4A16 in int4: groups of inputs with a scale and, where a checkpoint has them, a zero point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from baton.engine.quantization.group_scaled import FourBitWeight
from baton.engine.quantization.linear_weight import ROWS_AT_ONCE, Get, joined
from baton.errors import CheckpointError


@dataclass(frozen=True)
class Int4Weight(FourBitWeight):
    """`(values - zeros) * scales`, of values from 0 to 15.

    zeros: uint8 `[out, groups]` of 0 to 16, or None where all are 8 · order: int64 `[in]`, the
    input of each column (act-order), or None where columns are in the order of inputs.
    """

    zeros: Tensor | None = None
    order: Tensor | None = None

    NAME = "int4"
    GROUP: ClassVar[int] = 64  # inputs that share a scale, where a dense weight is quantised
    MIDDLE: ClassVar[int] = 8  # the zero point of symmetric groups

    @classmethod
    def from_dense(cls, weight: Tensor) -> Self:
        """Quantises weight `[out, in]`, whose inputs are a multiple of `GROUP`.

        A group's extreme becomes 0, which is 8 below the zero point (as in GGML's q4_0). Scales are
        rounded to bfloat16, so that kernels may hold them in 16 bits.
        """
        outputs, inputs = weight.shape
        values = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(outputs, inputs // cls.GROUP, device=weight.device)
        for first in range(0, outputs, ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            groups = weight[rows].float().unflatten(1, (-1, cls.GROUP))
            extremes = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
            scales[rows] = (extremes[..., 0] / -cls.MIDDLE).bfloat16().float()
            units = groups / scales[rows][..., None].where(scales[rows][..., None] != 0, 1)
            numbers = (units.round() + cls.MIDDLE).clamp(0, 15).to(torch.uint8)
            values[rows] = pack_nibbles(numbers.flatten(1))
        return cls(values, scales)

    @classmethod
    def from_parts(cls, parts: Sequence[Int4Part]) -> Self:
        """The matrix of a checkpoint's modules, joined along the outputs.

        Raises CheckpointError naming a module whose inputs are in another order than the first's.
        """
        order = parts[0].order
        for part in parts:
            if not torch.equal(part.order, order):
                raise CheckpointError(
                    f"{part.module} has its inputs in other groups (g_idx) than {parts[0].module}, "
                    "with which it is multiplied: quantise the model without act-order"
                )
        values, scales, zeros = (
            joined(getattr(part, field) for part in parts)
            for field in ("values", "scales", "zeros")
        )
        in_order = torch.equal(order.cpu(), torch.arange(len(order)))
        return cls(
            pack_nibbles(values if in_order else values[:, order]),
            scales,
            None if (zeros == cls.MIDDLE).all() else zeros,
            None if in_order else order,
        )

    def take_outputs(self, rows: Tensor) -> Self:
        taken = super().take_outputs(rows)
        if self.zeros is None:
            return taken
        return replace(taken, zeros=self.zeros[rows.to(self.zeros.device)])

    def take_inputs(self, columns: range) -> Self:
        if self.order is not None:
            raise CheckpointError("int4 with act-order is not cut by inputs: leave --tp out")
        taken = super().take_inputs(columns)
        if self.zeros is None:
            return taken
        groups = slice(columns.start // self.group, columns.stop // self.group)
        return replace(taken, zeros=self.zeros[:, groups].contiguous())

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().apply(x if self.order is None else x[:, self.order], bias)

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        groups: Tensor = self.nibbles(rows).unflatten(1, (-1, self.group)).float()
        groups -= self.MIDDLE if self.zeros is None else self.zeros[rows, :, None].float()
        return groups.flatten(1)


class Int4Part(NamedTuple):
    """An int4 module of a checkpoint.

    values: uint8 `[out, in]`, one number a byte · scales: float32, and zeros: uint8,
    `[out, groups]` · order: int64 `[in]`, the inputs in the order of their groups.
    """

    module: str
    values: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor


def group_order(get: Get, name: str, inputs: int, group_size: int) -> Tensor:
    """`Int4Part.order` from the checkpoint's tensor of group numbers (`g_idx`), if it has one.

    Raises CheckpointError for groups of other sizes.
    """
    groups = get(name)
    if groups is None:
        return torch.arange(inputs)
    order = groups.argsort(stable=True)
    expected = torch.arange(len(order), device=order.device) // group_size
    if not torch.equal(groups[order].long(), expected):
        raise CheckpointError(f"{name} has groups of other sizes than {group_size}")
    return order


def pack_nibbles(numbers: Tensor) -> Tensor:
    """uint8 `[rows, n]` of 0 to 15 → `[rows, n / 2]`, the lower bits first."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def unpack_words(words: Tensor) -> Tensor:
    """int32 `[..., n]` → uint8 `[..., 8 * n]`, each word's lowest bits first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
