"""How far a kernel's result is from its reference's, and how far it may be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

# Of the difference's norm to the reference's. Results are rounded to their type, by the reference
# too: half of float32's 2**-24 grows with the length of sums, the others' 2**-11 and 2**-8 do not.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
_INTERPRETED = 2  # Triton's interpreter cuts off what a GPU rounds to bfloat16
_ONE_ROW = 4.0  # times as far may a single row be, which few numbers make up


Case: TypeAlias = Callable[[random.Random], "Error"]
"""Checks a kernel at a shape that the dice choose."""


class Wrong(Exception):
    """A result is further from its reference than rounding explains."""


@dataclass(frozen=True)
class Error:
    """The difference's norm to the reference's: over all, and of the worst row."""

    whole: float
    worst_row: float
    bound: float
    where: str = ""

    @property
    def share(self) -> float:
        """Of what is allowed: more than 1 is wrong. What was equal to the bit has 0."""
        if not self.bound:
            return 0.0
        return max(self.whole, self.worst_row / _ONE_ROW) / self.bound

    def check(self) -> None:
        """Raises Wrong."""
        if not self.share <= 1:  # so that NaN is refused
            raise Wrong(
                f"{self.where}: error {self.whole:.1e}, of the worst row {self.worst_row:.1e}; "
                f"allowed {self.bound:.1e} and {_ONE_ROW * self.bound:.1e}"
            )


def compare(found: Tensor, wanted: Tensor, bound: float | None = None) -> Error:
    """The error of found `[rows, ...]`, of the same shape and type as wanted.

    Raises Wrong if they are not alike, or if something is no number.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise Wrong(
            f"{tuple(found.shape)} of {found.dtype}, not {tuple(wanted.shape)} of {wanted.dtype}"
        )
    if bound is None:
        bound = BOUNDS[wanted.dtype] * (_INTERPRETED if wanted.device.type == "cpu" else 1)
    if not found.numel():
        return Error(0.0, 0.0, bound)
    found = found.reshape(len(found), -1).double()
    wanted = wanted.reshape(len(wanted), -1).double()
    if not found.isfinite().all():
        raise Wrong("the result has places that are no numbers")
    apart, size = (found - wanted).norm(dim=1), wanted.norm(dim=1)
    mean = size.square().mean().sqrt()
    if mean == 0:
        nothing = float("inf") if apart.any() else 0.0
        return Error(nothing, nothing, bound)
    # A row of zeros, or of nearly nothing, is held against the others' size.
    rows = apart / size.maximum(0.01 * mean)
    return Error(float(apart.norm() / size.norm()), float(rows.max()), bound)


def equal(found: Tensor, wanted: Tensor) -> Error:
    """The same for results that have to be equal to the bit. Raises Wrong where they are not."""
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    if not same or not torch.equal(_bits(found), _bits(wanted)):
        raise Wrong("not equal to the bit")
    return Error(0.0, 0.0, 0.0)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def worst(errors: Iterable[Error]) -> Error:
    """The one that uses most of its bound."""
    return max(errors, key=lambda error: error.share)


def at(error: Error, where: str) -> Error:
    """The error with the shape it was found at."""
    return replace(error, where=where)


def poison(device: torch.device, nbytes: int) -> None:
    """Fills memory that is then given back, so that a result's untouched places are no numbers."""
    if device.type == "cuda":
        # Of all sizes: the allocator keeps small and large pieces apart.
        for size in (1 << 16, 1 << 20, max(nbytes, 1 << 21)):
            torch.full((size // 4,), float("nan"), device=device)
