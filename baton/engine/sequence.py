"""A sequence: its tokens, how many of them are computed, and its blocks. It has no phases."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.block_hash import block_hash, root_hash
from baton.generation.sampling_params import SamplingParams
from baton.generation.structured_output import GrammarMatcher

Ints = npt.NDArray[np.int64]
UNKNOWN = 0  # stands for a token that is being sampled
_ENDLESS = 1 << 62


class TokenCounts:
    """How often each token occurs in one sequence, for its penalties; updated from step to step.

    Tokens are only ever appended, and counts depend on them alone: on every worker and after every
    preemption they are equal, up to their order. Engine thread only.
    """

    def __init__(self) -> None:
        self._counted = 0  # tokens
        self._places: dict[int, int] = {}  # token -> its index in the two arrays below
        self._ids = np.empty(0, np.int64)
        self._times = np.empty(0, np.int64)  # counts in the output; 0: in the prompt only

    def count(self, token_ids: Tokens[int], prompt_tokens: int, proposed: int) -> tuple[Ints, Ints]:
        """(distinct tokens, count of each in the output), valid until the next call.

        proposed: how many of the last `token_ids` are proposals, which may be rejected.
        """
        known = len(token_ids) - proposed
        assert self._counted <= known and prompt_tokens <= known, "tokens only grow"
        if not self._counted:
            self._count_all(np.asarray(token_ids[:known], np.int64), prompt_tokens)
        for at in range(self._counted, known):
            self._add(token_ids[at])
        self._counted = known
        ids, times = self._ids[: len(self._places)], self._times[: len(self._places)]
        return (
            self._with_proposed(ids, times, token_ids[known:][:proposed])
            if proposed
            else (ids, times)
        )

    def _count_all(self, token_ids: Ints, prompt_tokens: int) -> None:
        ids = np.unique(token_ids)
        output, times = np.unique(token_ids[prompt_tokens:], return_counts=True)
        self._places = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids, self._times = ids, np.zeros(len(ids), np.int64)
        self._times[ids.searchsorted(output)] = times
        self._counted = len(token_ids)

    def _add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):  # room for more, so that growing is rare
            room = np.zeros(len(self._ids) + 64, np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._times = np.concatenate([self._times, room])
        self._ids[place] = token_id
        self._times[place] += 1

    def _with_proposed(self, ids: Ints, times: Ints, proposed: Tokens[int]) -> tuple[Ints, Ints]:
        times, new = times.copy(), dict[int, int]()
        for token_id in proposed:
            place = self._places.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                times[place] += 1
        new_ids, new_times = (np.array(list(part), np.int64) for part in (new, new.values()))
        return np.concatenate([ids, new_ids]), np.concatenate([times, new_times])


@dataclass(eq=False)
class Sequence:
    """One request on one engine. Owned by the engine thread once it is added.

    `block_ids` is only ever appended to or replaced by another list: the same list of the same
    length has the same blocks.
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
    block_hashes: list[int] = field(default_factory=list)
    token_counts: TokenCounts = field(
        default_factory=TokenCounts
    )  # computed on demand of penalties
    grammar: GrammarMatcher | None = None  # of structured output

    def __post_init__(self) -> None:
        wanted = self.params.prompt_logprobs is not None
        self.num_scored = 0 if wanted and len(self.tokens) == self.prompt_tokens else None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def handoff_blocks(self, num_tokens: int, block_size: int) -> list[int]:
        """The blocks that a handoff of the first `num_tokens` tokens consists of: theirs, then
        those of the state."""
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
