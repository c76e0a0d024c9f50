"""What has happened at this router since it started: counts that only grow, and recent events.

`baton top` and `baton status` show them; listeners (metrics, tail sampling) are called from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from opentelemetry.trace import Span

from baton.errors import BatonError, DeadlineExceeded, as_exception
from baton.log_format import RateLimit, about
from baton.net import rpc
from baton.v1 import fleet_pb2
from router.dispatch.request_state import WAYS, RequestState

log = logging.getLogger(__name__)

_MOST_EVENTS = 32
_MOST_LATENCIES = 512
_LATENCY_S = 60.0
_MOST_TEXT = 300  # of an event: errors may quote others
_HOP_S = 0.1  # a caller's deadline is ours minus the time that its request took to get here
OK, CANCELLED = "OK", "CANCELLED"


@dataclass
class RequestRecord:
    """One request as the stats see it; the frontend fills this in."""

    trace_id: str = ""
    span: Span | None = None
    held: bool = False  # its trace is recorded, but not sampled
    kept: bool = False  # that trace is exported nevertheless
    operation: str = ""  # as GenAI conventions call it
    tenant: str = ""  # empty until it is known
    callers_id: str = ""  # what the caller calls it
    in_batch: bool = False  # nobody waits for it, and a refusal only puts it off
    state: RequestState | None = None  # None until it is admitted
    finished: bool = False  # its caller has all of it
    arrived: float = field(default_factory=time.monotonic)
    arrived_ns: int = field(default_factory=time.time_ns)  # wall clock, for traces

    @property
    def request_id(self) -> str:
        """Empty until it is admitted."""
        return self.state.request.request_id if self.state else ""

    @property
    def placed(self) -> bool:
        """Whether anything was run for it."""
        return self.state is not None and self.state.placed_at is not None


@dataclass(frozen=True)
class Outcome:
    """How a request ended; `error` is None where it ended well or its caller left."""

    status: str  # gRPC's name of it
    error: Exception | None = None


class RequestListener:
    """Called as requests pass, in the listeners' order. None of it may block or raise."""

    def first_token(self, record: RequestRecord) -> None:
        """The first output of a request is on its way."""

    def failed_over(self, error: BatonError) -> None:
        """An attempt failed and another follows."""

    def ended(self, record: RequestRecord, outcome: Outcome) -> None:
        """A request is over."""


class RouterStats:
    """Counts of one router. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = fleet_pb2.RouterCounts(served=dict.fromkeys(WAYS, 0))
        # What went wrong, oldest first; the same thing in a row is one event.
        self.events: deque[fleet_pb2.RouterEvent] = deque(maxlen=_MOST_EVENTS)
        self.listeners: tuple[RequestListener, ...] = ()
        self._refusals: dict[str, RateLimit] = {}  # by status
        # Of output, how long after the request's output before it; of each look for a pair of
        # workers, how long it took. Seconds.
        self.on_gap: Callable[[float], None] = lambda gap_s: None
        self.on_placed: Callable[[float], None] = lambda took_s: None
        self._clock = clock
        # (when, TTFT, TPOT), milliseconds
        self._latencies: deque[tuple[float, float, float]] = deque(maxlen=_MOST_LATENCIES)

    @contextlib.contextmanager
    def request(self) -> Iterator[RequestRecord]:
        """Around one request: counts how it ended."""
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
            self._end(record, Outcome(rpc.code_of(error).name, error))
            if error is failure:
                raise
            raise error from failure
        else:
            self._end(record, Outcome(OK))

    def admitted(self, record: RequestRecord, state: RequestState) -> None:
        """The request passed admission."""
        record.state = state
        self.counts.prompt_tokens += len(state.request.prompt)

    def delivered(self, num_tokens: int, gap_s: float | None) -> None:
        """Output goes to a caller, so long after the request's output before it, if any."""
        self.counts.output_tokens += num_tokens
        if gap_s is not None:
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
        self._note(fleet_pb2.EVENT_KIND_FAILOVER, text, state.request.request_id, trace_id)

    def latency(self) -> fleet_pb2.Latency:
        """Percentiles over the last minute."""
        since = self._clock() - _LATENCY_S
        recent = np.array([taken[1:] for taken in self._latencies if taken[0] >= since])
        if not len(recent):
            return fleet_pb2.Latency()
        half, most = np.percentile(recent, (50, 95), axis=0, method="inverted_cdf")
        return fleet_pb2.Latency(
            requests=len(recent),
            ttft_p50_ms=half[0],
            ttft_p95_ms=most[0],
            tpot_p50_ms=half[1],
            tpot_p95_ms=most[1],
        )

    def _end(self, record: RequestRecord, outcome: Outcome) -> None:
        counts, state = self.counts, record.state
        counts.ended[outcome.status] += 1
        if state is not None:
            counts.cached_tokens += state.cached_tokens or 0
        if outcome.error is not None:
            self._failed(record, outcome)
        elif outcome.status == OK and state is not None:
            counts.served[state.way] += 1
            ttft_s, target_s = state.ttft_s, state.request.ttft_target_s
            counts.late += 0 < target_s < ttft_s
            self._latencies.append((self._clock(), ttft_s * 1e3, state.tpot_s * 1e3))
        for listener in self.listeners:
            listener.ended(record, outcome)

    def _failed(self, record: RequestRecord, outcome: Outcome) -> None:
        """A log line with the ids that lead to its trace: a failure warns, a refusal informs, but
        not each of many.
        """
        self.counts.refused += not record.placed
        why = str(outcome.error) or type(outcome.error).__name__
        kind = fleet_pb2.EVENT_KIND_FAILURE if record.placed else fleet_pb2.EVENT_KIND_REFUSAL
        self._note(kind, f"{outcome.status}: {why}", record.request_id, record.trace_id)
        # Each request that was refused in an overload would be a line, which the loop waits for.
        limited = self._refusals.setdefault(outcome.status, RateLimit(log))
        (log.log if record.placed else limited.line)(
            logging.WARNING if record.placed else logging.INFO,
            "request %s%s of tenant %s ended with %s: %s",
            record.request_id or "(not admitted)",
            record.callers_id and f" ({record.callers_id})",
            record.tenant or "(unknown)",
            outcome.status,
            outcome.error,
            extra=about(trace_id=record.trace_id, request_id=record.request_id),
        )

    def _note(self, kind: fleet_pb2.EventKind, text: str, request_id: str, trace_id: str) -> None:
        event = fleet_pb2.RouterEvent(
            kind=kind,
            text=text[:_MOST_TEXT],
            time_ms=time.time_ns() // 1_000_000,
            request_id=request_id,
            trace_id=trace_id,
            times=1,
        )
        if self.events and (self.events[-1].kind, self.events[-1].text) == (kind, event.text):
            event.times += self.events.pop().times
        self.events.append(event)


def _cut_off(record: RequestRecord) -> Outcome:
    """How a request ended whose call was cut: callers do that at their deadline, too."""
    if record.finished:
        return Outcome(OK)
    if record.state is not None and record.state.request.time_left_s < _HOP_S:
        error = DeadlineExceeded("the deadline passed")
        return Outcome(rpc.code_of(error).name, error)
    return Outcome(CANCELLED)
