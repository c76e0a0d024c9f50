"""Made-up weights computed where they are used, the same on every GPU.

A generator's numbers depend on the machine: on a GPU they follow the number of its processors. Here
element n of all weights is a whole-number function of (seed, n): SplitMix64's n-th output, as in
`baton.engine.sampling.randomness`, of which 24 bits become a float32 without rounding. So workers
on different GPUs hold the same model, and a billion weights take a moment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# torch has no unsigned arithmetic of 64 bits; products and sums of signed numbers wrap to the same
# bits. Source of the constants: `baton.engine.sampling.randomness`.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
_BITS = 24  # of a float32's mantissa
_AT_ONCE = 1 << 22  # elements, which take 8 bytes each, several times, while they are computed


class Noise:
    """Draws one tensor after the other; the sequence follows the seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._drawn = 0

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, std: float) -> Tensor:
        """Numbers around 0 with this standard deviation, evenly spread over ±std * sqrt(3)."""
        out = torch.empty(math.prod(shape), dtype=dtype, device=self._device)
        for piece in out.split(_AT_ONCE):
            piece.copy_(_even(self._words(len(piece)), std))
        return out.view(shape)

    def _words(self, count: int) -> Tensor:
        """The next 64-bit words, int64 `[count]`."""
        first = self._drawn + 1
        self._drawn += count
        state = torch.arange(first, first + count, dtype=torch.int64, device=self._device)
        state = state.mul_(_GAMMA).add_(self._seed)
        state = _mixed(state, 30).mul_(_FIRST_FACTOR)
        state = _mixed(state, 27).mul_(_SECOND_FACTOR)
        return _mixed(state, 31)


def _mixed(state: Tensor, bits: int) -> Tensor:
    """`state ^ (state >> bits)` of unsigned words: what a signed shift copies in is masked out."""
    return state.bitwise_xor_((state >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _even(words: Tensor, std: float) -> Tensor:
    """float32: each word's highest bits as one of 2 ** 24 steps, symmetric around 0."""
    steps = (words >> (64 - _BITS)).bitwise_and_((1 << _BITS) - 1).float()
    steps -= (2**_BITS - 1) / 2  # a half-integer of 24 bits: exact
    return steps.mul_(std * math.sqrt(12) / 2**_BITS)
