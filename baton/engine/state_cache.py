"""Blocks of models with states (linear attention), and checkpoints of states in the prefix cache.

There a cached prefix is usable only with the state at its end, which later tokens change in place.
A checkpoint is a copy of that state, in its own blocks, cached with the hash of the prefix's last
block. KV is cached only as far as a checkpoint follows it, and evicted with the last one that does:
checkpoints are evicted in LRU order, and with each the KV that led to it alone.

    a - b* - c - d*     *: a checkpoint follows. Evicting that of d frees the blocks of d and c;
          \\ e*          evicting that of b frees no KV.

Checkpoints are taken of the state after a step, and a chunk ends where one is wanted: where a
prompt leaves a cached one, as others may leave it there, too (after Marconi, MLSys 2025); at its
last full block, from which a conversation goes on; and in long prompts at distances at which the KV
between takes as many blocks as a checkpoint, so that those at most double its memory. A decoding
sequence has one checkpoint, which moves along.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from baton.engine.block_manager import BlockManager
from baton.engine.sequence import Sequence
from baton.kv_groups import KvGroups

# Tokens that a checkpoint has to save: it costs the end of a chunk, a copy, and its blocks.
MIN_CHECKPOINT = 256

_STATE = 1  # the kind of a state's blocks, beside those of KV


class CachedPrefix(NamedTuple):
    """What the blocks of a prefix hold. hashes: of each block · root: the parent of the first."""

    hashes: list[int]
    root: int
    tokens: list[int]


class StateBlockManager(BlockManager):
    """Allocates blocks for KV and states. Checkpoints of states are copied by `copy`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool,
        state_blocks: int,
        zero: Callable[[list[int]], object],
        copy: Callable[[list[int], list[int]], object],
    ) -> None:
        """state_blocks: of each state · zero: zeroes blocks' memory · copy: copies that of its
        first blocks to its second ones."""
        super().__init__(num_blocks, block_size, prefix_cache, num_kinds=2)
        self.groups = KvGroups((0,), block_size, state_blocks)
        self._zero, self._copy = zero, copy
        self.has_checkpoints = prefix_cache
        self._not_kv: set[int] = set()  # blocks whose last content was a state
        self._checkpoints: OrderedDict[int, list[int]] = OrderedDict()  # by hash, oldest first
        self._children: Counter[int] = Counter()  # cached blocks by their parents

    @property
    def num_cached(self) -> int:
        """Blocks that are not held and cache a prefix, or a part of a checkpoint."""
        return len(self._evictable) + len(self._checkpoints) * self.groups.state_blocks

    def allocate(self, count: int, kinds: Tokens[int] = ()) -> list[int] | None:
        """Blocks for KV: no bytes of a state are left in them, which read as KV might be numbers
        that are not finite."""
        blocks = self._allocate(count, kinds)
        if blocks and (stale := self._not_kv.intersection(blocks)):
            self._zero(sorted(stale))
            self._not_kv -= stale
        return blocks

    def allocate_state(self) -> list[int] | None:
        """Blocks for a state with one holder each, or None when there are not enough."""
        count = self.groups.state_blocks
        blocks = self._allocate(count, [_STATE] * count)
        self._not_kv.update(blocks or ())
        return blocks

    def checkpointed(self, hashes: list[int]) -> int:
        """The length, in blocks, of the longest prefix of these hashes that has a checkpoint."""
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._checkpoints:
                self._checkpoints.move_to_end(hashes[count - 1])
                return count
        return 0

    def wants_checkpoint(self, sequence: Sequence, end: int, decodes: bool) -> bool:
        """Whether a checkpoint is wanted of a sequence's state after `end` tokens.

        decodes: whether those are all of its known tokens, or all but one that was just sampled.
        """
        moves = decodes and end % self.block_size == 0
        moves = moves and end - sequence.checkpoint >= MIN_CHECKPOINT
        return self.has_checkpoints and (moves or end in sequence.checkpoints)

    def load_state(self, block_hash: int, state: list[int]) -> bool:
        """Copies the checkpoint after the block of a hash to a state; False if it was evicted."""
        copy = self._checkpoints.get(block_hash)
        if copy is not None:
            self._copy(copy, state)
        return copy is not None

    def cache_state(
        self, state: list[int], blocks: list[int], prefix: CachedPrefix, moved: int | None = None
    ) -> bool:
        """Caches a prefix's held, verified blocks, with a copy of the state after them.

        moved: the hash of a checkpoint that this one takes the place of. Returns whether there is a
        new checkpoint: not if there is one already, or too few blocks.
        """
        end, size, parents = prefix.hashes[-1], self.block_size, [prefix.root, *prefix.hashes]
        if end in self._checkpoints:
            return False
        known = self._by_hash[0].get(end)
        last = parents[-2], tuple(prefix.tokens[-size:])
        if known is not None and self._entries[known][1:3] != last:
            return False  # other content has this hash
        copy = self._checkpoints.pop(moved, None) if moved is not None else None
        if copy is None and (copy := self.allocate_state()) is None:
            return False
        for index, (block, block_hash) in enumerate(zip(blocks, prefix.hashes, strict=True)):
            tokens = prefix.tokens[index * size : (index + 1) * size]
            self.cache_block(block, block_hash, parents[index], tokens)
        for block in copy:
            if self._refs[block]:
                self.held_by_kind.released(block)
            self._refs[block] = 0
        self._copy(state, copy)
        self._checkpoints[end] = copy
        if moved is not None:
            self._prune(moved)
        return True

    def cache_block(
        self, block: int, block_hash_: int, parent: int, tokens: Tokens[int], group: int = 0
    ) -> None:
        """As of `BlockManager`; a part of `cache_state`, which adds the checkpoint."""
        num_entries = len(self._entries)
        super().cache_block(block, block_hash_, parent, tokens, group)
        self._children[parent] += len(self._entries) - num_entries

    def uncache(self, blocks: Iterable[int]) -> list[int]:
        """As `BlockManager.uncache`, and evicts KV that no longer leads to a checkpoint."""
        parents = [entry.parent for block in blocks if (entry := self._entries.get(block))]
        private = super().uncache(blocks)
        for parent in parents:
            self._prune(parent)
        return private

    def drop_checkpoints(self, hashes: Iterable[int]) -> None:
        """Frees the checkpoints after blocks of these hashes, and the KV that led to them alone."""
        for block_hash in self._checkpoints.keys() & hashes:
            self._free.extend(self._checkpoints.pop(block_hash))
            self._prune(block_hash)

    def check(self) -> None:
        """Asserts every invariant of this class."""
        super().check()
        entries = self._entries.values()
        parents = Counter(entry.parent for entry in entries)
        assert +self._children == parents, "cached blocks are counted at their parents"
        assert self._checkpoints.keys() <= self._by_hash[0].keys(), "it follows a cached block"
        assert all(entry.hash in self._checkpoints or parents[entry.hash] for entry in entries), (
            "a checkpoint follows each cached block"
        )

    def _cached_blocks(self) -> set[int]:
        return super()._cached_blocks().union(*self._checkpoints.values())

    def _allocate(self, count: int, kinds: Tokens[int]) -> list[int] | None:
        if count <= self.num_available:
            while len(self._free) < count:
                self.drop_checkpoints([next(iter(self._checkpoints))])
        return super().allocate(count, kinds)

    def _prune(self, block_hash: int) -> None:
        """Uncaches the block of a hash and those before it, as far as no checkpoint follows."""
        by_hash = self._by_hash[0]
        while block_hash in by_hash:
            if block_hash in self._checkpoints or self._children[block_hash]:
                return
            block = by_hash[block_hash]
            block_hash = self._entries[block].parent
            self._remove_entry(block)
            if not self._refs[block]:
                del self._evictable[block]
                self._free.append(block)

    def _remove_entry(self, block: int) -> None:
        self._children[self._entries[block].parent] -= 1
        super()._remove_entry(block)


def plan_checkpoints(blocks: StateBlockManager, sequence: Sequence) -> None:
    """Finds the checkpoint of a sequence that has cached blocks only, and plans others after it."""
    size, num_cached = blocks.block_size, len(sequence.block_ids)
    kept = blocks.checkpointed(sequence.block_hashes[:num_cached])
    sequence.checkpoint, sequence.moving = kept * size, None
    if not blocks.has_checkpoints:
        return
    last = (sequence.num_tokens - 1) // size
    spacing = max(MIN_CHECKPOINT // size, blocks.groups.state_blocks)
    ends = {num_cached, last, *range(spacing, last, spacing)}
    worth = kept + MIN_CHECKPOINT // size
    sequence.checkpoints = sorted(end * size for end in ends if end >= worth)


def take_checkpoint(blocks: StateBlockManager, sequence: Sequence, end: int) -> None:
    """Takes a checkpoint of a sequence's state, that after `end` tokens, if one is wanted there."""
    size, planned = blocks.block_size, end in sequence.checkpoints
    if not blocks.wants_checkpoint(sequence, end, decodes=end >= sequence.num_tokens - 1):
        return
    count = end // size
    hashes = [sequence.hash_of(index, size) for index in range(count)]
    prefix = CachedPrefix(hashes, sequence.parent_hash(0), sequence.tokens[:end])
    moved = None if planned else sequence.moving
    held = sequence.block_ids[:count]
    is_new = blocks.cache_state(sequence.state_blocks, held, prefix, moved)
    sequence.checkpoint = end
    if not planned:
        sequence.moving = hashes[-1] if is_new else None
