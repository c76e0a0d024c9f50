"""Quantisation: rows of int8 or fp8 with one float32 scale each (W8A8, and KV).

Every row is scaled by its own largest magnitude: an output of a weight, a token's activations, a
token's K or V of one head. A row's numbers thus depend on itself alone, never on what shares its
batch, its block or its chunk. Native kernels and those of GPUs compute by the same formulas; this
is their reference. fp8 is torch.float8_e4m3fn (https://arxiv.org/abs/2209.05433), which GPUs
multiply and CPUs do not: here its products are those of float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

PEAK = 127
FP8 = torch.float8_e4m3fn
PEAKS = {torch.int8: float(PEAK), FP8: 448.0}  # what a row's largest magnitude becomes
SCALE_BYTES = 4  # of a packed row: its scale, float32, behind its elements

# Smaller magnitudes would overflow `peak / largest`; they are nothing next to any activation.
_LEAST = {torch.int8: 1e-36, FP8: 2e-36}


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
