"""Which workers cache which blocks, by the blocks' hashes, as the workers report them.

A hint: only a worker compares tokens. What a prompt finds costs one look-up for each block that any
worker caches, however many workers there are. Prompts that workers still compute are compared by
their tokens: their blocks are about to be cached there.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

# Blocks taken in at a turn of the loop, which takes 1 to 3 ms: a router that starts gets the whole
# caches of all workers at once.
MOST_AT_ONCE = 4096
_PART = 256
_START_TOKENS = 16
_MOST_COMPARED = 4  # prompts in work, the first ones

_Start = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class AssignedPrompt:
    """A prompt that a worker has from this router and is not known to have computed."""

    num_tokens: int  # left to compute, to the router's knowledge
    virtual_finish: float  # workers compute the earliest first
    token_ids: Sequence[int] = ()  # all of it
    salt: str = ""  # of its KV


class KvIndex:
    """For each hash a mask of the workers that cache it. A worker's bit is its slot."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        # By slot: all that it caches, and no more than about as much that it did.
        self._stored: dict[int, array[int]] = {}
        self._num_cached: dict[int, int] = {}  # by slot
        self._num_slots = 0  # ever
        self._work: deque[Iterator[int]] = deque()  # yields how many blocks it has done
        # By salt and first tokens, then by sequence: prompts in work, with their workers' slots.
        self._in_work: dict[_Start, dict[str, tuple[int, AssignedPrompt]]] = {}

    def join(self) -> int:
        """A slot for a worker that caches nothing yet."""
        slot = next(slot for slot in itertools.count() if slot not in self._stored)
        self._stored[slot], self._num_cached[slot] = array("Q"), 0
        self._num_slots = max(self._num_slots, slot + 1)
        return slot

    def take(
        self,
        slot: int,
        stored: Sequence[int],
        evicted: Sequence[int] = (),
        *,
        cleared: bool = False,
    ) -> None:
        """Takes in what a worker reports; `cleared`: that it cached nothing before.

        At once if it is little, else in parts, in which others' reports wait for it: for a hint no
        order matters but that of one worker.
        """
        num_blocks = len(stored) + len(evicted) + cleared * len(self._stored[slot])
        self._add(self._taking(slot, stored, evicted, cleared), num_blocks)

    def leave(self, slot: int) -> None:
        """The slot is free when all of it is forgotten."""
        self._add(self._leaving(slot), len(self._stored[slot]))

    def begin(self, name: str, slot: int, prompt: AssignedPrompt) -> None:
        """A worker gets a sequence's prompt to compute, until `end`."""
        self._in_work.setdefault(_start_of(prompt.salt, prompt.token_ids), {})[name] = slot, prompt

    def end(self, name: str, prompt: AssignedPrompt) -> None:
        """The worker has computed the prompt, or will not."""
        start = _start_of(prompt.salt, prompt.token_ids)
        del self._in_work[start][name]
        if not self._in_work[start]:
            del self._in_work[start]

    def in_work(
        self, salt: str, token_ids: Sequence[int], least: float = 0.0
    ) -> Iterator[tuple[int, int, int]]:
        """Slots of workers that compute leading tokens of a prompt for another one: how many of
        them, and how many of these were left to compute, if they are `least` or more."""
        alike = self._in_work.get(_start_of(salt, token_ids), {})
        for slot, prompt in islice(alike.values(), _MOST_COMPARED):
            if prompt.num_tokens < least:
                continue
            common = _common_tokens(token_ids, prompt.token_ids)
            if (left := min(common, prompt.num_tokens)) >= least:
                yield slot, common, left

    def store(self, slot: int, hashes: Iterable[int]) -> None:
        bit, own, holders = 1 << slot, self._stored[slot], self._holders
        before = len(own)
        for block in hashes:
            # Most blocks have one holder: these share one object.
            if not (held := holders.get(block, 0)):
                holders[block] = bit
            elif held & bit:
                continue
            else:
                holders[block] = held | bit
            own.append(block)
        self._num_cached[slot] += len(own) - before
        if len(own) > 2 * self._num_cached[slot] + MOST_AT_ONCE:
            self._stored[slot] = array("Q", {one for one in own if holders.get(one, 0) & bit})

    def evict(self, slot: int, hashes: Iterable[int]) -> None:
        bit, holders = 1 << slot, self._holders
        for block in hashes:
            if (held := holders.get(block, 0)) & bit:
                self._num_cached[slot] -= 1
                if held == bit:
                    del holders[block]
                else:
                    holders[block] = held ^ bit

    def _taking(
        self, slot: int, stored: Sequence[int], evicted: Sequence[int], cleared: bool
    ) -> Iterator[int]:
        if cleared:
            before, self._stored[slot] = self._stored[slot], array("Q")
            yield from self._in_parts(self.evict, slot, before)
        yield from self._in_parts(self.evict, slot, evicted)
        yield from self._in_parts(self.store, slot, stored)

    def _leaving(self, slot: int) -> Iterator[int]:
        yield from self._taking(slot, (), (), cleared=True)
        del self._stored[slot], self._num_cached[slot]

    @staticmethod
    def _in_parts(
        run: Callable[[int, Sequence[int]], None], slot: int, hashes: Sequence[int]
    ) -> Iterator[int]:
        for start in range(0, len(hashes), _PART):
            part = hashes[start : start + _PART]
            run(slot, part)
            yield len(part)

    def _add(self, work: Iterator[int], num_blocks: int) -> None:
        self._work.append(work)
        if len(self._work) == 1:
            if num_blocks <= _PART:
                self._turn()
            else:
                asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Goes on with what waits, in order, until it has done as much as fits a turn."""
        left = MOST_AT_ONCE
        while self._work and left > 0:
            done = next(self._work[0], None)
            if done is None:
                self._work.popleft()
            else:
                left -= done
        if self._work:
            asyncio.get_running_loop().call_soon(self._turn)

    def _holders_of(self, hashes: Iterable[int]) -> list[tuple[int, int]]:
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

    def leading(self, hashes: Iterable[int]) -> npt.NDArray[np.float64] | None:
        """By slot: leading blocks of a prompt that the worker caches; None if no worker has any."""
        num_bytes = self._num_slots // 8 + 1
        if not (found := self._holders_of(hashes)):
            return None
        masks = b"".join(mask.to_bytes(num_bytes, "little") for mask, _ in found)
        packed = np.frombuffer(masks, np.uint8).reshape(-1, num_bytes)
        bits = np.unpackbits(packed, axis=1, bitorder="little")
        blocks: npt.NDArray[np.float64] = np.array([n for _, n in found], np.float64) @ bits
        return blocks


def _start_of(salt: str, prompt: Sequence[int]) -> _Start:
    return salt, tuple(prompt[:_START_TOKENS])


def _common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Equal leading tokens, in whole blocks of _START_TOKENS."""
    low, high = 0, min(len(one), len(other)) // _START_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _START_TOKENS, middle * _START_TOKENS)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low * _START_TOKENS
