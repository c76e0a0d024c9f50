"""A sequence: its tokens, how many of them are computed, and its blocks. It has no phases."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.block_hash import block_hash, root_hash
from baton.engine.token_counts import TokenCounts
from baton.generation.sampling_params import SamplingParams
from baton.generation.structured_output import GrammarMatcher

UNKNOWN = 0  # stands for a token that is being sampled
_ENDLESS = 1 << 62


@dataclass(eq=False)
class Sequence:
    """One request on one engine. Owned by the engine thread once it is added.

    `block_ids` (`baton.kv_groups`) is only ever appended to or replaced by another list: the same
    list of the same length has the same blocks. Where blocks were given up, it is another list.
    """

    seq_id: str
    tokens: list[int]
    prompt_tokens: int  # number of `tokens` that the caller sent; the rest is output
    params: SamplingParams
    cache_salt: str = ""  # of the adapter, too: see `block_hash.adapted_salt`
    adapter: str = ""  # identity of its LoRA adapter; empty: none
    lora_slot: int = -1  # of the adapter, set by the engine
    priority: float = 0.0  # smaller first: its virtual finish time, on the clock of monotonic()
    prompt_s: float = 0.0  # seconds by which its prompt advances virtual time; 0: unknown
    arrival: int = 0  # set by the scheduler; breaks ties of priority
    exclusive_tokens: int = 0  # number of first output tokens here that are sampled in own steps
    pause_after: int | None = None  # number of new tokens after which it leaves the batch
    awaits_kv: bool = False  # its blocks may be written by another process
    unverified: bool = False  # it runs on received KV whose checksum is not verified yet
    # Prompt positions whose logits gave the next token's log-probability, or whose hidden states
    # were pooled; None: not wanted, or done by the worker that computed the prompt.
    num_scored: int | None = field(init=False)
    num_computed: int = 0
    num_cached: int = 0  # of num_computed, found in the prefix cache at first admission
    new_tokens: int = 0  # sampled by this engine, or being sampled
    awaits_token: bool = False  # the last of `tokens` is `UNKNOWN`
    dropped: bool = False  # it has ended
    # It may end with a token of `ends`, or at `limit` tokens: see `finish_reason`.
    ends: frozenset[int] = frozenset()
    limit: int = _ENDLESS
    preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    state_blocks: list[int] = field(default_factory=list)  # of its state, in models with states
    # Checkpoints of its state (`baton.engine.scheduler`), in tokens before them: those planned, and
    # the deepest; and the hash of one that moves along.
    checkpoints: list[int] = field(default_factory=list)
    checkpoint: int = 0
    moving: int | None = None
    num_slots: int = 0  # tokens that all groups of layers have blocks for, set by the scheduler
    block_hashes: list[int] = field(default_factory=list)
    token_counts: TokenCounts = field(default_factory=TokenCounts)  # on demand of penalties
    grammar: GrammarMatcher | None = None  # of structured output

    def __post_init__(self) -> None:
        wanted = self.params.prompt_logprobs is not None
        self.num_scored = 0 if wanted and len(self.tokens) == self.prompt_tokens else None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def handoff_blocks(self, num_tokens: int, block_size: int) -> list[int]:
        """The blocks of a handoff of `num_tokens`: of at least those, or exactly of those and then
        of the state."""
        if not self.state_blocks:
            return self.block_ids
        return self.block_ids[: -(-num_tokens // block_size)] + self.state_blocks

    @property
    def num_pending(self) -> int:
        """Tokens known and not yet computed."""
        return len(self.tokens) - self.num_computed

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of its prompt remain to be computed."""
        return self.num_scored is not None and self.num_scored < self.prompt_tokens - 1

    @property
    def exclusive(self) -> bool:
        """Whether it shares no step with other sequences for now."""
        return self.new_tokens < self.exclusive_tokens

    def tokens_left(self, max_context: int) -> int:
        """Maximum number of tokens that it can still get here."""
        params, output = self.params, len(self.tokens) - self.prompt_tokens
        left = min(params.max_tokens - output, max_context - len(self.tokens))
        return left if self.pause_after is None else min(left, self.pause_after - self.new_tokens)

    @property
    def order(self) -> tuple[float, int]:
        """Sort key, smaller first; it never changes, so that no sequence starves."""
        return self.priority, self.arrival

    def parent_hash(self, index: int) -> int:
        return self.block_hashes[index - 1] if index else root_hash(self.cache_salt)

    def hash_of(self, index: int, block_size: int) -> int:
        while len(self.block_hashes) <= index:
            at = len(self.block_hashes)
            tokens = self.tokens[at * block_size : (at + 1) * block_size]
            assert len(tokens) == block_size, "only full blocks have a hash"
            self.block_hashes.append(block_hash(self.parent_hash(at), tokens))
        return self.block_hashes[index]
