"""One request's state that survives any worker: what was asked, what was delivered, and when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.sampling import SamplingParams
from baton.v1 import common_pb2, prefill_pb2
from router.admission.wait_queue import Ticket
from router.placement.placement_request import Wants

_MOST_TIME_MS = (1 << 32) - 1  # what SequenceSpec holds: 49 days
_DUE_S = 60.0  # added by every router: workers need the order, also of turns that have passed


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
    tenant: str = ""
    due: float = 0.0  # time.monotonic(): the end of its fair turn; the earliest goes first
    ttft_target_s: float = 0.0  # 0: none
    resumed: tuple[int, ...] = ()  # output tokens that another stream has delivered

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
    delivered: list[int] = field(init=False)
    attempts: int = 0
    workers: set[str] = field(default_factory=set)  # that were asked for anything
    failed_workers: set[str] = field(default_factory=set)
    cached_tokens: int | None = None
    predicted_ttft_s: float = 0.0  # when it was let in; 0: nothing was known
    placed_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    prefill_queue_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_ms: float = 0.0
    route: common_pb2.Route = field(default_factory=common_pb2.Route)
    # Called when more output waits than is kept for a caller who does not read it.
    on_unread: Callable[[], None] = field(default=lambda: None, repr=False)
    _wants: Wants | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.delivered = list(self.ask.resumed)

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
            due_ms=min(_MOST_TIME_MS, max(0, int((ask.due - time.monotonic() + _DUE_S) * 1000))),
        )

    def wants(self, local_prefill_max_tokens: int) -> Wants:
        """What placement has to find room for; the same one until more is delivered."""
        ask, num_tokens = self.ask, len(self.ask.prompt) + len(self.delivered)
        if self._wants is None or self._wants.num_tokens != num_tokens:
            self._wants = Wants(
                token_ids=(*ask.prompt, *self.delivered),
                due=ask.due,
                cache_salt=ask.cache_salt,
                new_tokens=ask.params.max_tokens - len(self.delivered),
                local_prefill_max_tokens=local_prefill_max_tokens,
            )
        return self._wants

    def ticket(self) -> Ticket:
        """Its place in the line. Who has begun to stream was let in long ago."""
        ask = self.ask
        promised = ask.ttft_target_s > 0 and not self.delivered
        return Ticket(
            due=ask.due,
            num_tokens=len(ask.prompt) + len(self.delivered),
            request_id=ask.request_id,
            tenant=ask.tenant,
            promised=self.started + ask.ttft_target_s if promised else math.inf,
        )

    def deliver(self, token_ids: Sequence[int]) -> float | None:
        """Counts tokens as given to the caller, once; seconds since the last ones, if any came."""
        now = time.monotonic()
        gap_s = None if self.last_at is None else now - self.last_at
        self.first_at = self.first_at or now
        self.last_at = now
        self.delivered += token_ids
        return gap_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; 0 before it."""
        return (self.first_at or self.started) - self.started

    @property
    def tpot_s(self) -> float:
        """Mean time between output tokens after the first."""
        steps = max(1, len(self.delivered) - len(self.ask.resumed) - 1)
        return ((self.last_at or self.started) - (self.first_at or self.started)) / steps

    @property
    def e2e_s(self) -> float:
        """From arrival until now."""
        return time.monotonic() - self.started

    def note(self, message: prefill_pb2.PrefillResponse) -> None:
        """Keeps what the caller will be told at the end of what a prefill worker says."""
        if message.HasField("started"):
            if self.first_at is None:
                self.prefill_queue_ms += message.started.queue_ms
            self.note_cached(message.started.cached_tokens)
        elif message.HasField("committed"):
            self.transfer_bytes += message.committed.transfer_bytes
            self.transfer_ms += message.committed.transfer_ms
            self.route.transport = message.committed.transport

    def note_cached(self, num_tokens: int) -> None:
        """Prompt tokens that came from a cache; the first attempt's figure stands."""
        if self.cached_tokens is None:
            self.cached_tokens = num_tokens

    def usage(self) -> common_pb2.Usage:
        """Tokens counted once, whatever was retried."""
        return common_pb2.Usage(
            prompt_tokens=len(self.ask.prompt),
            completion_tokens=len(self.delivered),
            cached_tokens=self.cached_tokens or 0,
        )

    def timing(self) -> common_pb2.Timing:
        """Where the time went."""
        placed = self.placed_at or self.started
        return common_pb2.Timing(
            queue_ms=(placed - self.started) * 1e3 + self.prefill_queue_ms,
            ttft_ms=self.ttft_s * 1e3,
            tpot_ms=self.tpot_s * 1e3,
            e2e_ms=self.e2e_s * 1e3,
            transfer_ms=self.transfer_ms,
            transfer_bytes=self.transfer_bytes,
        )

    def final_route(self) -> common_pb2.Route:
        """The workers of the attempt that finished."""
        route = common_pb2.Route()
        route.CopyFrom(self.route)
        route.attempts = self.attempts
        return route
