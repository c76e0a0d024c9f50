"""Eight-bit numbers and what they cost: rows of int8 or fp8 with one float32 scale each.

Every row is scaled by its own largest magnitude: an output of a weight, a token's activations, a
token's K or V of one head. A row's numbers thus depend on itself alone, never on what shares its
batch, its block or its chunk. Native kernels and those of GPUs compute by the same formulas; this
is their reference. fp8 is torch.float8_e4m3fn (https://arxiv.org/abs/2209.05433), which GPUs
multiply and CPUs do not: here its products are those of float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PEAK = 127
FP8 = torch.float8_e4m3fn
PEAKS = {torch.int8: float(PEAK), FP8: 448.0}  # what a row's largest magnitude becomes
SCALE_BYTES = 4  # of a packed row: its scale, float32, behind its elements

# Smaller magnitudes would overflow `peak / largest`; they are nothing next to any activation.
_LEAST = {torch.int8: 1e-36, FP8: 2e-36}

# Weights are quantised so many rows at a time, so that no float32 copy of a whole one exists.
_ROWS_AT_ONCE = 4096

# So deep a product of int8 has only whole numbers below 2 ** 24 as sums, which float32 adds up
# exactly in any order.
_EXACT_DEPTH = 1024

# Elsewhere oneDNN multiplies int8 with sums of 16 bits, which saturate.
_HAS_VNNI = torch.cpu._is_vnni_supported()


@dataclass(frozen=True)
class Int8Weight:
    """A matrix `[out, in]`: int8 values, and the float32 scale `[out]` of each output."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """weight `[out, in]` of any floating type, quantised."""
        return cls(*_quantize_in_parts(weight, torch.int8))

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.values.shape


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix `[out, in]`: float8_e4m3fn values, and the float32 scale `[out]` of each output."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """weight `[out, in]` of any floating type, quantised."""
        return cls(*_quantize_in_parts(weight, FP8))

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.values.shape


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether rows of a KV pool of dtype have a scale of their own behind their elements."""
    return dtype in PEAKS


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x `[..., size]` → (dtype `[..., size]`, float32 scales `[...]`), with x ≈ values * scale.

    The scale is the row's largest magnitude over that of dtype: 127 for int8, 448 for fp8. Values
    are rounded to the nearest, ties to even. A row of zeros has scale 0.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    # Divided by a tensor: torch would multiply a plain number by the reciprocal and round twice.
    peak = largest.new_tensor(PEAKS[dtype])
    inverse = peak / largest.clamp_min(_LEAST[dtype])
    units = x * inverse[..., None]
    values = (units.round_() if dtype == torch.int8 else units).to(dtype)
    return values, largest / peak


def _quantize_in_parts(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        values[rows], scales[rows] = quantize_rows(weight[rows], dtype)
    return values, scales


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of x's rows quantised, `[rows, in]` → `[rows, out]` of x's type.

    The sums are whole numbers and exact, so that a row's result is the same in any batch.
    """
    values, scales = quantize_rows(x)
    sums = exact_products(values, weight.values)
    out = sums.float().mul_(scales[:, None] * weight.scales)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def exact_products(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of int8 `[rows, in]` and `[out, in]`: int32 `[rows, out]`, exact."""
    # At a depth of 1 torch 2.13 gives wrong sums.
    fast = _HAS_VNNI and x.shape[1] > 1
    return torch._int_mm(x, weight.T) if fast else products_by_float(x, weight)


def products_by_float(x: Tensor, weight: Tensor) -> Tensor:
    """The same on any CPU: the products of short pieces of the depth, in float32."""
    sums = torch.zeros(len(x), len(weight), dtype=torch.int32)
    pieces = zip(x.split(_EXACT_DEPTH, dim=1), weight.split(_EXACT_DEPTH, dim=1), strict=True)
    for left, right in pieces:
        sums += (left.float() @ right.float().T).to(torch.int32)
    return sums


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of x's rows quantised, `[rows, in]` → `[rows, out]` of x's type."""
    values, scales = quantize_rows(x, FP8)
    out = values.float() @ weight.values.float().T
    out.mul_(scales[:, None] * weight.scales)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def pack_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """x `[..., size]` → dtype `[..., size + SCALE_BYTES]`: what a KV pool of dtype holds of it."""
    values, scales = quantize_rows(x, dtype)
    # As bytes of int8: few operations know fp8.
    rows = torch.cat([values.view(torch.int8), scales[..., None].view(torch.int8)], dim=-1)
    return rows.view(dtype)


def unpack_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The way back: int8 or fp8 `[..., size + SCALE_BYTES]` → `[..., size]` of dtype."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES].float().mul_(scales).to(dtype)
