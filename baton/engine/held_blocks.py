"""Counts of held KV blocks by kind: the group of layers that they belong to, or states."""

from __future__ import annotations

from collections.abc import Iterable


class HeldBlocks:
    """Counts blocks that have a holder. A block keeps its kind until it is allocated again."""

    def __init__(self, num_blocks: int, num_kinds: int) -> None:
        """num_kinds: groups of layers, and one more where blocks hold states, too."""
        self.counts = [0] * num_kinds
        self._kinds = [0] * num_blocks

    def allocated(self, blocks: Iterable[int], kinds: Iterable[int]) -> None:
        """Blocks got their first holder, for these kinds."""
        for block, kind in zip(blocks, kinds, strict=True):
            self._kinds[block] = kind
            self.counts[kind] += 1

    def held_again(self, block: int) -> None:
        """A cached block got a holder."""
        self.counts[self._kinds[block]] += 1

    def released(self, block: int) -> None:
        """A block lost its last holder."""
        self.counts[self._kinds[block]] -= 1

    def counted(self, held: Iterable[int]) -> list[int]:
        """The counts of these blocks by kind."""
        found = [0] * len(self.counts)
        for block in held:
            found[self._kinds[block]] += 1
        return found
