"""What a decode worker reports about one sequence: events to its router, spans to its trace."""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, Tracer

from baton.engine.step_report import SequenceProgress
from baton.telemetry import tracing
from baton.worker.dispatch_service import RouterStream
from baton.worker.messages import FINISH_REASONS, logprobs_proto, prompt_logprobs_proto


@dataclass(eq=False)
class EventStream:
    """The events of one sequence: at least `interval` tokens each, except the first and the last.

    They leave within `SOON_S`, but the first token of a request, which is `awaited`, at once.

    `per_token` is set from the first event on if every token is an event: callers may then add a
    sequence's only token to the router's message themselves.
    """

    router: RouterStream
    handoff_id: str
    interval: int = 1
    awaited: bool = True
    started: bool = False
    per_token: bool = False
    _held: SequenceProgress | None = None  # tokens kept for the next event

    def send(self, progress: SequenceProgress, *, from_step: bool = True) -> None:
        """Adds an event to the router's message, or keeps the tokens for the next one.

        from_step: False if the handoff was aborted, not an engine step.
        """
        if (held := self._held) is not None:
            self._held = None
            if progress.abort_reason:  # the failed step gave none of the held tokens
                self._add(held)
            else:
                progress = progress._replace(
                    token_ids=held.token_ids + progress.token_ids,
                    logprobs=held.logprobs + progress.logprobs,
                )
        is_last = progress.finish_reason or progress.abort_reason
        is_full = len(progress.token_ids) >= self.interval
        if is_last or is_full or progress.prompt_logprobs or not self.started:
            self.started, self.per_token = True, self.interval <= 1
            self._add(progress, from_step)
            if self.awaited:
                self.awaited = False
                self.router.flush()
        else:
            self._held = progress

    def _add(self, progress: SequenceProgress, from_step: bool = True) -> None:
        # Fields that most events lack are set separately: an empty argument costs like a set one.
        event = self.router.outgoing_soon.events.add(
            handoff_id=self.handoff_id, token_ids=progress.token_ids
        )
        if progress.logprobs:
            event.logprobs.extend(map(logprobs_proto, progress.logprobs))
        if progress.finish_reason:
            event.finish_reason = FINISH_REASONS[progress.finish_reason]
        if progress.abort_reason:
            event.abort_reason, event.invalid = progress.abort_reason, progress.invalid
            event.step_failed = from_step
        if progress.prompt_logprobs is not None:
            event.prompt_logprobs.CopyFrom(prompt_logprobs_proto(progress.prompt_logprobs))


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
