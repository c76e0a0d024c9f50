"""The traces that arrived last, in bounded memory.

It does not know how spans arrive (`baton.local.otlp`) or how they are drawn (`trace_tree`). One
asyncio loop owns a store; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.errors import DeadlineExceeded

AttributeValue = str | int | float | bool


@dataclass(frozen=True)
class Span:
    """One finished span. Ids are hexadecimal, `parent_id` empty for a root; times are Unix ns."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    is_entry: bool = False  # the service was called from outside (OpenTelemetry's kind SERVER)
    error: str | None = None  # the status message of a failed span, possibly empty


def is_complete(spans: Sequence[Span], services: Iterable[str] = ()) -> bool:
    """Whether a root, every parent that is referred to, and all of `services` have arrived."""
    ids = {span.span_id for span in spans}
    has_root = any(not span.parent_id for span in spans)
    has_parents = all(not span.parent_id or span.parent_id in ids for span in spans)
    return has_root and has_parents and set(services) <= {span.service for span in spans}


@dataclass
class _Trace:
    spans: dict[str, Span] = field(default_factory=dict)  # by span id: a resent span counts once
    arrived_at: float = 0.0  # time.monotonic() of the last one
    timer: asyncio.TimerHandle | None = None  # of `SpanStore.follow`
    done: bool = False  # its follower has returned True

    def cancel_timer(self) -> None:
        if self.timer:
            self.timer.cancel()


class SpanStore:
    """Keeps at most `max_traces` traces and `max_spans` spans; the oldest traces go first.

    A single trace longer than `max_spans` loses its later spans.
    """

    def __init__(self, max_traces: int = 256, max_spans: int = 20_000) -> None:
        self.max_traces = max_traces
        self.max_spans = max_spans
        self.spans_total = 0
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._arrived = asyncio.Event()
        self._on_quiet: Callable[[Sequence[Span]], bool] | None = None
        self._quiet_s = 0.0

    def __len__(self) -> int:
        return len(self._traces)

    def trace(self, trace_id: str) -> list[Span]:
        """The trace's spans so far, in order of arrival; empty for an unknown trace."""
        return list(self._traces.get(trace_id, _Trace()).spans.values())

    def traces(self) -> Iterator[list[Span]]:
        """The spans of each trace, in the order in which the traces' first spans arrived."""
        return (list(trace.spans.values()) for trace in self._traces.values())

    def arrived_at(self, trace_id: str) -> float:
        """When its last span came, as time.monotonic(); 0 for an unknown trace."""
        return self._traces.get(trace_id, _Trace()).arrived_at

    def add(self, spans: Iterable[Span]) -> None:
        """Stores spans, evicts the oldest traces beyond the limits, wakes `wait_for`."""
        changed = {span.trace_id for span in spans if self._insert(span)}
        while len(self._traces) > self.max_traces or self.spans_total > self.max_spans:
            _, oldest = self._traces.popitem(last=False)
            self.spans_total -= len(oldest.spans)
            oldest.cancel_timer()
        if self._on_quiet is not None:
            loop = asyncio.get_running_loop()
            for trace_id in changed & self._traces.keys():
                trace = self._traces[trace_id]
                trace.cancel_timer()
                trace.timer = loop.call_later(self._quiet_s, self._report, trace_id)
        self._arrived.set()

    async def wait_for(
        self,
        trace_id: str,
        complete: Callable[[Sequence[Span]], bool] = is_complete,
        timeout: float = 5.0,
    ) -> list[Span]:
        """The trace's spans once `complete` holds; DeadlineExceeded after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not complete(spans := self.trace(trace_id)):
                    self._arrived.clear()
                    await self._arrived.wait()
                return spans
        except TimeoutError:
            raise DeadlineExceeded(
                f"trace {trace_id} was not complete after {timeout:g} s: "
                f"{len(self.trace(trace_id))} spans arrived"
            ) from None

    def follow(self, on_quiet: Callable[[Sequence[Span]], bool], quiet_s: float) -> None:
        """Calls `on_quiet` with a trace when `quiet_s` passed without a new span of it.

        It is called again after more spans, until it returns True for the trace.
        """
        self._on_quiet, self._quiet_s = on_quiet, quiet_s

    def close(self) -> None:
        """Ends `follow`."""
        self._on_quiet = None
        for trace in self._traces.values():
            trace.cancel_timer()

    def _insert(self, span: Span) -> bool:
        trace = self._traces.setdefault(span.trace_id, _Trace())
        if span.span_id in trace.spans or len(trace.spans) >= self.max_spans:
            return False
        trace.spans[span.span_id] = span
        trace.arrived_at = time.monotonic()
        self.spans_total += 1
        return True

    def _report(self, trace_id: str) -> None:
        trace = self._traces.get(trace_id)
        if self._on_quiet is not None and trace is not None and not trace.done:
            trace.done = self._on_quiet(self.trace(trace_id))
