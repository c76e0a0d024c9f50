"""Reading and joining the tensors of a checkpoint that a weight is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Get = Callable[[str], Tensor | None]
"""Reads a checkpoint's tensor by its name; None where it has none of that name."""


def require(get: Get, name: str) -> Tensor:
    """A tensor that the checkpoint has."""
    tensor = get(name)
    assert tensor is not None, "the checkpoint's tensors were checked"
    return tensor


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Tensors joined along the first axis."""
    return torch.cat([part.contiguous() for part in parts])
