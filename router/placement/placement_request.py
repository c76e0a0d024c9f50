"""What a request asks of a pair of workers, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.config import RouterLimits
from baton.prefix import hash_chain
from router.fleet.snapshot import WorkerView


@dataclass(frozen=True)
class Wants:
    """Made once for an attempt, so that its prompt is hashed once however often a place is sought.

    `local_prefill_max_tokens` is the router's setting: decode computes so few tokens by itself;
    0 is never.
    """

    token_ids: Sequence[int]  # prompt, then what earlier attempts delivered
    due: float  # time.monotonic(): the end of its fair turn
    cache_salt: str = ""
    new_tokens: int = 0  # at most so many outputs; 0: not known
    local_prefill_max_tokens: int = RouterLimits.local_prefill_max_tokens
    _chains: dict[int, list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_tokens(self) -> int:
        """Tokens to compute where nothing is cached."""
        return len(self.token_ids)

    def chain(self, block_size: int) -> Sequence[int]:
        """The prompt's hash chain, computed when it is first asked for."""
        if block_size not in self._chains:
            self._chains[block_size] = hash_chain(self.token_ids, block_size, self.cache_salt)
        return self._chains[block_size]

    def cached_tokens(self, worker: WorkerView) -> int:
        """Leading tokens whose KV the worker seems to cache; never all, as the last is computed."""
        block_size = worker.record.kv.block_size
        if not block_size or not len(worker.cached):
            return 0
        usable = (self.num_tokens - 1) // block_size
        return min(usable, worker.cached.blocks_of(self.chain(block_size))) * block_size
