"""Groups of decoder layers with a block table each, and the blocks that attention windows need.

Layers with the same window form groups of one size, so that a block of any group has the same
bytes and all groups share a pool. (After vLLM's hybrid KV cache allocator.) A block belongs to one
group while it is held or cached. A sequence's block ids are, for every `block_size` tokens in
order, one block of each group:

    tokens      0 ... 15          16 ... 31         32 ... 47
    block_ids   g0  g1  g2        g0  g1  g2        g0  g1  g2
                    -1  -1                          (g1, g2: the first blocks are behind the window)

A group with a window needs no block that lies wholly behind it: its entry is `NO_BLOCK`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

NO_BLOCK = -1
MAX_TOKENS = 1 << 27  # of a sequence, where the pool sets no limit
_GROUP_COST = 0.5  # of one more group, in layers: a table is written and read for it


def held(block_ids: Iterable[int]) -> list[int]:
    """The blocks among entries of `block_ids`."""
    return [block for block in block_ids if block != NO_BLOCK]


@dataclass(frozen=True)
class KvGroups:
    """The groups of a model whose blocks hold `block_size` tokens.

    windows: for each group, the number of tokens that a token attends to, itself included; 0: all ·
    state_blocks: blocks that a sequence has besides, for its state; then no group has a window.
    """

    windows: tuple[int, ...] = (0,)
    block_size: int = 16
    state_blocks: int = 0

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The window of each group, in tokens or "full"; then "state", if there are states."""
        windows = tuple(str(window or "full") for window in self.windows)
        return (*windows, "state") if self.state_blocks else windows

    @cached_property
    def slide(self) -> bool:
        """Whether some group has a window."""
        return any(self.windows)

    def first_blocks(self, position: int) -> list[int]:
        """For each group, the index of the first block that the token at `position` attends to."""
        size = self.block_size
        return [max(0, position + 1 - window) // size if window else 0 for window in self.windows]

    def handoff_start(self, cached_tokens: int, num_tokens: int) -> int:
        """The first token whose KV a handoff of `num_tokens` sends, if these are cached."""
        return max(cached_tokens, min(self.first_blocks(num_tokens)) * self.block_size)

    def handoff_end(self, num_tokens: int) -> int:
        """The token slots of a handoff of `num_tokens`: with a state those of whole blocks, the
        state's last."""
        if not self.state_blocks:
            return num_tokens
        return (-(-num_tokens // self.block_size) + self.state_blocks) * self.block_size

    def needed(
        self, block_ids: Sequence[int], first: int, end: int, position: int
    ) -> tuple[int, ...]:
        """Blocks of the block indexes [first, end) that tokens from `position` on attend to."""
        count = len(self.windows)
        some = block_ids[first * count : end * count]
        if not self.slide:
            return tuple(some)
        begins = [(at - first) * count for at in self.first_blocks(position)]
        return tuple(
            block for at, block in enumerate(some) if at - at % count >= begins[at % count]
        )

    def behind(self, block_ids: Sequence[int], position: int) -> list[int]:
        """Entries whose blocks are behind the windows of the token at `position`."""
        count, found = len(self.windows), list[int]()
        for group, first in enumerate(self.first_blocks(position)):
            at = (min(first, len(block_ids) // count) - 1) * count + group
            while at >= 0 and block_ids[at] != NO_BLOCK:  # earlier ones were released before
                found.append(at)
                at -= count
        return found

    def missing(
        self, block_ids: Sequence[int], position: int, ahead: int, needed: int
    ) -> list[int]:
        """Entries without a block that tokens from `position` on need, in order.

        ahead, needed: block indexes that groups with a window and other groups need in front of.
        """
        count, end, found = len(self.windows), len(block_ids) // len(self.windows), list[int]()
        for group, first in enumerate(self.first_blocks(position)):
            indexes = range(first, ahead) if self.windows[group] else range(end, needed)
            entries = (index * count + group for index in indexes)
            found += [at for at in entries if at >= len(block_ids) or block_ids[at] == NO_BLOCK]
        return sorted(found)

    def cached_prefix(self, block_ids: list[int]) -> list[int]:
        """The longest prefix behind which no token misses a block; without those behind windows."""
        count, best = len(self.windows), 0
        gaps = [-1] * count  # the last index at which each group has no block
        for end in range(1, len(block_ids) // count + 1):
            row = block_ids[(end - 1) * count : end * count]
            gaps = [
                end - 1 if block == NO_BLOCK else gap for block, gap in zip(row, gaps, strict=True)
            ]
            firsts = self.first_blocks(end * self.block_size)
            if all(gap < first for gap, first in zip(gaps, firsts, strict=True)):
                best = end
        found = block_ids[: best * count]
        for group, first in enumerate(self.first_blocks(best * self.block_size)):
            found[group : first * count : count] = [NO_BLOCK] * first
        return found

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds, if a step computes `step_tokens`."""
        size = self.block_size
        whole = -(-num_tokens // size)
        return self.state_blocks + sum(
            min(whole, -(-(window + step_tokens) // size) + 1) if window else whole
            for window in self.windows
        )

    def longest(self, num_blocks: int, step_tokens: int) -> int:
        """Tokens of the longest sequence that a pool of `num_blocks` holds."""
        size, low, high = self.block_size, 0, MAX_TOKENS // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle * size, step_tokens) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * size


@dataclass(frozen=True)
class LayerGroups:
    """How a model's layers form groups.

    windows: as of `KvGroups` · size: layers of a block; a group may have fewer, or several smaller
    ones in the place of each · places: for each layer, its group and its index there.
    """

    windows: tuple[int, ...]
    size: int
    places: tuple[tuple[int, int], ...]

    @classmethod
    def from_windows(
        cls, windows: Sequence[int | None], shared_by: Sequence[int] = ()
    ) -> LayerGroups:
        """Groups of the layers with these windows; None: all tokens. Full attention comes first.

        shared_by: for each layer, how many like it take the place of one; 1 if it is empty.
        """
        shared_by = shared_by or [1] * len(windows)
        kinds = dict[tuple[int, int], list[int]]()
        for layer, (window, share) in enumerate(zip(windows, shared_by, strict=True)):
            kinds.setdefault((window or 0, share), []).append(layer)

        def groups(size: int) -> int:
            return sum(-(-len(layers) // (size * share)) for (_, share), layers in kinds.items())

        most = max(-(-len(layers) // share) for (_, share), layers in kinds.items())
        size = min(range(most, 0, -1), key=lambda size: groups(size) * (size + _GROUP_COST))
        of_groups, places = list[int](), dict[int, tuple[int, int]]()
        for window, share in sorted(kinds):
            for number, layer in enumerate(kinds[window, share]):
                if number % (size * share) == 0:
                    of_groups.append(window)
                places[layer] = len(of_groups) - 1, number % (size * share)
        return cls(tuple(of_groups), size, tuple(places[at] for at in range(len(windows))))
