"""Which workers cache which blocks, by the blocks' hashes, as the workers report them.

A hint: only a worker compares tokens. What a prompt finds costs one look-up for each block that any
worker caches, however many workers there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class PrefixIndex:
    """For each hash a mask of the workers that cache it. A worker's bit is its slot."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._cached: dict[int, set[int]] = {}  # by slot
        self._num_slots = 0  # ever

    def join(self) -> int:
        """A slot for a worker that caches nothing yet."""
        slot = next(slot for slot in itertools.count() if slot not in self._cached)
        self._cached[slot] = set()
        self._num_slots = max(self._num_slots, slot + 1)
        return slot

    def leave(self, slot: int) -> None:
        self.clear(slot)
        del self._cached[slot]

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

    def holders(self, hashes: Iterable[int]) -> list[tuple[int, int]]:
        """Masks of the workers that cache all of a prompt's blocks so far, and for how many more
        blocks each stays the same."""
        found: list[tuple[int, int]] = []
        holding = (1 << self._num_slots) - 1
        for block in hashes if self._holders else ():
            still = holding & self._holders.get(block, 0)
            if not still:
                break
            if found and still == holding:
                found[-1] = still, found[-1][1] + 1
            else:
                found.append((still, 1))
            holding = still
        return found

    def leading(self, hashes: Iterable[int]) -> npt.NDArray[np.float64]:
        """By slot: how many of a prompt's first blocks the worker caches."""
        num_bytes = self._num_slots // 8 + 1
        found = self.holders(hashes)
        masks = b"".join(mask.to_bytes(num_bytes, "little") for mask, _ in found)
        packed = np.frombuffer(masks, np.uint8).reshape(-1, num_bytes)
        bits = np.unpackbits(packed, axis=1, bitorder="little")
        blocks: npt.NDArray[np.float64] = np.array([n for _, n in found], np.float64) @ bits
        return blocks


def leading_of(holders: Iterable[tuple[int, int]], slot: int) -> int:
    """As `PrefixIndex.leading`, of one worker."""
    return sum(blocks for mask, blocks in holders if mask >> slot & 1)
