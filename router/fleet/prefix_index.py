"""Which workers cache which blocks, by the blocks' hashes, as the workers report them.

A hint: only a worker compares tokens. What a prompt finds costs one look-up for each block that any
worker caches, however many workers there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set

import numpy as np
import numpy.typing as npt

_FEW = 8  # bits of a mask that are sooner found one by one


class PrefixIndex:
    """For each hash a mask of the workers that cache it. A worker's bit is its slot."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._cached: dict[int, set[int]] = {}  # by slot

    def join(self) -> int:
        """A slot for a worker that caches nothing yet."""
        slot = next(slot for slot in itertools.count() if slot not in self._cached)
        self._cached[slot] = set()
        return slot

    def leave(self, slot: int) -> None:
        self.clear(slot)
        del self._cached[slot]

    def cached(self, slot: int) -> Set[int]:
        """All hashes of a worker. Read at once: the set changes."""
        return self._cached[slot]

    def store(self, slot: int, hashes: Iterable[int]) -> None:
        bit, own, holders = 1 << slot, self._cached[slot], self._holders
        own.update(hashes)
        for block in hashes:
            # Most blocks have one holder: these share one object.
            holders[block] = holders[block] | bit if block in holders else bit

    def evict(self, slot: int, hashes: Iterable[int]) -> None:
        others, own = ~(1 << slot), self._cached[slot]
        for block in hashes:
            if block in own:
                own.remove(block)
                if left := self._holders[block] & others:
                    self._holders[block] = left
                else:
                    del self._holders[block]

    def clear(self, slot: int) -> None:
        self.evict(slot, tuple(self._cached[slot]))

    def leading(self, hashes: Iterable[int]) -> npt.NDArray[np.float64]:
        """By slot: how many of a prompt's first blocks the worker caches."""
        size = max(self._cached, default=0) + 1
        blocks = np.zeros(size)
        if not self._holders:
            return blocks
        number, holding = 0, (1 << size) - 1
        for block in hashes:
            still = holding & self._holders.get(block, 0)
            if still != holding:
                blocks[_slots(holding & ~still)] = number
                holding = still
                if not holding:
                    break
            number += 1
        blocks[_slots(holding)] = number
        return blocks


def _slots(mask: int) -> list[int] | npt.NDArray[np.intp]:
    """The bits that are set."""
    if mask.bit_count() > _FEW:
        data = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
        return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))
    slots = []
    while mask:
        slots.append(mask.bit_length() - 1)
        mask ^= 1 << slots[-1]
    return slots
