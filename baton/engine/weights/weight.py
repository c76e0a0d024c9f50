"""Weights by format: what activations are multiplied with, and how, in plain torch.

A device's faster products are subclasses or forms of these (`ops/native/packing.py`,
`backends/gpu/linear.py`); what is written here is their reference. W8A8 formats quantise
activations too, row by row (`quantize.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from baton.engine.kernels.torch.linear import exact_products, product
from baton.engine.weights.quantize import FP8, quantize_rows
from baton.errors import CheckpointError

# Weights are quantised so many rows at a time, so that no float32 copy of a whole one exists.
_ROWS_AT_ONCE = 4096


class Weight(ABC):
    """A matrix `[out, in]`, in whatever form it is held."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    def take_outputs(self, rows: Tensor) -> Weight:
        """Some of its outputs, int64 `[n]`, as a weight of their own."""
        raise TypeError(f"{type(self).__name__} is not cut by outputs")

    def take_inputs(self, columns: range) -> Weight:
        """Some of its inputs, next to each other: products of all such parts add up to its own.

        Raises CheckpointError where the format has no cut there.
        """
        raise TypeError(f"{type(self).__name__} is not cut by inputs")

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: x `[rows, in]`, bias `[out]` → `[rows, out]` of x's type."""


@dataclass(frozen=True)
class DenseWeight(Weight):
    """A matrix as it is, float32 or bfloat16."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.tensor.shape
        return outputs, inputs

    def take_outputs(self, rows: Tensor) -> DenseWeight:
        return DenseWeight(self.tensor[rows.to(self.tensor.device)])

    def take_inputs(self, columns: range) -> DenseWeight:
        return DenseWeight(self.tensor[:, columns.start : columns.stop].contiguous())

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, self.tensor, bias)


@dataclass(frozen=True)
class RowScaledWeight(Weight):
    """A W8A8 weight: values of `DTYPE`, and the float32 scale `[out]` of each output."""

    values: Tensor
    scales: Tensor

    DTYPE: ClassVar[torch.dtype]

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """weight `[out, in]` of any floating type, quantised."""
        values = torch.empty(weight.shape, dtype=cls.DTYPE, device=weight.device)
        scales = torch.empty(len(weight), device=weight.device)
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            values[rows], scales[rows] = quantize_rows(weight[rows], cls.DTYPE)
        return cls(values, scales)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    def take_outputs(self, rows: Tensor) -> Self:
        rows = rows.to(self.values.device)
        return type(self)(self.values[rows], self.scales[rows])

    def take_inputs(self, columns: range) -> Self:
        values = self.values[:, columns.start : columns.stop]
        return type(self)(values.contiguous(), self.scales)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same, with x's rows quantised to `DTYPE` too."""
        return self.scaled(*quantize_rows(x, self.DTYPE), bias, x.dtype)

    def scaled(self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`(x * scales) @ weight.T + bias` of dtype: x `[rows, in]` of `DTYPE`, scales `[rows]`."""
        out = self._sums(x)
        out.mul_(scales[:, None] * self.scales)
        if bias is not None:
            out += bias
        return out.to(dtype)

    @abstractmethod
    def _sums(self, x: Tensor) -> Tensor:
        """Products of values alone, float32 `[rows, out]`."""


class Int8Weight(RowScaledWeight):
    """W8A8 in int8: the sums are whole numbers, exact and so the same in any batch."""

    DTYPE = torch.int8

    def _sums(self, x: Tensor) -> Tensor:
        return exact_products(x, self.values).float()


class Fp8Weight(RowScaledWeight):
    """W8A8 in float8_e4m3fn; on a CPU its products are those of float32."""

    DTYPE = FP8

    def _sums(self, x: Tensor) -> Tensor:
        return x.float() @ self.values.float().T


@dataclass(frozen=True)
class GroupScaledWeight(Weight):
    """A weight in fewer bits of which groups of inputs share a scale; activations stay as they are.

    values: `[out, …]` · scales: float32 `[out, groups]`.
    """

    values: Tensor
    scales: Tensor

    NAME: ClassVar[str]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
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
        """The same, with the weight in x's type, a part of the outputs at a time."""
        parts = []
        for first in range(0, len(self.values), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            part = self.dequantized(x.dtype, rows)
            parts.append(product(x, part, None if bias is None else bias[rows]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def dequantized(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Rows of the matrix, of dtype, its inputs as values have them."""
        groups = self.numbers(rows).unflatten(1, (-1, self.group))
        full: Tensor = groups * self.scales[rows, :, None]
        return full.flatten(1).to(dtype)

    @abstractmethod
    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """Rows of what is scaled: float32 `[rows, in]`."""


class Fp8BlockWeight(GroupScaledWeight):
    """W8A16 of float8_e4m3fn `[out, in]`, as checkpoints with scales of blocks are held."""

    NAME = "block-fp8"

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.values.shape
        return outputs, inputs

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        return self.values[rows].float()


class FourBitWeight(GroupScaledWeight):
    """W4A16. values: uint8 `[out, in / 2]`, two numbers of 4 bits a byte, the lower bits first."""

    @property
    def shape(self) -> tuple[int, int]:
        outputs, pairs = self.values.shape
        return outputs, 2 * pairs

    def nibbles(self, rows: slice = slice(None)) -> Tensor:
        """Rows of values, one in a byte: uint8 `[rows, in]`."""
        pairs = self.values[rows]
        return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


class Mxfp4Weight(FourBitWeight):
    """MXFP4 (OCP Microscaling Formats 1.0), as checkpoints have it.

    A value is twice a number of E2M1, whose highest bit is the sign, so that it is a whole one;
    scales are half of the powers of two that groups share.
    """

    NAME = "MXFP4"
    GROUP: ClassVar[int] = 32
    NUMBERS: ClassVar[tuple[int, ...]] = (0, 1, 2, 3, 4, 6, 8, 12)

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        table = torch.tensor((*self.NUMBERS, *(-x for x in self.NUMBERS)), dtype=torch.float32)
        return table.to(self.values.device)[self.nibbles(rows).int()]


@dataclass(frozen=True)
class Int4Weight(FourBitWeight):
    """`(values - zeros) * scales`, of values from 0 to 15.

    zeros: uint8 `[out, groups]` of 0 to 16, or None where all are 8 · order: int64 `[in]`, the
    input of each column (act-order), or None where they are in order.
    """

    zeros: Tensor | None = None
    order: Tensor | None = None

    NAME = "int4"
    GROUP: ClassVar[int] = 64  # inputs that share a scale, where a dense weight is quantised
    MIDDLE: ClassVar[int] = 8  # the zero point of symmetric groups

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """weight `[out, in]`, whole groups of inputs, rounded to the nearest.

        A group's extreme becomes 0, which is 8 below the zero point (as in GGML's q4_0). Scales are
        numbers that bfloat16 has, so that they are 16 bits wherever they are read.
        """
        outputs, inputs = weight.shape
        values = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(outputs, inputs // cls.GROUP, device=weight.device)
        for first in range(0, outputs, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            groups = weight[rows].float().unflatten(1, (-1, cls.GROUP))
            extremes = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
            scales[rows] = (extremes[..., 0] / -cls.MIDDLE).bfloat16().float()
            units = groups / scales[rows][..., None].where(scales[rows][..., None] != 0, 1)
            numbers = (units.round() + cls.MIDDLE).clamp(0, 15).to(torch.uint8)
            values[rows] = _pairs(numbers.flatten(1))
        return cls(values, scales)

    @classmethod
    def packed(
        cls, values: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> Self:
        """Of values uint8 `[out, in]`, one in a byte."""
        return cls(_pairs(values), scales, zeros, order)

    def take_outputs(self, rows: Tensor) -> Self:
        taken = super().take_outputs(rows)
        return (
            taken
            if self.zeros is None
            else replace(taken, zeros=self.zeros[rows.to(self.zeros.device)])
        )

    def take_inputs(self, columns: range) -> Self:
        if self.order is not None:
            raise CheckpointError("int4 with act-order is not cut by inputs: leave --tp out")
        taken = super().take_inputs(columns)
        if self.zeros is None:
            return taken
        groups = slice(columns.start // self.group, columns.stop // self.group)
        return replace(taken, zeros=self.zeros[:, groups].contiguous())

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same."""
        return super().apply(x if self.order is None else x[:, self.order], bias)

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        groups: Tensor = self.nibbles(rows).unflatten(1, (-1, self.group)).float()
        groups -= self.MIDDLE if self.zeros is None else self.zeros[rows, :, None].float()
        return groups.flatten(1)


def _pairs(numbers: Tensor) -> Tensor:
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def quantized(weight: DenseWeight, quantization: str, is_output: bool = False) -> Weight:
    """A weight in the format of `--quantization`; not in int4 if its inputs are no whole groups.

    A model's output layer is not either, but in int8: it is what a model loses most by.
    """
    match quantization:
        case "int8" | "int4" if is_output or quantization == "int8":
            return Int8Weight.of(weight.tensor)
        case "fp8":
            return Fp8Weight.of(weight.tensor)
        case "int4" if weight.shape[1] % Int4Weight.GROUP == 0:
            return Int4Weight.of(weight.tensor)
    return weight
