"""What a decode worker adds to the trace of a request."""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, Tracer

from baton.engine.step_report import SequenceProgress
from baton.telemetry import tracing


class DecodeSpans:
    """The spans of one sequence, recorded from times as they pass; only the first `end` counts.

    Callers count steps that give one token, but for the first step, themselves: there are hundreds
    at a time. `single_tokens`: their number · `last_ns`: end of the last step that gave tokens,
    Unix time · `longest_gap_ns`: the longest time between two.

    They begin with a reservation or its failure: a router that waits for room is refused at each
    try, and tells of that in its own span.
    """

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        self._tracer, self._parent = tracer, parent
        self.trace_id = tracing.trace_id_in(parent)  # empty if nothing is recorded
        self._span: Span | None = None
        self._reserve_ns = time.time_ns()
        self._committed_ns = 0
        self._first_step_ns = 0
        self._tokens = 0
        self._steps = 0  # steps that gave tokens: fewer than tokens if proposed ones were accepted
        self.single_tokens = self.last_ns = self.longest_gap_ns = 0

    def refused(self) -> None:
        """There is no room: nothing is recorded."""
        self._span = INVALID_SPAN

    def reserved(self, cached_tokens: int, started: bool) -> None:
        # The answer may come after the report of the first step, in which it was in effect.
        end_ns = max(self._reserve_ns, self._committed_ns) if self._first_step_ns else None
        attributes: dict[str, float] = {
            "baton.cached_tokens": cached_tokens,
            "baton.prefills_here": started,
        }
        self._record("decode.reserve", self._reserve_ns, end_ns, attributes)

    def committed(self) -> None:
        self._committed_ns = time.time_ns()

    def step(self, started_ns: int, ended_ns: int, progress: SequenceProgress) -> None:
        self._tokens += len(progress.token_ids)
        if progress.token_ids:
            self._steps += 1
            self.longest_gap_ns = max(self.longest_gap_ns, ended_ns - (self.last_ns or ended_ns))
            self.last_ns = ended_ns
        if not self._first_step_ns:
            self._first_step_ns = self.last_ns = ended_ns
            if self._committed_ns > ended_ns:  # recorded after the step that it was in time for
                self._committed_ns = started_ns
            # The step may have begun before the Commit was recorded here.
            admitted_ns = max(self._committed_ns, started_ns)
            self._record("decode.admit", self._committed_ns, admitted_ns)
            self._record("decode.first_step", admitted_ns, ended_ns)

    def end(self, reason: str, preemptions: int = 0) -> None:
        span = self._begun()
        if not span.is_recording():  # it has ended
            return
        if self._first_step_ns:
            attributes: dict[str, float] = {
                "gen_ai.usage.output_tokens": self._tokens + self.single_tokens,
                "baton.steps": self._steps + self.single_tokens,
                "baton.preemptions": preemptions,
                "baton.longest_gap_ms": self.longest_gap_ns / 1e6,
            }
            self._record("decode.run", self._first_step_ns, None, attributes)
        span.set_attribute("baton.end", reason)
        span.end()

    def _begun(self) -> Span:
        if self._span is None:
            start_ns = self._reserve_ns
            self._span = self._tracer.start_span("decode", self._parent, start_time=start_ns)
            self.trace_id = tracing.trace_id_of(self._span)
        return self._span

    def _record(
        self,
        name: str,
        start_ns: int,
        end_ns: int | None,
        attributes: dict[str, float] | None = None,
    ) -> None:
        parent = tracing.context_of(self._begun())
        tracing.record(self._tracer, name, parent, start_ns, end_ns, attributes)
