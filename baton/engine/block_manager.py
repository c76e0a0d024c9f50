"""The block manager: reference counts of KV blocks, and the prefix cache with LRU eviction.

Bookkeeping over block numbers; the memory is allocated by `kv_cache`. A block is in exactly one of
four states, which `check()` proves:

    free         not held, with no cached content
    cached       not held, with content of the prefix cache, until it is evicted
    held         one or more sequences hold it; it may be in the prefix cache too
    quarantined  not to be allocated: a remote writer may still write into it

Groups of layers (`baton.kv_groups`) take their blocks from one pool; a cached block belongs to the
group that filled it. A prefix is cached if the groups without a window have all of its blocks, and
those with one have the blocks that the next token attends to. Cache changes are about the first
group, which has no window if any has none.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.block_hash import block_hash, root_hash
from baton.engine.held_blocks import HeldBlocks
from baton.kv_groups import NO_BLOCK, KvGroups


class _CacheEntry(NamedTuple):
    """Content of a cached block; compared in full before a hash is trusted."""

    hash: int
    parent: int
    tokens: tuple[int, ...]
    group: int = 0


@dataclass
class CacheChanges:
    """Changes of the prefix cache between two calls of `take_changes`, net of what came and went.

    evicted: hashes that left it · stored: hashes that are new in it.
    """

    stored: set[int] = field(default_factory=set)
    evicted: set[int] = field(default_factory=set)


class BlockManager:
    """Allocates `num_blocks` blocks of `block_size` tokens. Used by the engine thread only."""

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: bool = True,
        windows: tuple[int, ...] = (0,), num_kinds: int = 0,
    ) -> None:  # fmt: skip
        """windows: of each group, as of `KvGroups` · num_kinds: of blocks, if not the groups."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = KvGroups(windows, block_size)
        self._prefix_cache = prefix_cache
        self.held_by_kind = HeldBlocks(num_blocks, num_kinds or len(windows))
        self._refs = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._quarantined: set[int] = set()
        self._by_hash: list[dict[int, int]] = [{} for _ in windows]  # of each group
        self._entries: dict[int, _CacheEntry] = {}  # by block
        self._changes = CacheChanges()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that are not held and cache a prefix."""
        return len(self._evictable)

    @property
    def num_quarantined(self) -> int:
        """Blocks that a remote writer may still write into."""
        return len(self._quarantined)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached - self.num_quarantined

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    def allocate(self, count: int, kinds: Sequence[int] = ()) -> list[int] | None:
        """`count` blocks with one holder each, or None when there are not enough.

        kinds: the group of each; without them, the first."""
        if count > self.num_available:
            return None
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        self.held_by_kind.allocated(blocks, kinds or [0] * count)
        return blocks

    def get_computed_blocks(
        self, tokens: Sequence[int], salt: str, hashes: list[int] | None = None
    ) -> list[int]:
        """The cached blocks of the longest prefix of `tokens`, each with one more holder.

        At least one token is left out, because its logits have to be computed. hashes: known hashes
        of the leading blocks; those that are computed here are appended.
        """
        hashes = [] if hashes is None else hashes
        found = list[int]()
        parent, size = root_hash(salt), self.block_size
        for index in range((len(tokens) - 1) // size if self._prefix_cache else 0):
            chunk = tuple(tokens[index * size : (index + 1) * size])
            if index == len(hashes):
                hashes.append(block_hash(parent, chunk))
            blocks = self._cached(hashes[index], parent, chunk)
            if blocks is None:
                break
            parent = hashes[index]
            found += blocks
        if self.groups.slide:
            found = self.groups.cached_prefix(found)
        for block in found:
            if block != NO_BLOCK:
                if not self._refs[block]:
                    del self._evictable[block]
                    self.held_by_kind.held_again(block)
                self._refs[block] += 1
        return found

    def _cached(self, hash_: int, parent: int, tokens: tuple[int, ...]) -> list[int] | None:
        """The blocks of all groups with this content; None if one without a window has none."""
        blocks = []
        for by_hash, window in zip(self._by_hash, self.groups.windows, strict=True):
            block = by_hash.get(hash_, NO_BLOCK)
            if block == NO_BLOCK or self._entries[block][1:3] != (parent, tokens):
                if not window:
                    return None
                block = NO_BLOCK
            blocks.append(block)
        return blocks

    def cache_block(
        self, block: int, block_hash_: int, parent: int, tokens: Sequence[int], group: int = 0
    ) -> None:
        """Adds a held, full block of a group, whose content is verified, to the prefix cache.

        If the same content is cached already, this block stays private.
        """
        assert self._refs[block] > 0, "only held blocks are cached"
        assert len(tokens) == self.block_size, "only full blocks are cached"
        by_hash = self._by_hash[group]
        if not self._prefix_cache or block in self._entries or block_hash_ in by_hash:
            return
        by_hash[block_hash_] = block
        self._entries[block] = _CacheEntry(block_hash_, parent, tuple(tokens), group)
        if group:
            return
        if block_hash_ in self._changes.evicted:
            self._changes.evicted.remove(block_hash_)
        else:
            self._changes.stored.add(block_hash_)

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds one holder to each of these blocks, which are held."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is not held"
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes one holder of each block, if it is one. Deeper blocks of a prefix are evicted
        first."""
        for block in reversed(list(blocks)):
            if block == NO_BLOCK:
                continue
            assert self._refs[block] > 0, f"block {block} released more often than held"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self.held_by_kind.released(block)
            if block in self._entries:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def uncache(self, blocks: Iterable[int]) -> list[int]:
        """Removes those of these held blocks that have one holder from the prefix cache.

        Returns them: their content is that holder's alone.
        """
        private = [block for block in blocks if self._refs[block] == 1]
        for block in private:
            if block in self._entries:
                self._remove_entry(block)
        return private

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Quarantines blocks with one holder each instead of freeing them."""
        for block in blocks:
            assert self._refs[block] == 1, "only privately held blocks are quarantined"
            assert block not in self._entries, "a cached block is never written from outside"
            self._refs[block] = 0
            self.held_by_kind.released(block)
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """Frees quarantined blocks, whose writers have ended."""
        for block in blocks:
            self._quarantined.remove(block)
            self._free.append(block)

    def take_changes(self) -> CacheChanges:
        """Changes of the prefix cache since the last call."""
        changes, self._changes = self._changes, CacheChanges()
        return changes

    def check(self) -> None:
        """Asserts every invariant of this class; cheap enough for tests to call always."""
        held = {block for block, refs in enumerate(self._refs) if refs}
        groups = [set(self._free), self._cached_blocks(), self._quarantined, held]
        assert sum(map(len, groups)) == self.num_blocks, "every block is in one state"
        assert self.held_by_kind.counted(held) == self.held_by_kind.counts, "counts are exact"
        assert len(set().union(*groups)) == self.num_blocks, "no block is in two states"
        assert len(self._free) == len(groups[0]), "no block is free twice"
        assert all(refs >= 0 for refs in self._refs), "no negative reference count"
        assert not groups[0] & self._entries.keys(), "a free block caches nothing"
        assert not self._quarantined & self._entries.keys(), "a quarantined block caches nothing"
        assert self._evictable.keys() <= self._entries.keys(), "an evictable block caches something"
        assert len(groups[1]) == self.num_cached, "no block is cached twice"
        for group, by_hash in enumerate(self._by_hash):
            assert by_hash == {
                entry.hash: block for block, entry in self._entries.items() if entry.group == group
            }, "index is exact"

    def _cached_blocks(self) -> set[int]:
        return set(self._evictable)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self._remove_entry(block)
        return block

    def _remove_entry(self, block: int) -> None:
        evicted, _, _, group = self._entries.pop(block)
        del self._by_hash[group][evicted]
        if group:
            return
        if evicted in self._changes.stored:
            self._changes.stored.remove(evicted)
        else:
            self._changes.evicted.add(evicted)
