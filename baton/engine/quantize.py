"""Eight-bit numbers and what they cost: rows of int8 with one float32 scale each.

Every row is scaled by its own largest magnitude: an output of a weight, a token's activations, a
token's K or V of one head. A row's numbers thus depend on itself alone, never on what shares its
batch, its block or its chunk. Native kernels compute by the same formulas; this is their reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PEAK = 127
SCALE_BYTES = 4  # of a packed row: its scale, float32, behind its elements

# Smaller magnitudes would overflow `PEAK / largest`; they are nothing next to any activation.
_LEAST = 1e-36

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
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(len(weight), device=weight.device)
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            values[rows], scales[rows] = quantize_rows(weight[rows])
        return cls(values, scales)

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.values.shape


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., size]` → (int8 `[..., size]`, float32 scales `[...]`), with x ≈ int8 * scale.

    The scale is the row's largest magnitude over 127; values are rounded to the nearest, ties to
    even. A row of zeros has scale 0.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    # Divided by a tensor: torch would multiply a plain number by the reciprocal and round twice.
    peak = largest.new_tensor(float(PEAK))
    inverse = peak / largest.clamp_min(_LEAST)
    values = (x * inverse[..., None]).round_().to(torch.int8)
    return values, largest / peak


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


def pack_rows(x: Tensor) -> Tensor:
    """x `[..., size]` → int8 `[..., size + SCALE_BYTES]`: what an int8 KV pool holds of it."""
    values, scales = quantize_rows(x)
    return torch.cat([values, scales[..., None].view(torch.int8)], dim=-1)


def unpack_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The way back: int8 `[..., size + SCALE_BYTES]` → `[..., size]` of dtype."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES].float().mul_(scales).to(dtype)
