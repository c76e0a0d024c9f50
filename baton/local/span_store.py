"""The last traces that arrived, in memory and bounded, for showing them to a person.

Knows nothing of how spans arrive (`baton.local.otlp`) or how they are drawn (`trace_tree`).
One asyncio loop owns a store; nothing here is thread-safe.
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
    """Whether a root, every parent that is referred to, and all of `services` are there."""
    ids = {span.span_id for span in spans}
    has_root = any(not span.parent_id for span in spans)
    has_parents = all(not span.parent_id or span.parent_id in ids for span in spans)
    return has_root and has_parents and set(services) <= {span.service for span in spans}


@dataclass
class _Trace:
    spans: dict[str, Span] = field(default_factory=dict)  # by span id: a resent span counts once
    arrived_at: float = 0.0  # time.monotonic() of the last one
    quiet: asyncio.TimerHandle | None = None
    told: bool = False


class SpanStore:
    """Keeps at most `max_traces` traces and `max_spans` spans; the oldest traces go first.

    A single trace longer than `max_spans` loses its later spans, which are counted in
    `spans_dropped` as evicted ones are.
    """

    def __init__(self, max_traces: int = 256, max_spans: int = 20_000) -> None:
        self.max_traces = max_traces
        self.max_spans = max_spans
        self.spans_total = 0
        self.spans_dropped = 0
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._waiting: dict[asyncio.Future[None], tuple[str, Callable[[Sequence[Span]], bool]]] = {}
        self._on_quiet: Callable[[Sequence[Span]], bool] | None = None
        self._quiet_s = 0.0

    def __len__(self) -> int:
        return len(self._traces)

    def trace(self, trace_id: str) -> list[Span]:
        """The trace's spans so far, in order of arrival; empty for an unknown trace."""
        trace = self._traces.get(trace_id)
        return list(trace.spans.values()) if trace else []

    def traces(self) -> Iterator[list[Span]]:
        """The spans of each trace, the one that began to arrive first first."""
        return (list(trace.spans.values()) for trace in self._traces.values())

    def arrived_at(self, trace_id: str) -> float:
        """When its last span came, as time.monotonic(); 0 for an unknown trace."""
        trace = self._traces.get(trace_id)
        return trace.arrived_at if trace else 0.0

    def add(self, spans: Iterable[Span]) -> None:
        """Stores spans, evicts what is too much, wakes whoever waited for them."""
        changed = {span.trace_id for span in spans if self._insert(span)}
        self._evict()
        for trace_id in changed & self._traces.keys():
            self._restart_quiet_timer(trace_id)
        for future, (trace_id, complete) in list(self._waiting.items()):
            if trace_id in changed and not future.done() and complete(self.trace(trace_id)):
                future.set_result(None)

    async def wait_for(
        self,
        trace_id: str,
        complete: Callable[[Sequence[Span]], bool] = is_complete,
        timeout: float = 5.0,
    ) -> list[Span]:
        """The trace's spans once `complete` holds; DeadlineExceeded after `timeout` seconds."""
        if complete(self.trace(trace_id)):
            return self.trace(trace_id)
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[arrived] = (trace_id, complete)
        try:
            async with asyncio.timeout(timeout):
                await arrived
        except TimeoutError:
            raise DeadlineExceeded(
                f"trace {trace_id} was not complete after {timeout:g} s: "
                f"{len(self.trace(trace_id))} spans arrived"
            ) from None
        finally:
            del self._waiting[arrived]
        return self.trace(trace_id)

    def follow(self, on_quiet: Callable[[Sequence[Span]], bool], quiet_s: float) -> None:
        """Calls `on_quiet` with a trace when `quiet_s` passed without a new span of it.

        It is called again after more spans, until it returns True for the trace.
        """
        self._on_quiet, self._quiet_s = on_quiet, quiet_s

    def close(self) -> None:
        """Cancels the timers of followed traces."""
        self._on_quiet = None
        for trace in self._traces.values():
            if trace.quiet:
                trace.quiet.cancel()

    def _insert(self, span: Span) -> bool:
        trace = self._traces.setdefault(span.trace_id, _Trace())
        if span.span_id in trace.spans:
            return False
        if len(trace.spans) >= self.max_spans:
            self.spans_dropped += 1
            return False
        trace.spans[span.span_id] = span
        trace.arrived_at = time.monotonic()
        self.spans_total += 1
        return True

    def _evict(self) -> None:
        while len(self._traces) > self.max_traces or self.spans_total > self.max_spans:
            _, oldest = self._traces.popitem(last=False)
            self.spans_total -= len(oldest.spans)
            self.spans_dropped += len(oldest.spans)
            if oldest.quiet:
                oldest.quiet.cancel()

    def _restart_quiet_timer(self, trace_id: str) -> None:
        if self._on_quiet is None:
            return
        trace = self._traces[trace_id]
        if trace.quiet:
            trace.quiet.cancel()
        loop = asyncio.get_running_loop()
        trace.quiet = loop.call_later(self._quiet_s, self._tell_quiet, trace_id)

    def _tell_quiet(self, trace_id: str) -> None:
        trace = self._traces.get(trace_id)
        if self._on_quiet is not None and trace is not None and not trace.told:
            trace.told = self._on_quiet(self.trace(trace_id))
