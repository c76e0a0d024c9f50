"""Weights by format: what activations are multiplied with, and how, in plain torch.

A device's faster products are subclasses or forms of these (`ops/native/packing.py`,
`backends/gpu/linear.py`); what is written here is their reference. W8A8 formats quantise
activations too, row by row (`quantize.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from baton.engine.ops.torch.linear import exact_products, product
from baton.engine.weights.quantize import FP8, quantize_rows

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

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same, with x's rows quantised to `DTYPE` too."""
        values, scales = quantize_rows(x, self.DTYPE)
        out = self._sums(values)
        out.mul_(scales[:, None] * self.scales)
        if bias is not None:
            out += bias
        return out.to(x.dtype)

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


QUANTIZED = {"int8": Int8Weight, "fp8": Fp8Weight}


def quantized(weight: DenseWeight, quantization: str) -> Weight:
    """A weight in the format of `--quantization`."""
    return weight if quantization == "none" else QUANTIZED[quantization].of(weight.tensor)
