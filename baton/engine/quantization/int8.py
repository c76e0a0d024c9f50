"""W8A8 in int8: a scale for each output of a weight, and one for each row of activations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from baton.engine.kernels.torch.linear import exact_products
from baton.engine.kernels.torch.row_quantization import quantize_rows
from baton.engine.quantization.linear_weight import ROWS_AT_ONCE, LinearWeight


@dataclass(frozen=True)
class RowScaledWeight(LinearWeight):
    """A W8A8 weight. values: `DTYPE` `[out, in]` · scales: float32 `[out]`."""

    values: Tensor
    scales: Tensor

    DTYPE: ClassVar[torch.dtype]

    @classmethod
    def from_dense(cls, weight: Tensor) -> Self:
        """Quantises weight `[out, in]` of any floating type."""
        values = torch.empty(weight.shape, dtype=cls.DTYPE, device=weight.device)
        scales = torch.empty(len(weight), device=weight.device)
        for first in range(0, len(weight), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
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
        """`x @ weight.T + bias`, with x's rows quantised to `DTYPE`."""
        return self.apply_quantized(*quantize_rows(x, self.DTYPE), bias, x.dtype)

    def apply_quantized(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """`(x * scales) @ weight.T + bias` of dtype: x `[rows, in]` of `DTYPE`, scales `[rows]`."""
        out = self._sums(x)
        out.mul_(scales[:, None] * self.scales)
        if bias is not None:
            out += bias
        return out.to(dtype)

    @abstractmethod
    def _sums(self, x: Tensor) -> Tensor:
        """Products of the values without scales, float32 `[rows, out]`."""


class Int8Weight(RowScaledWeight):
    """W8A8 in int8. Sums are exact integers, hence equal in any batch."""

    DTYPE = torch.int8

    def _sums(self, x: Tensor) -> Tensor:
        return exact_products(x, self.values).float()
