"""What a worker's prefix cache holds, as its cache events tell: hashes of whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1 import worker_pb2


class CachedPrefixes:
    """Hashes that a worker's cache can be hit with. A hint: only the worker compares tokens."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def __len__(self) -> int:
        return len(self._hashes)

    def take(self, event: worker_pb2.CacheEvent) -> None:
        """Takes in what has changed."""
        if event.cleared:
            self._hashes.clear()
        self._hashes.difference_update(event.evicted)
        self._hashes.update(event.stored)

    def blocks_of(self, chain: Sequence[int]) -> int:
        """How many leading blocks of a prompt (`baton.prefix.hash_chain`) are cached."""
        for count, block_hash in enumerate(chain):
            if block_hash not in self._hashes:
                return count
        return len(chain)
