"""What an engine publishes of each step: what each sequence got, load, prefix cache changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.engine.block_manager import CacheChanges
from baton.engine.pooling import Vector
from baton.engine.sampling.logprobs import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True)
class Load:
    """The engine's load after a step: fields of `worker_pb2.Load`, by the same names.

    It is not that message because benchmarks measure steps without protobuf.
    """

    queue_tokens: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_quarantined: int
    steps: int
    preemptions: int
    prefill_tokens_per_s: float
    chunk_tokens: int
    blocks_held_by_group: tuple[int, ...] = ()


class SequenceProgress(NamedTuple):
    """What one sequence got in one step.

    num_computed: its computed tokens after the step; 0 in `StepReport.token_ids` · token_ids: new
    tokens, several where proposed tokens were accepted · logprobs: of each new token, if asked for
    · finish_reason: "stop" or "length", with which it has ended · abort_reason: why it was aborted;
    invalid: because of its request · prompt_logprobs: of the next tokens of its prompt, if asked
    for · pooled: as `SampledTokens.pooled`.
    """

    seq_id: str
    num_computed: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    abort_reason: str | None = None
    invalid: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    pooled: Vector | None = None


@dataclass(frozen=True)
class StepReport:
    """One step.

    ended_ns: `time.time_ns()` at its end; started_ns: earlier by its duration on a monotonic clock
    · num_tokens: rows computed, proposed tokens included · token_ids: by sequence id, for sequences
    that got one token and nothing else, so that hundreds of them cost little; others: all others ·
    num_proposed: proposed tokens among num_tokens, of which num_accepted were accepted ·
    waited_s: time that the host waited for the device, near 0 if the host was late · num_chunks:
    sequences with rows of a prompt, or of what they have to compute again.
    """

    started_ns: int
    ended_ns: int
    num_tokens: int
    others: list[SequenceProgress]
    load: Load
    cache: CacheChanges = field(default_factory=CacheChanges)
    num_proposed: int = 0
    num_accepted: int = 0
    token_ids: Mapping[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    num_chunks: int = 0

    @property
    def progress(self) -> list[SequenceProgress]:
        """What every sequence of the step got."""
        tokens = self.token_ids.items()
        return [
            *(SequenceProgress(seq_id, token_ids=(one,)) for seq_id, one in tokens),
            *self.others,
        ]

    @property
    def num_sequences(self) -> int:
        return len(self.token_ids) + len(self.others)

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) + sum(len(one.token_ids) for one in self.others)

    @property
    def num_kept(self) -> int:
        """Rows whose KV stays: all but those of rejected proposals."""
        return self.num_tokens - self.num_proposed + self.num_accepted
