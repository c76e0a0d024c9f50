"""Weights of 4 or 8 bits with a scale for each group of inputs; activations are not quantised."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from baton.engine.kernels.torch.linear import product
from baton.engine.quantization.linear_weight import ROWS_AT_ONCE, LinearWeight
from baton.errors import CheckpointError


@dataclass(frozen=True)
class GroupScaledWeight(LinearWeight):
    """A group-quantised weight. values: `[out, …]` · scales: float32 `[out, groups]`."""

    values: Tensor
    scales: Tensor

    NAME: ClassVar[str]

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def take_outputs(self, rows: Tensor) -> Self:
        rows = rows.to(self.values.device)
        return replace(self, values=self.values[rows], scales=self.scales[rows])

    def take_inputs(self, columns: range) -> Self:
        if columns.start % self.group or columns.stop % self.group:
            raise CheckpointError(
                f"a {self.NAME} matrix of {self.shape[1]} inputs is not cut at {columns.start} and "
                f"{columns.stop}: its parts are whole groups of {self.group}; choose another --tp"
            )
        width = self.values.shape[1]
        first, end = (at * width // self.shape[1] for at in (columns.start, columns.stop))
        groups = slice(columns.start // self.group, columns.stop // self.group)
        values, scales = self.values[:, first:end], self.scales[:, groups]
        return replace(self, values=values.contiguous(), scales=scales.contiguous())

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, with a part of the weight dequantised to x's type at a time."""
        parts = []
        for first in range(0, len(self.values), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            part = self.dequantized(x.dtype, rows)
            parts.append(product(x, part, None if bias is None else bias[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def dequantized(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Rows of the matrix in dtype, with inputs in the order of `values`."""
        groups = self.numbers(rows).unflatten(1, (-1, self.group))
        full: Tensor = groups * self.scales[rows, :, None]
        return full.flatten(1).to(dtype)

    def dequantize_into(self, target: Tensor) -> None:
        """Fills target `[out, in]` of any type and device, a part of the outputs at a time."""
        for first in range(0, len(self.values), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            target[rows] = self.dequantized(target.dtype, rows).to(target.device)

    @abstractmethod
    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """Rows of the matrix before scaling: float32 `[rows, in]`."""


class FourBitWeight(GroupScaledWeight):
    """W4A16. values: uint8 `[out, in / 2]`, two numbers of 4 bits a byte, the lower bits first."""

    @property
    def shape(self) -> tuple[int, int]:
        outputs, pairs = self.values.shape
        return outputs, 2 * pairs

    def nibbles(self, rows: slice = slice(None)) -> Tensor:
        """Rows of `values` with one number a byte: uint8 `[rows, in]`."""
        return unpack_nibbles(self.values[rows])


def unpack_nibbles(pairs: Tensor) -> Tensor:
    """uint8 `[rows, n]` → `[rows, 2 * n]` of 0 to 15, the lower bits first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
