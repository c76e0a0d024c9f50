"""Prompts of simulated requests: their lengths, and which of their blocks are equal to others'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from baton.bench.request import Demand
from baton.block_hash import block_hash, root_hash

_WORD = (1 << 32) - 1  # a token of a hash has four bytes
_ROOT = root_hash("")


class Prompt(Sequence[int]):
    """A prompt in which each full block is represented by one number, instead of its tokens.

    The router hashes blocks by slices of the prompt, which have that one number here: prompts of
    thousands of tokens cost no more than their number of blocks.
    """

    def __init__(self, demand: Demand, block_size: int) -> None:
        self._num_tokens = max(1, demand.prompt_tokens)
        self._block_size = block_size
        self.blocks = list(_blocks(demand.parts, block_size))  # a number for each full block
        self.hashes: list[int] = []  # of its leading blocks, as far as they were needed

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, where: int) -> int: ...
    @overload
    def __getitem__(self, where: slice) -> Sequence[int]: ...
    def __getitem__(self, where: int | slice) -> int | Sequence[int]:
        if isinstance(where, int):
            raise TypeError("a simulated prompt has no tokens")
        size = self._block_size
        return tuple(self.blocks[(where.start or 0) // size : -(-where.stop // size)])

    @property
    def units(self) -> list[int]:
        """Its blocks for a block manager of one token a block, the last one as of a longer prompt.

        The last token of a prompt is never cached.
        """
        return (
            self.blocks if len(self.blocks) * self._block_size == len(self) else [*self.blocks, 0]
        )

    def leading_hashes(self, count: int) -> list[int]:
        """The hashes of its leading full blocks, each of all tokens up to its end: `count` or more
        of them."""
        hashes, parent = self.hashes, self.parent_of(len(self.hashes))
        for at in range(len(hashes), count):
            parent = block_hash(parent, (self.blocks[at],))
            hashes.append(parent)
        return hashes

    def parent_of(self, index: int) -> int:
        return self.hashes[index - 1] if index else _ROOT


def _blocks(parts: tuple[tuple[int, int], ...], size: int) -> Iterator[int]:
    """A number for each full block, equal where seeds and places of its tokens are."""
    key: list[int] = []  # of the block so far: seeds, and where they begin in their parts
    filled = 0
    for seed, length in parts:
        at = 0
        while at < length:
            taken = min(size - filled, length - at)
            key += (seed, at)
            at, filled = at + taken, filled + taken
            if filled == size:
                yield hash(tuple(key)) & _WORD
                key, filled = [], 0
