"""RMS norm in plain torch, the reference of `kernels/native/src/rows.cpp` and of Triton's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """An RMS norm. weight: `[size]`, of the rows' type or float32."""

    weight: Tensor
    eps: float


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, mean_square: Tensor | None = None
) -> Tensor:
    """x `[..., size]` scaled to unit mean square, in float32, times weight `[size]`, if any.

    Rounded to x's type before the multiplication with a weight of that type, and after it with a
    float32 weight. mean_square: `[..., 1]`, where x is a part of the normed row.
    """
    wide = x.float()
    if mean_square is None:
        mean_square = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(mean_square + eps)
    return (wide if weight is None else weight * wide.to(weight.dtype)).to(x.dtype)
