"""What has happened at this router since it started: counts that only grow, and the last events.

Plain numbers that anybody in the process may read; `baton top` and `baton status` show them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from baton import rpc
from baton.errors import BatonError, DeadlineExceeded
from baton.v1 import fleet_pb2
from router.dispatch.request_state import Story

_MOST_EVENTS = 32
_MOST_LATENCIES = 512
_LATENCY_S = 60.0
_MOST_TEXT = 300  # of an event: errors may quote others
_HOP_S = 0.1  # a caller's deadline is ours minus the time that its request took to get here
OK, CANCELLED = "OK", "CANCELLED"


@dataclass
class Seen:
    """One request as the tally sees it; whoever serves it fills this in."""

    trace_id: str = ""
    span: Span | None = None
    held: bool = False  # its trace is recorded, but not sampled
    kept: bool = False  # that trace is exported nevertheless
    operation: str = ""  # as GenAI conventions call it
    tenant: str = ""  # empty until it is known
    story: Story | None = None  # None until it is let in
    finished: bool = False  # its caller has all of it
    arrived: float = field(default_factory=time.monotonic)
    arrived_ns: int = field(default_factory=time.time_ns)  # wall clock, for traces

    @property
    def request_id(self) -> str:
        """Empty until it is let in."""
        return self.story.ask.request_id if self.story else ""

    @property
    def placed(self) -> bool:
        """Whether anything was run for it."""
        return self.story is not None and self.story.placed_at is not None


@dataclass(frozen=True)
class Ending:
    """How a request ended; `error` is None where it ended well or its caller left."""

    status: str  # gRPC's name of it
    error: Exception | None = None


class Listener:
    """Somebody else who wants to hear of requests, as they pass. None of it may block or raise."""

    def delivered(self, num_tokens: int, gap_s: float | None) -> None:
        """Output goes to a caller, `gap_s` after the request's output before it; None: the first.

        Called at every token.
        """

    def first_token(self, seen: Seen) -> None:
        """The first output of a request is on its way."""

    def failed_over(self, error: BatonError) -> None:
        """An attempt failed and another follows."""

    def ended(self, seen: Seen, ending: Ending) -> None:
        """A request is over. Listeners are told in order."""


@dataclass
class Event:
    """Something that went wrong with requests, the same thing in a row counted as one."""

    kind: fleet_pb2.EventKind
    text: str
    time_ms: int
    request_id: str
    trace_id: str
    times: int = 1


@dataclass
class Tally:
    """Counts of one router. Event-loop thread only."""

    ended: Counter[str] = field(default_factory=Counter)  # requests by gRPC status
    refused: int = 0  # ended with an error before anything was run
    late: int = 0  # ended well, but missed the target for their first token
    failovers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_MOST_EVENTS))
    clock: Callable[[], float] = time.monotonic
    listeners: tuple[Listener, ...] = ()
    _latencies: deque[tuple[float, float, float]] = field(  # (when, TTFT, TPOT), milliseconds
        default_factory=lambda: deque(maxlen=_MOST_LATENCIES)
    )

    @contextlib.contextmanager
    def request(self) -> Iterator[Seen]:
        """Around one request: counts how it ended."""
        seen = Seen()
        try:
            yield seen
        except (asyncio.CancelledError, GeneratorExit):
            self._end(seen, _left(seen))
            raise
        except Exception as error:
            self._end(seen, Ending(rpc.code_of(error).name, error))
            raise
        else:
            self._end(seen, Ending(OK))

    def let_in(self, seen: Seen, story: Story) -> None:
        """The request passed admission."""
        seen.story = story
        self.prompt_tokens += len(story.ask.prompt)

    def delivered(self, num_tokens: int, gap_s: float | None) -> None:
        """Output goes to a caller, so long after the request's output before it."""
        self.output_tokens += num_tokens
        for listener in self.listeners:
            listener.delivered(num_tokens, gap_s)

    def first_token(self, seen: Seen) -> None:
        """The first output of a request is on its way."""
        for listener in self.listeners:
            listener.first_token(seen)

    def failed_over(self, story: Story, trace_id: str, error: BatonError) -> None:
        """An attempt failed and another follows."""
        self.failovers += 1
        for listener in self.listeners:
            listener.failed_over(error)
        where = " and ".join(filter(None, (story.route.prefill, story.route.decode)))
        text = f"{where}: {error}" if where else str(error)
        self._note(fleet_pb2.EVENT_KIND_FAILOVER, text, story.ask.request_id, trace_id)

    def counts(self) -> fleet_pb2.RouterCounts:
        """The counts as a message."""
        return fleet_pb2.RouterCounts(
            ended=self.ended,
            refused=self.refused,
            late=self.late,
            failovers=self.failovers,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
        )

    def latency(self) -> fleet_pb2.Latency:
        """Percentiles over the last minute."""
        since = self.clock() - _LATENCY_S
        recent = [taken for taken in self._latencies if taken[0] >= since]
        ttft, tpot = sorted(taken[1] for taken in recent), sorted(taken[2] for taken in recent)
        return fleet_pb2.Latency(
            requests=len(recent),
            ttft_p50_ms=_percentile(ttft, 0.5),
            ttft_p95_ms=_percentile(ttft, 0.95),
            tpot_p50_ms=_percentile(tpot, 0.5),
            tpot_p95_ms=_percentile(tpot, 0.95),
        )

    def recent_events(self) -> list[fleet_pb2.RouterEvent]:
        """What went wrong lately, oldest first."""
        return [
            fleet_pb2.RouterEvent(
                time_ms=event.time_ms,
                kind=event.kind,
                text=event.text,
                times=event.times,
                request_id=event.request_id,
                trace_id=event.trace_id,
            )
            for event in self.events
        ]

    def _end(self, seen: Seen, ending: Ending) -> None:
        self.ended[ending.status] += 1
        story = seen.story
        if story is not None:
            self.cached_tokens += story.cached_tokens or 0
        if ending.status == OK and story is not None:
            self._finished(story)
        elif ending.error is not None:
            self._failed(seen, ending.status, ending.error)
        for listener in self.listeners:
            listener.ended(seen, ending)

    def _failed(self, seen: Seen, status: str, error: Exception) -> None:
        self.refused += not seen.placed
        kind = fleet_pb2.EVENT_KIND_FAILURE if seen.placed else fleet_pb2.EVENT_KIND_REFUSAL
        why = str(error) or type(error).__name__
        self._note(kind, f"{status}: {why}", seen.request_id, seen.trace_id)

    def _finished(self, story: Story) -> None:
        timing = story.timing()
        target_s = story.ask.ttft_target_s
        self.late += bool(target_s) and timing.ttft_ms > target_s * 1e3
        self._latencies.append((self.clock(), timing.ttft_ms, timing.tpot_ms))

    def _note(self, kind: fleet_pb2.EventKind, text: str, request_id: str, trace_id: str) -> None:
        text, now_ms = text[:_MOST_TEXT], time.time_ns() // 1_000_000
        last = self.events[-1] if self.events else None
        if last is not None and (last.kind, last.text) == (kind, text):
            last.times += 1
            last.time_ms, last.request_id, last.trace_id = now_ms, request_id, trace_id
        else:
            self.events.append(Event(kind, text, now_ms, request_id, trace_id))


def _left(seen: Seen) -> Ending:
    """How a request ended whose call was cut: callers do that at their deadline, too."""
    if seen.finished:
        return Ending(OK)
    if seen.story is not None and seen.story.ask.time_left_s < _HOP_S:
        error = DeadlineExceeded("the deadline passed")
        return Ending(rpc.code_of(error).name, error)
    return Ending(CANCELLED)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[math.ceil(share * len(ordered)) - 1]
