"""Rows of int8 or fp8 with one float32 scale each: W8A8 weights and activations, and KV.

A row (an output of a weight, a token's activations, a token's K or V of one head) is scaled by its
own largest magnitude, so its numbers do not depend on what shares its batch, block or chunk.
Native and Triton kernels compute by these formulas. fp8 is torch.float8_e4m3fn
(https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

import torch
from torch import Tensor

PEAK = 127
FP8 = torch.float8_e4m3fn
PEAKS = {torch.int8: float(PEAK), FP8: 448.0}  # what a row's largest magnitude becomes
SCALE_BYTES = 4  # of a float32 scale

# Smaller magnitudes would overflow `peak / largest`.
_LEAST = {torch.int8: 1e-36, FP8: 2e-36}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether rows of dtype have scales."""
    return dtype in PEAKS


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x `[..., size]` → (dtype `[..., size]`, float32 scales `[...]`), with x ≈ values * scale.

    The scale is the row's largest magnitude over that of dtype: 127 for int8, 448 for fp8. Values
    are rounded to the nearest, ties to even. A row of zeros has scale 0.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    # A tensor, because torch divides by a number as a product with its reciprocal, rounded twice.
    peak = largest.new_tensor(PEAKS[dtype])
    inverse = peak / largest.clamp_min(_LEAST[dtype])
    units = x * inverse[..., None]
    values = (units.round_() if dtype == torch.int8 else units).to(dtype)
    return values, largest / peak


def pack_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """x `[..., rows, size]` → dtype `[..., rows, size + SCALE_BYTES]`, as a KV pool holds it.

    The elements of all rows come first and their scales last (`split_rows`), which keeps the
    elements aligned.
    """
    *leading, rows, size = x.shape
    packed = torch.empty(*leading, rows, size + SCALE_BYTES, dtype=torch.int8, device=x.device)
    for to, values in zip(split_rows(packed), quantized_bytes(x, dtype), strict=True):
        to.copy_(values)
    return packed.view(dtype)


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `pack_rows`: `[..., rows, size + SCALE_BYTES]` → `[..., rows, size]` of dtype."""
    elements, scales = split_rows(packed)
    return elements.float().mul_(scales.contiguous().view(torch.float32)).to(dtype)


def split_rows(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Views of packed rows: elements `[..., rows, size]`, scales `[..., rows, SCALE_BYTES]`."""
    rows, width = packed.shape[-2:]
    elements = rows * (width - SCALE_BYTES)
    flat = packed.view(*packed.shape[:-2], -1)
    return (
        flat[..., :elements].unflatten(-1, (rows, -1)),
        flat[..., elements:].unflatten(-1, (rows, -1)),
    )


def quantized_bytes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x's packed rows as `split_rows` returns them, viewed as int8: few operations support fp8."""
    values, scales = quantize_rows(x, dtype)
    return values.view(torch.int8), scales[..., None].view(torch.int8)
