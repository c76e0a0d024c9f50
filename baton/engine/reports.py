"""What the engine tells the world: plain values, made on its thread, read anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.blocks import CacheChanges
from baton.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class Progress:
    """What one sequence got out of one step."""

    seq_id: str
    num_computed: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
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
    """One step as the world hears of it; times are `time.time_ns`."""

    started_ns: int
    ended_ns: int
    num_tokens: int
    progress: list[Progress]
    load: Load
    cache: CacheChanges = field(default_factory=CacheChanges)
