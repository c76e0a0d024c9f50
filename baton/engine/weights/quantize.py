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
SCALE_BYTES = 4  # of a packed row: its scale is float32

# Smaller magnitudes would overflow `peak / largest`; they are nothing next to any activation.
_LEAST = {torch.int8: 1e-36, FP8: 2e-36}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether rows of a KV pool of dtype have a scale of their own."""
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
    """x `[..., rows, size]` → dtype `[..., rows, size + SCALE_BYTES]`: a KV pool's form of it.

    The elements of all rows, and behind them all scales (`split_rows`), so that every row of
    elements is aligned as its size is.
    """
    *leading, rows, size = x.shape
    packed = torch.empty(*leading, rows, size + SCALE_BYTES, dtype=torch.int8, device=x.device)
    for part, of_part in zip(split_rows(packed), quantized_bytes(x, dtype), strict=True):
        part.copy_(of_part)
    return packed.view(dtype)


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The way back: `[..., rows, size + SCALE_BYTES]` → `[..., rows, size]` of dtype."""
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
    """What `split_rows` gives of x's packed rows; int8, because few operations know fp8."""
    values, scales = quantize_rows(x, dtype)
    return values.view(torch.int8), scales[..., None].view(torch.int8)
