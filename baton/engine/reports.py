"""What the engine tells the world: plain values, made on its thread, read anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.engine.blocks import CacheChanges
from baton.engine.sampling.sampler import TokenLogprobs


class Progress(NamedTuple):
    """What one sequence got out of one step."""

    seq_id: str
    num_computed: int
    token_ids: tuple[int, ...] = ()  # new ones: several where drafts were right
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each of them, if asked for
    finish_reason: str | None = None  # "stop" or "length"; the sequence is gone
    abort_reason: str | None = None  # the step failed; the sequence is gone


@dataclass(frozen=True)
class Reserved:
    """Blocks held for a sequence: those of the first `num_cached` tokens are filled already."""

    num_cached: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """The engine's load after a step."""

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


@dataclass(frozen=True)
class StepReport:
    """One step as the world hears of it.

    started_ns is `time.time_ns`; ended_ns is as much later as the step took by a monotonic clock.
    """

    started_ns: int
    ended_ns: int
    num_tokens: int  # computed, drafts included
    progress: list[Progress]
    load: Load
    cache: CacheChanges = field(default_factory=CacheChanges)
    num_drafts: int = 0  # of the tokens computed
    num_right: int = 0  # of the drafts; the others' tokens are computed once more

    @property
    def num_kept(self) -> int:
        """Tokens that are computed from now on."""
        return self.num_tokens - self.num_drafts + self.num_right
