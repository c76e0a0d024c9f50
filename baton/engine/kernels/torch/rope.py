"""Rotary embedding in plain torch, the reference of native code and of Triton's `rope_kv`."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x `[rows, heads, head_size]` by cos and sin `[rows, 1, head_size]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
