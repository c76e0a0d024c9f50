"""One request's state that survives any worker: what was asked, what was delivered, and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.sampling import SamplingParams
from baton.v1 import common_pb2

_MOST_TIME_MS = (1 << 32) - 1  # what SequenceSpec holds: 49 days


@dataclass(frozen=True)
class Ask:
    """A validated request in tokens."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool
    cache_salt: str
    deadline: float  # time.monotonic()

    @property
    def time_left_s(self) -> float:
        """Until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass
class Story:
    """What has happened to a request so far. One attempt after another adds to it."""

    ask: Ask
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)  # wall clock, for traces
    delivered: list[int] = field(default_factory=list)
    attempts: int = 0
    failed_workers: set[str] = field(default_factory=set)
    cached_tokens: int | None = None
    placed_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    prefill_queue_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_ms: float = 0.0
    route: common_pb2.Route = field(default_factory=common_pb2.Route)

    def spec(self, handoff_id: str) -> common_pb2.SequenceSpec:
        """The failover rule: prompt and delivered tokens are the new prompt, positions go on."""
        ask = self.ask
        return common_pb2.SequenceSpec(
            handoff_id=handoff_id,
            token_ids=[*ask.prompt, *self.delivered],
            prompt_tokens=len(ask.prompt),
            sampling=ask.params.to_proto(),
            cache_salt=ask.cache_salt,
            time_left_ms=min(_MOST_TIME_MS, max(1, int(ask.time_left_s * 1000))),
        )

    def deliver(self, token_ids: Sequence[int]) -> None:
        """Counts tokens as given to the caller, once."""
        now = time.monotonic()
        self.first_at = self.first_at or now
        self.last_at = now
        self.delivered += token_ids

    def usage(self) -> common_pb2.Usage:
        """Tokens counted once, whatever was retried."""
        return common_pb2.Usage(
            prompt_tokens=len(self.ask.prompt),
            completion_tokens=len(self.delivered),
            cached_tokens=self.cached_tokens or 0,
        )

    def timing(self) -> common_pb2.Timing:
        """Where the time went."""
        first, last = self.first_at or self.started, self.last_at or self.started
        steps = max(1, len(self.delivered) - 1)
        placed = self.placed_at or self.started
        return common_pb2.Timing(
            queue_ms=(placed - self.started) * 1e3 + self.prefill_queue_ms,
            ttft_ms=(first - self.started) * 1e3,
            tpot_ms=(last - first) * 1e3 / steps,
            e2e_ms=(time.monotonic() - self.started) * 1e3,
            transfer_ms=self.transfer_ms,
            transfer_bytes=self.transfer_bytes,
        )

    def final_route(self) -> common_pb2.Route:
        """The workers of the attempt that finished."""
        route = common_pb2.Route()
        route.CopyFrom(self.route)
        route.attempts = self.attempts
        return route
