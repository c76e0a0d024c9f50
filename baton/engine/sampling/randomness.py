"""Random numbers that depend on a seed and a position, and on nothing else.

A token sampled on another worker, in another batch or after a failover must be the same token:
there is no generator state.

Source: SplitMix64, G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014, with the constants of S. Vigna's public-domain splitmix64.c. Its n-th output is
`mix(seed + n * GAMMA)`, which can be computed without the ones before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
# A float64 holds 53 bits: the 11 lowest are dropped so that 1.0 is never reached by rounding.
_DROPPED_BITS = np.uint64(11)
_UNIT = 2.0**-53


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
