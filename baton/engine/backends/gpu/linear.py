"""Matrix products on a GPU: cuBLAS for floating types, int8 and fp8 with a scale for each row.

Where a tensor lies on a CPU, the same functions compute with `baton.engine.weights.quantize`,
which is their reference. Knows neither layers nor batches.

What 8-bit products ask of shapes and GPUs is what torch's `_int_mm` and `_scaled_mm` check before
they call cuBLAS or CUTLASS (aten/src/ATen/native/cuda/Blas.cpp and ScaledBlas.cpp of torch 2.11).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.ops.native.packing import Matrix, PackedWeight
from baton.engine.ops.torch import linear as reference
from baton.engine.ops.triton.int8_matmul import MOST_ROWS, int8_matmul, scale_sums
from baton.engine.ops.triton.rows import quantize_rows
from baton.engine.weights.quantize import Fp8Weight, Int8Weight

MULTIPLE = {"int8": 8, "fp8": 16}  # of inputs and outputs


def prepare(matrix: Tensor, quantization: str) -> Matrix:
    """A weight `[out, in]` as `linear` is to take it.

    A matrix whose sizes 8-bit products refuse stays as it is: an output layer over an odd
    vocabulary, at most.
    """
    if quantization == "none" or any(size % MULTIPLE[quantization] for size in matrix.shape):
        return matrix
    return Int8Weight.of(matrix) if quantization == "int8" else Fp8Weight.of(matrix)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x `[rows, in]`, weight `[out, in]`, bias `[out]` → `[rows, out]`.

    With an 8-bit weight x is quantised row by row to the same type. Never waits for the device.
    """
    assert not isinstance(weight, PackedWeight), "packed weights are for native code"
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if not x.is_cuda:
        return reference.linear(x, weight, bias)
    values, scales = quantize_rows(x, weight.DTYPE)
    if isinstance(weight, Int8Weight):
        return int8_products(values, scales, weight, bias, x.dtype)
    return fp8_products(values, scales, weight, bias, x.dtype)


def int8_products(
    x: Tensor, scales: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`(x * scales) @ weight.T + bias`: x int8 `[rows, in]`, scales `[rows]` → dtype `[rows, out]`.

    The sums are whole numbers and exact, by either kernel.
    """
    if len(x) <= MOST_ROWS:
        return int8_matmul(x, weight.values, scales, weight.scales, bias, dtype)
    sums = torch._int_mm(x, weight.values.T)
    return scale_sums(sums, scales, weight.scales, bias, dtype)


def fp8_products(
    x: Tensor, scales: Tensor, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`(x * scales) @ weight.T + bias`: x fp8 `[rows, in]`, scales `[rows]` → dtype `[rows, out]`.

    Sums are taken in the tensor cores' own, faster precision.
    """
    fused = None if dtype == torch.float32 else bias  # float32 results take no bias there
    out = torch._scaled_mm(
        x,
        weight.values.T,
        scales[:, None],
        weight.scales[None],
        bias=fused,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out if bias is None or bias is fused else out.add_(bias)
