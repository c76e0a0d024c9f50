"""A sequence: tokens known, tokens computed, and the blocks that hold the difference's history.

It knows nothing of phases. Prefill is "many tokens not computed", decode is "one token not
computed", a cache hit is "computed without work", preemption is "computed no more".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.sampling.token_counts import TokenCounts
from baton.engine.speculative.ngram import Drafter
from baton.prefix import block_hash, root_hash
from baton.sampling import SamplingParams


@dataclass(eq=False)
class Sequence:
    """One request on one engine. Owned by the engine thread once it is added."""

    seq_id: str
    tokens: list[int]
    prompt_tokens: int  # how many of `tokens` the caller sent; the rest is output
    params: SamplingParams
    cache_salt: str = ""
    due: float = 0.0  # time.monotonic() here: the end of its fair turn; the earliest goes first
    arrival: int = 0  # set by the planner; of those due together the first to come goes first
    park_after: int | None = None  # leave the batch, keep the blocks, after this many new tokens
    awaits_kv: bool = False  # blocks are held and may be written from outside, unverified
    num_computed: int = 0
    num_cached: int = 0  # of num_computed, taken from the prefix cache at first admission
    new_tokens: int = 0  # sampled by this engine
    preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    token_counts: TokenCounts = field(default_factory=TokenCounts)  # as far as penalties ask
    drafter: Drafter | None = None  # set by the planner of an engine that drafts

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens known and not yet computed."""
        return len(self.tokens) - self.num_computed

    def tokens_left(self, max_context: int) -> int:
        """The most tokens that it can still get here."""
        params, output = self.params, len(self.tokens) - self.prompt_tokens
        left = min(params.max_tokens - output, max_context - len(self.tokens))
        return left if self.park_after is None else min(left, self.park_after - self.new_tokens)

    @property
    def turn(self) -> tuple[float, int]:
        """Smaller goes first; it never changes, so that everybody is the smallest one day."""
        return self.due, self.arrival

    def parent_hash(self, index: int) -> int:
        """Hash of the block before block `index`."""
        return self.block_hashes[index - 1] if index else root_hash(self.cache_salt)

    def hash_of(self, index: int, block_size: int) -> int:
        """Hash of full block `index`; computed once, in order."""
        while len(self.block_hashes) <= index:
            at = len(self.block_hashes)
            tokens = self.tokens[at * block_size : (at + 1) * block_size]
            assert len(tokens) == block_size, "only full blocks have a hash"
            self.block_hashes.append(block_hash(self.parent_hash(at), tokens))
        return self.block_hashes[index]
