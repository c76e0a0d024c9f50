"""Products with quantised weights on a GPU: W8A8 in int8 and fp8; others are prepared.

Where a tensor lies on a CPU, a weight computes as `baton.engine.weights.weight` does, which is the
reference. Dense weights are torch's, and cuBLAS's.

What 8-bit products ask of shapes and GPUs is what torch's `_int_mm` and `_scaled_mm` check before
they call cuBLAS or CUTLASS (aten/src/ATen/native/cuda/Blas.cpp and ScaledBlas.cpp of torch 2.11).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from baton.engine.ops.triton.group_scaled_linear import pack
from baton.engine.ops.triton.int8_matmul import MOST_ROWS, int8_matmul, scale_sums
from baton.engine.ops.triton.rows import LARGEST_WHOLE, EightBitRows, Rows, quantize_rows
from baton.engine.weights.weight import (
    DenseWeight,
    Fp8Weight,
    GroupScaledWeight,
    Int8Weight,
    RowScaledWeight,
    Weight,
    quantized,
)

MULTIPLE = {"int8": 8, "fp8": 16}  # of inputs and outputs


class _GpuWeight(RowScaledWeight):
    def apply(self, x: Rows, bias: Tensor | None = None) -> Tensor:
        """x may be quantised already, see `eight_bits`. Never waits for the device."""
        if isinstance(x, EightBitRows):
            product = self.product if x.values.is_cuda else self.scaled
            return product(x.values, x.scales, bias, x.dtype)
        if not x.is_cuda:
            return super().apply(x, bias)
        return self.product(*quantize_rows(x, self.DTYPE), bias, x.dtype)

    @abstractmethod
    def product(self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """As `scaled`, faster."""


def eight_bits(reader: Weight | None) -> torch.dtype | None:
    """The type in which a weight can take its inputs as `EightBitRows`, if it can."""
    if isinstance(reader, _GpuWeight) and reader.shape[1] <= LARGEST_WHOLE:
        return reader.DTYPE
    return None


class GpuInt8Weight(_GpuWeight, Int8Weight):
    """W8A8 in int8: the sums are whole numbers and exact, by either kernel."""

    def product(self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if len(x) <= MOST_ROWS:
            return int8_matmul(x, self.values, scales, self.scales, bias, dtype)
        sums = torch._int_mm(x, self.values.T)
        return scale_sums(sums, scales, self.scales, bias, dtype)


class GpuFp8Weight(_GpuWeight, Fp8Weight):
    """W8A8 in fp8: sums are taken in the tensor cores' own, faster precision."""

    def product(self, x: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        fused = None if dtype == torch.float32 else bias  # float32 results take no bias there
        out = torch._scaled_mm(
            x,
            self.values.T,
            scales[:, None],
            self.scales[None],
            bias=fused,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return out if bias is None or bias is fused else out.add_(bias)


_ON_GPU: dict[type[Weight], type[Weight]] = {
    Int8Weight: GpuInt8Weight,
    Fp8Weight: GpuFp8Weight,
}


def prepare(
    weight: Weight, is_output: bool, quantization: str, dtype: torch.dtype = torch.bfloat16
) -> Weight:
    """A weight as the GPU's model is to apply it to activations of dtype; dense ones, which have
    theirs, are quantised.

    A matrix whose sizes 8-bit products refuse stays as it is (an output layer over an odd
    vocabulary, at most), and one whose inputs are no whole groups of int4. Group-quantised ones are
    packed, but for groups that kernels do not take.
    """
    kind = "int8" if quantization == "int4" and is_output else quantization
    if isinstance(weight, DenseWeight):
        dtype = weight.tensor.dtype
        if not any(size % MULTIPLE.get(kind, 1) for size in weight.shape):
            weight = quantized(weight, kind)
    if isinstance(weight, GroupScaledWeight):
        return (pack(weight, dtype) if weight.values.is_cuda else None) or weight
    return _ON_GPU.get(type(weight), type(weight))(**vars(weight))
