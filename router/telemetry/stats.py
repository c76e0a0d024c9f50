"""Counts since this router started, and recent events, as `baton top` and `baton status` show them.

Listeners (metrics, tail sampling) are called from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from opentelemetry.trace import Span

from baton.config import shown_name
from baton.errors import BatonError, DeadlineExceeded, Overloaded, Unavailable, as_exception
from baton.log_format import RateLimit, about
from baton.net import rpc
from baton.telemetry import tracing
from baton.v1 import fleet_pb2
from router.fleet.fleet import Fleet
from router.request import PROMPT_PATHS, LimitReached, RequestState

log = logging.getLogger(__name__)

_MAX_EVENTS = 32
_MAX_LATENCIES = 512
_LATENCY_S = 60.0  # window of the percentiles
_MAX_TEXT = 300  # characters of an event: errors may quote others
_HOP_S = 0.1  # a caller's deadline is earlier than ours by the time on the network
OK, CANCELLED = "OK", "CANCELLED"


@dataclass
class RequestRecord:
    """One request for statistics; the generation service fills it in."""

    trace_id: str = ""
    span: Span | None = None
    held: bool = False  # the trace is recorded but not sampled
    kept: bool = False  # that trace is exported nevertheless
    operation: str = ""  # name in OpenTelemetry's GenAI conventions
    request_id: str = ""
    tenant: str = ""  # empty until it is known
    callers_id: str = ""  # the caller's own id
    asked_model: str = ""  # the name in the request
    labels: Mapping[str, str] = field(default_factory=dict)  # of its model; empty until known
    route: str = ""  # name of the route that chose the model's version
    fleet: Fleet | None = None  # the model's workers
    traffic: Traffic | None = None  # of the model's version
    in_batch: bool = False  # of a batch: nobody waits for it, and a refusal only delays it
    state: RequestState | None = None  # None until it is admitted
    finished: bool = False  # the caller has received everything
    arrived: float = field(default_factory=time.monotonic)
    arrived_ns: int = field(default_factory=time.time_ns)  # wall clock, for traces

    def set_span(self, span: Span, operation: str) -> None:
        """Sets the request's span, with its trace, and its operation."""
        self.span, self.trace_id = span, tracing.trace_id_of(span)
        self.held = tracing.is_held(span)
        self.operation = operation

    @property
    def model(self) -> str:
        """The version that serves it, as "chat@v1"; empty until it is known."""
        names = (
            self.labels.get(one, "") for one in ("gen_ai.request.model", "baton.model.version")
        )
        return shown_name(*names)

    @property
    def placed(self) -> bool:
        """Whether it was placed on workers."""
        return self.state is not None and self.state.placed_at is not None


@dataclass(frozen=True)
class RequestOutcome:
    """How a request ended; `error` is None if it succeeded or its caller left."""

    status: str  # name of the gRPC status
    error: Exception | None = None


class RequestListener:
    """Called at events of requests, in the listeners' order. Must not block or raise."""

    def first_token(self, record: RequestRecord) -> None:
        """The first output of a request is on its way."""

    def failed_over(self, error: BatonError) -> None:
        """An attempt failed and another follows."""

    def ended(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        """A request has ended."""


class Traffic:
    """Counts and latencies of requests: of all of them, or of those of a model's version."""

    def __init__(self) -> None:
        self.counts = fleet_pb2.RouterCounts(served=dict.fromkeys(PROMPT_PATHS, 0))
        # (when, TTFT, TPOT), milliseconds
        self._latencies: deque[tuple[float, float, float]] = deque(maxlen=_MAX_LATENCIES)

    def ended(self, record: RequestRecord, outcome: RequestOutcome, now: float) -> None:
        """Counts a request that has ended at `now`."""
        counts, state = self.counts, record.state
        counts.ended[outcome.status] += 1
        if state is not None:
            counts.cached_tokens += state.cached_tokens or 0
        if outcome.error is not None:
            counts.refused += not record.placed
            for_want_of_room = isinstance(outcome.error, (Overloaded, Unavailable))
            if state is None and record.tenant and not isinstance(outcome.error, LimitReached):
                counts.turned_away += for_want_of_room
        elif outcome.status == OK and state is not None:
            counts.served[state.prompt_path] += 1
            ttft_s, target_s = state.ttft_s, state.request.ttft_target_s
            counts.with_target += target_s > 0
            counts.late += 0 < target_s < ttft_s
            if not record.in_batch:
                self._latencies.append((now, ttft_s * 1e3, state.tpot_s * 1e3))

    def latency(self, now: float) -> fleet_pb2.Latency:
        """Percentiles over the last minute, without requests of batches."""
        recent = np.array([taken[1:] for taken in self._latencies if taken[0] >= now - _LATENCY_S])
        if not len(recent):
            return fleet_pb2.Latency()
        p50, p95 = np.percentile(recent, (50, 95), axis=0, method="inverted_cdf")
        return fleet_pb2.Latency(
            requests=len(recent),
            ttft_p50_ms=p50[0],
            ttft_p95_ms=p95[0],
            tpot_p50_ms=p50[1],
            tpot_p95_ms=p95[1],
        )


class RouterStats:
    """Counts of one router. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = Traffic()
        # Failures, oldest first; equal ones in a row are one event.
        self.events: deque[fleet_pb2.RouterEvent] = deque(maxlen=_MAX_EVENTS)
        self.listeners: tuple[RequestListener, ...] = ()
        self._refusals: dict[str, RateLimit] = {}  # by status
        # Called with the seconds between two outputs of a request, and the seconds of a placement.
        self.on_gap: Callable[[float], None] = lambda gap_s: None
        self.on_placed: Callable[[float], None] = lambda duration_s: None
        self._clock = clock

    @property
    def counts(self) -> fleet_pb2.RouterCounts:
        """Counts of all requests."""
        return self._all.counts

    def latency(self) -> fleet_pb2.Latency:
        """Percentiles over the last minute, of all requests but those of batches."""
        return self._all.latency(self._clock())

    @contextlib.contextmanager
    def request(self) -> Iterator[RequestRecord]:
        """Context of one request; counts how it ended."""
        record = RequestRecord()
        try:
            yield record
        except (asyncio.CancelledError, GeneratorExit):
            self._end(record, _cut_off(record))
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:
            error = as_exception(failure)
            self._end(record, RequestOutcome(rpc.code_of(error).name, error))
            if error is failure:
                raise
            raise error from failure
        else:
            self._end(record, RequestOutcome(OK))

    def refused(self, record: RequestRecord, error: Exception) -> None:
        """Counts a request that ended with `error` before it had a context."""
        self._end(record, RequestOutcome(rpc.code_of(error).name, error))

    def admitted(self, record: RequestRecord, state: RequestState) -> None:
        """Counts an admitted request."""
        record.state = state
        for traffic in self._traffics(record):
            traffic.counts.admitted += 1
            traffic.counts.prompt_tokens += len(state.request.prompt)

    def delivered(self, record: RequestRecord, num_tokens: int, gap_s: float | None) -> None:
        """Counts delivered tokens; `gap_s`: seconds since the request's last ones, if measured."""
        self.counts.output_tokens += num_tokens
        if gap_s is not None and not record.in_batch:
            self.on_gap(gap_s)

    def first_token(self, record: RequestRecord) -> None:
        """The first output of a request is on its way."""
        for listener in self.listeners:
            listener.first_token(record)

    def failed_over(self, state: RequestState, trace_id: str, error: BatonError) -> None:
        """An attempt failed and another follows."""
        self.counts.failovers += 1
        for listener in self.listeners:
            listener.failed_over(error)
        where = " and ".join(filter(None, (state.route.prefill, state.route.decode)))
        text = f"{where}: {error}" if where else str(error)
        self.note(fleet_pb2.EVENT_KIND_FAILOVER, text, state.request.request_id, trace_id)

    def _traffics(self, record: RequestRecord) -> Iterator[Traffic]:
        """Where a request is counted: with all, and with its version once that is known."""
        yield self._all
        if record.traffic is not None:
            yield record.traffic

    def _end(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        for traffic in self._traffics(record):
            traffic.ended(record, outcome, self._clock())
        if outcome.error is not None:
            self._failed(record, outcome)
        for listener in self.listeners:
            listener.ended(record, outcome)

    def _failed(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        """Logs a failure, or a refusal at a limited rate, with the ids that lead to its trace."""
        why = str(outcome.error) or type(outcome.error).__name__
        kind = fleet_pb2.EVENT_KIND_FAILURE if record.placed else fleet_pb2.EVENT_KIND_REFUSAL
        self.note(kind, f"{outcome.status}: {why}", record.request_id, record.trace_id)
        # Under overload a line for each refused request would block the event loop.
        limited = self._refusals.setdefault(outcome.status, RateLimit(log))
        (log.log if record.placed else limited.line)(
            logging.WARNING if record.placed else logging.INFO,
            "request %s%s of tenant %s to %s ended with %s: %s",
            record.request_id,
            record.callers_id and f" ({record.callers_id})",
            record.tenant or "(unknown)",
            record.model or "(no model)",
            outcome.status,
            outcome.error,
            extra=about(trace_id=record.trace_id, request_id=record.request_id),
        )

    def note(
        self, kind: fleet_pb2.EventKind, text: str, request_id: str = "", trace_id: str = ""
    ) -> None:
        """Adds an event; one equal to the last counts that up."""
        event = fleet_pb2.RouterEvent(
            kind=kind,
            text=text[:_MAX_TEXT],
            time_ms=time.time_ns() // 1_000_000,
            request_id=request_id,
            trace_id=trace_id,
            times=1,
        )
        if self.events and (self.events[-1].kind, self.events[-1].text) == (kind, event.text):
            event.times += self.events.pop().times
        self.events.append(event)


def _cut_off(record: RequestRecord) -> RequestOutcome:
    """How a request ended whose call was cancelled, as callers do at their deadline, too."""
    if record.finished:
        return RequestOutcome(OK)
    if record.state is not None and record.state.request.time_left_s < _HOP_S:
        error = DeadlineExceeded("the deadline passed")
        return RequestOutcome(rpc.code_of(error).name, error)
    return RequestOutcome(CANCELLED)
