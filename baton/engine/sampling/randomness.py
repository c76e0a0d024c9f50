"""Random numbers that depend on a seed and a position, and on nothing else.

A token sampled on another worker, in another batch or after a failover must be the same token, and
random weights (`RandomTensors`) the same on different GPUs: there is no generator state.

Source: SplitMix64, G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014, with the constants of S. Vigna's public-domain splitmix64.c. Its n-th output is
`mix(seed + n * GAMMA)`, which can be computed without the ones before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
# A float64 holds 53 bits: the 11 lowest are dropped so that 1.0 is never reached by rounding.
_DROPPED_BITS = np.uint64(11)
_UNIT = 2.0**-53
# torch has no unsigned arithmetic of 64 bits; products and sums of signed numbers wrap to the same
# bits.
_SIGNED_GAMMA, _SIGNED_FIRST, _SIGNED_SECOND = (
    int(constant) - (1 << 64) for constant in (_GAMMA, _FIRST_FACTOR, _SECOND_FACTOR)
)
_BITS = 24  # of a float32's mantissa: each element is made of so many, without rounding
_AT_ONCE = 1 << 22  # elements, which take 8 bytes each, several times, while they are computed


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), one for each (seed, position) pair; shapes `[n]`, `[n]` to `[n]`.

    Seeds are unsigned 64-bit, positions at least 0. The values are part of the contract between
    workers of different versions: they never change.
    """
    seed_bits = np.asarray(seeds, dtype=np.uint64).reshape(-1)
    offset = (np.asarray(positions, dtype=np.uint64).reshape(-1) + _ONE) * _GAMMA
    # Seeds are mixed first: callers choose 1, 2, 3, and neighbours must not share a sequence.
    bits = splitmix64(splitmix64(seed_bits + _GAMMA) + offset)
    return (bits >> _DROPPED_BITS).astype(np.float64) * _UNIT


def splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output for each state, a bijection of 64-bit words; any shape but `[]`."""
    mixed = (state ^ (state >> np.uint64(30))) * _FIRST_FACTOR
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_FACTOR
    return mixed ^ (mixed >> np.uint64(31))


class RandomTensors:
    """Makes one tensor after the other: element n of all is a function of (seed, n)."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._made = 0

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype, std: float) -> Tensor:
        """Numbers around 0 with this standard deviation, evenly spread over ±std * sqrt(3)."""
        out = torch.empty(math.prod(shape), dtype=dtype, device=self._device)
        for piece in out.split(_AT_ONCE):
            piece.copy_(_even(self._words(len(piece)), std))
        return out.view(shape)

    def _words(self, count: int) -> Tensor:
        """The next 64-bit words, int64 `[count]`."""
        first = self._made + 1
        self._made += count
        state = torch.arange(first, first + count, dtype=torch.int64, device=self._device)
        state = state.mul_(_SIGNED_GAMMA).add_(self._seed)
        state = _mixed(state, 30).mul_(_SIGNED_FIRST)
        state = _mixed(state, 27).mul_(_SIGNED_SECOND)
        return _mixed(state, 31)


def _mixed(state: Tensor, bits: int) -> Tensor:
    """`state ^ (state >> bits)` of unsigned words: what a signed shift copies in is masked out."""
    return state.bitwise_xor_((state >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _even(words: Tensor, std: float) -> Tensor:
    """float32: each word's highest bits as one of 2 ** 24 steps, symmetric around 0."""
    steps = (words >> (64 - _BITS)).bitwise_and_((1 << _BITS) - 1).float()
    steps -= (2**_BITS - 1) / 2  # a half-integer of 24 bits: exact
    return steps.mul_(std * math.sqrt(12) / 2**_BITS)
