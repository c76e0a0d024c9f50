"""One request's state that survives any worker: what was requested, what was delivered, and when.

Detokenizer and stop strings are part of it, so no worker's death can lose half a character or half
a stop string.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.sampling import SamplingParams
from baton.slo import Slo
from baton.text import Detokenizer, StopStrings, Tokenizer
from baton.v1 import common_pb2, prefill_pb2
from router.admission.fair_queue import FairQueue, Flow, PendingPrompt
from router.admission.wait_queue import QueueEntry
from router.placement.cost_model import PlacementRequest

WAYS = ("handed_over", "local", "cached", "prefill_only")
_MOST_TIME_MS = (1 << 32) - 1  # what SequenceSpec holds: 49 days
# Added by every router: workers need the order, also of times that have passed.
_VIRTUAL_FINISH_OFFSET_S = 60.0


_FIRST = FairQueue().preview(Flow(""), 0.0)


@dataclass(frozen=True)
class TokenizedRequest:
    """A validated request in tokens."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...]
    include_stop: bool
    cache_salt: str
    deadline: float  # time.monotonic()
    tenant: str = ""
    ttft_target_s: float = 0.0  # 0: none
    show_special_tokens: bool = False  # in the text
    resumed: tuple[int, ...] = ()  # output tokens that another stream has delivered
    # Its place in the fair queue; before it enters that, the first one.
    pending: PendingPrompt = _FIRST
    workers: frozenset[str] = frozenset()  # that alone may serve it; empty: any

    @property
    def time_left_s(self) -> float:
        """Until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass
class RequestState:
    """What has happened to a request so far. One attempt after another adds to it."""

    request: TokenizedRequest
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)  # wall clock, for traces
    delivered: list[int] = field(init=False)
    attempts: int = 0
    workers: set[str] = field(default_factory=set)  # that were called for it
    failed_workers: set[str] = field(default_factory=set)
    cached_tokens: int | None = None
    predicted_ttft_s: float = 0.0  # when it was admitted; 0: nothing was known
    placed_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    prefill_queue_ms: float = 0.0
    transfer_bytes: int = 0
    transfer_ms: float = 0.0
    route: common_pb2.Route = field(default_factory=common_pb2.Route)
    # Of this attempt; whole before its first token.
    prompt_logprobs: common_pb2.PromptLogprobs | None = None
    embedding: Sequence[float] = ()
    _placement: PlacementRequest | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.delivered = list(self.request.resumed)

    @property
    def decodes(self) -> bool:
        """Whether tokens are to be generated; if not, a prefill worker alone serves it."""
        return self.request.params.max_tokens > 0

    def spec(self, handoff_id: str) -> common_pb2.SequenceSpec:
        """The failover rule: prompt and delivered tokens are the new prompt, positions go on."""
        request = self.request
        virtual_finish_s = request.pending.fair_s + _VIRTUAL_FINISH_OFFSET_S
        return common_pb2.SequenceSpec(
            handoff_id=handoff_id,
            token_ids=[*request.prompt, *self.delivered],
            prompt_tokens=len(request.prompt),
            sampling=request.params.to_proto(),
            cache_salt=request.cache_salt,
            time_left_ms=min(_MOST_TIME_MS, max(1, int(request.time_left_s * 1000))),
            virtual_finish_ms=min(_MOST_TIME_MS, max(0, int(virtual_finish_s * 1000))),
        )

    def placement_request(
        self, local_prefill_max_tokens: int, max_itl_s: float
    ) -> PlacementRequest:
        """What placement has to find room for; the same one until more is delivered."""
        request, kept = self.request, self._placement
        if kept is None or kept.num_tokens != len(request.prompt) + len(self.delivered):
            kept = self._placement = PlacementRequest(
                token_ids=(*request.prompt, *self.delivered),
                pending=request.pending,
                cache_salt=request.cache_salt,
                new_tokens=request.params.max_tokens - len(self.delivered),
                local_prefill_max_tokens=local_prefill_max_tokens * self.decodes,
                max_itl_s=max_itl_s,
                decodes=self.decodes,
                caches=request.params.prompt_logprobs is None,
            )
        return kept

    def queue_entry(self) -> QueueEntry:
        """Its entry in the wait queue. One that has begun to stream has met its TTFT target."""
        request = self.request
        has_target = request.ttft_target_s > 0 and not self.delivered
        return QueueEntry(
            pending=request.pending,
            num_tokens=len(request.prompt) + len(self.delivered),
            first_token_by=self.started + request.ttft_target_s if has_target else math.inf,
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
        steps = max(1, len(self.delivered) - len(self.request.resumed) - 1)
        return ((self.last_at or self.started) - (self.first_at or self.started)) / steps

    @property
    def e2e_s(self) -> float:
        return time.monotonic() - self.started

    def is_within(self, slo: Slo) -> bool:
        return slo.met(self.ttft_s, self.tpot_s, self.e2e_s)

    def note(self, message: prefill_pb2.PrefillResponse) -> None:
        """Keeps what the caller gets to know in the end of a prefill worker's message."""
        if message.HasField("started"):
            if self.first_at is None:
                self.prefill_queue_ms += message.started.queue_ms
            self.note_cached(message.started.cached_tokens)
        elif message.HasField("committed"):
            self.transfer_bytes += message.committed.transfer_bytes
            self.transfer_ms += message.committed.transfer_ms
            self.route.transport = message.committed.transport

    def note_cached(self, num_tokens: int) -> None:
        """Prompt tokens that came from a cache; the first attempt's count stands."""
        if self.cached_tokens is None:
            self.cached_tokens = num_tokens

    @property
    def way(self) -> str:
        """How its KV came to the decode worker of the last attempt: one of WAYS."""
        if self.route.prefill:
            return "handed_over" if self.route.transport else "prefill_only"
        return "cached" if self.cached_tokens else "local"

    def usage(self) -> common_pb2.Usage:
        """Tokens counted once, whatever was retried."""
        return common_pb2.Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.delivered),
            cached_tokens=self.cached_tokens or 0,
        )

    def timing(self) -> common_pb2.Timing:
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


class TextStream:
    """Turns one request's tokens, in order, into text; `stop` is set once a stop string was met."""

    def __init__(self, tokenizer: Tokenizer, request: TokenizedRequest) -> None:
        pieces = tokenizer.pieces
        if request.show_special_tokens:
            pieces = pieces.showing_all
        self._detokenizer = Detokenizer(pieces, request.prompt)
        self._stops = StopStrings(request.stop, request.include_stop)
        self._singly = bool(request.stop)
        self.stop: str | None = None
        if request.resumed:
            self.advance(request.resumed, None)  # its text was sent by the stream that broke

    def advance(self, token_ids: Sequence[int], finish_reason: str | None) -> tuple[str, int]:
        """Text that new tokens make certain, and how many of them it took to meet a stop string.

        With a `finish_reason` they are the last, and the text is all that is left. A token that
        ended the sequence by itself ("stop") is no text.
        """
        if finish_reason is None and not self._singly:
            return self._detokenizer.push(token_ids), len(token_ids)
        shown = token_ids[:-1] if finish_reason == "stop" else token_ids
        text, count = "", 0
        for tokens in ([token] for token in shown) if self._singly else (shown,):
            certain, self.stop = self._stops.push(self._detokenizer.push(tokens))
            text, count = text + certain, count + len(tokens)
            if self.stop is not None:
                return text, count
        if finish_reason is not None:
            rest, self.stop = self._stops.push(self._detokenizer.flush())
            text += rest + ("" if self.stop is not None else self._stops.flush())
        return text, len(token_ids)
