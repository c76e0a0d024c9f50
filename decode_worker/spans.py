"""One sequence's spans on the decode worker: reserve, admit, first step, run."""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton import telemetry
from baton.engine.loop import Progress


class DecodeSpans:
    """Collects times as they pass and records the spans; the first `end` counts."""

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        self._tracer = tracer
        self._span = tracer.start_span("decode", context=parent)
        self._context = telemetry.context_of(self._span)
        self.trace_id = telemetry.trace_id_of(self._span)  # empty where nothing is recorded
        self._reserve_ns = time.time_ns()
        self._committed_ns = 0
        self._first_step_ns = 0
        self._tokens = 0
        self._steps = 0  # that gave tokens: fewer than those where drafts were right
        self._ended = False

    def reserved(self, cached_tokens: int, started: bool) -> None:
        """Blocks are held."""
        attributes = {"baton.cached_tokens": cached_tokens, "baton.prefills_here": started}
        self._record("decode.reserve", self._reserve_ns, None, attributes)

    def committed(self) -> None:
        """The KV cache is complete; the sequence waits for its first step."""
        self._committed_ns = time.time_ns()

    def step(self, started_ns: int, ended_ns: int, progress: Progress) -> None:
        """A step ran the sequence."""
        self._tokens += len(progress.token_ids)
        self._steps += bool(progress.token_ids)
        if not self._first_step_ns:
            self._first_step_ns = ended_ns
            # A step may have begun before Commit's reply was booked here.
            admitted_ns = max(self._committed_ns, started_ns)
            self._record("decode.admit", self._committed_ns, admitted_ns)
            self._record("decode.first_step", admitted_ns, ended_ns)

    def end(self, reason: str) -> None:
        """The sequence is gone."""
        if self._ended:
            return
        self._ended = True
        if self._first_step_ns:
            attributes = {"gen_ai.usage.output_tokens": self._tokens, "baton.steps": self._steps}
            self._record("decode.run", self._first_step_ns, None, attributes)
        self._span.set_attribute("baton.end", reason)
        self._span.end()

    def _record(
        self, name: str, start_ns: int, end_ns: int | None, attributes: dict[str, int] | None = None
    ) -> None:
        telemetry.record(self._tracer, name, self._context, start_ns, end_ns, attributes)
