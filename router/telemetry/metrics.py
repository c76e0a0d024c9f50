"""What a router measures of requests and of what it sees; the names are `baton.metrics.table`'s.

It listens to the tally and reads everything else when somebody looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from opentelemetry.context import Context

from baton import telemetry
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from baton.metrics.recorder import Attributes, Recorder
from baton.slo import Slo
from baton.v1 import common_pb2
from router.admission.wait_queue import Line
from router.fleet.circuit_breaker import Key
from router.fleet.fleet import Fleet
from router.frontend import Door
from router.telemetry.stats import CANCELLED, OK, Ending, Listener, Seen

CAUSES = (
    "queue_full", "too_late", "tenant_limit", "tenant_unknown", "no_worker", "draining", "invalid",
    "deadline", "internal",
)  # fmt: skip
_OWN_FAULT = (InvalidRequest, ModelNotFound, Unauthenticated)  # the caller's, that is
_ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}


class Figures(Listener):
    """A listener of the tally that counts and measures. Event-loop thread only."""

    def __init__(self, recorder: Recorder, model: str, slos: Sequence[Slo]) -> None:
        self._recorder = recorder
        self._model = model
        self._slos = slos
        self._gaps = recorder.gaps("baton.request.inter_token_latency")
        self._input = self._cached = self._output = 0
        self._ejections = Counter({"worker": 0, "pair": 0})
        # Counted here and read at each look: a counter of OpenTelemetry's takes ten times as long.
        self._ended: Counter[tuple[str, str]] = Counter()
        self._kept_slos: Counter[tuple[str, str]] = Counter()
        self._attributes: dict[tuple[str, str], Attributes] = {}
        self._show_zeros()
        recorder.observe("baton.requests.ended", lambda: _by_two(self._ended, "status", "tenant"))
        recorder.observe("baton.slo.requests", lambda: _by_two(self._kept_slos, "slo", "met"))
        recorder.observe("baton.tokens.input", lambda: _one(self._input))
        recorder.observe("baton.tokens.cached", lambda: _one(self._cached))
        recorder.observe("baton.tokens.output", lambda: _one(self._output))
        recorder.observe("baton.breaker.ejections", lambda: _by(self._ejections, "kind"))

    def look_at(self, door: Door, line: Line, fleet: Fleet) -> None:
        """Has these read at every look, and hears of their news from now on."""
        observe = self._recorder.observe
        observe("baton.requests.running", lambda: _one(door.running))
        observe("baton.requests.queued", lambda: _one(line.depth))
        observe("baton.workers", lambda: _workers(fleet))
        fleet.on_ejected = self._ejected

    def delivered(self, num_tokens: int, gap_s: float | None) -> None:
        """Output is on its way to a caller; `gap_s` after the same request's last."""
        self._output += num_tokens
        if gap_s is not None:
            self._gaps.record(gap_s)

    def first_token(self, seen: Seen) -> None:
        """A request has its first token."""
        assert seen.story is not None
        story, example = seen.story, _example(seen)
        self._record("gen_ai.server.time_to_first_token", seen, story.ttft_s, example)
        if story.predicted_ttft_s and story.ttft_s and not story.ask.resumed:
            ratio = story.predicted_ttft_s / story.ttft_s
            self._recorder.record("baton.request.ttft_prediction", ratio, context=example)

    def failed_over(self, error: BatonError) -> None:
        """An attempt failed and another follows."""
        self._recorder.count("baton.failovers", 1, {"reason": type(error).__name__})

    def ended(self, seen: Seen, ending: Ending) -> None:
        """A request is over."""
        tenant = seen.story.ask.tenant if seen.story else seen.tenant
        self._ended[ending.status, tenant] += 1
        example = _example(seen)
        if seen.placed:
            self._placed(seen, example)
        elif ending.error is not None:
            cause = cause_of(seen, ending.error)
            self._recorder.count("baton.requests.refused", 1, {"cause": cause})
        if ending.status == OK:
            self._finished(seen, example)
        if ending.status != CANCELLED and not isinstance(ending.error, _OWN_FAULT):
            self._judge(seen, ending)

    def _placed(self, seen: Seen, example: Context | None) -> None:
        story = seen.story
        assert story is not None and story.placed_at is not None
        self._input += len(story.ask.prompt)
        self._cached += story.cached_tokens or 0
        waited_s = story.placed_at - story.started
        self._recorder.record("baton.request.queue_time", waited_s, context=example)

    def _finished(self, seen: Seen, example: Context | None) -> None:
        assert seen.story is not None
        story = seen.story
        self._record("gen_ai.server.request.duration", seen, story.e2e_s, example)
        new_tokens = len(story.delivered) - len(story.ask.resumed)
        if new_tokens > 1:
            self._record("gen_ai.server.time_per_output_token", seen, story.tpot_s, example)
        for kind, number in (("input", len(story.ask.prompt)), ("output", new_tokens)):
            self._record("gen_ai.client.token.usage", seen, number, example, kind)

    def _judge(self, seen: Seen, ending: Ending) -> None:
        for slo in self._slos:
            kept = ending.status == OK and is_within(slo, seen)
            self._kept_slos[slo.name, "true" if kept else "false"] += 1

    def _record(
        self, name: str, seen: Seen, value: float, example: Context | None, token_type: str = ""
    ) -> None:
        attributes = self._attributes_of(seen.operation, token_type)
        self._recorder.record(name, value, attributes, example)

    def _attributes_of(self, operation: str, token_type: str) -> Attributes:
        """Made once each."""
        found = self._attributes.get((operation, token_type))
        if found is None:
            more = {"gen_ai.token.type": token_type} if token_type else {}
            model, name = self._model, operation
            found = {"gen_ai.request.model": model, "gen_ai.operation.name": name, **more}
            self._attributes[operation, token_type] = found
        return found

    def _ejected(self, key: Key) -> None:
        self._ejections["worker" if isinstance(key, str) else "pair"] += 1

    def _show_zeros(self) -> None:
        """A rate cannot be told of a series whose first value is not its first event."""
        for cause in CAUSES:
            self._recorder.count("baton.requests.refused", 0, {"cause": cause})
        for slo in self._slos:
            for met in ("true", "false"):
                self._kept_slos[slo.name, met] = 0
        for reason in (Unavailable, DeadlineExceeded):
            self._recorder.count("baton.failovers", 0, {"reason": reason.__name__})


def cause_of(seen: Seen, error: Exception) -> str:
    """Why a request was refused: one of CAUSES."""
    if isinstance(error, Unauthenticated):
        return "tenant_unknown"
    if isinstance(error, (InvalidRequest, ModelNotFound)):
        return "invalid"
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    if isinstance(error, Overloaded):
        return _cause_of_overload(seen)
    if isinstance(error, Unavailable):  # a draining router asks nobody who he is
        return "no_worker" if seen.tenant else "draining"
    return "internal"


def _cause_of_overload(seen: Seen) -> str:
    """By how far it had come: room in the line, tenant's limits, feasibility, the line itself."""
    if seen.story is None:
        return "tenant_limit" if seen.tenant else "queue_full"
    return "queue_full" if seen.story.attempts else "too_late"


def is_within(slo: Slo, seen: Seen) -> bool:
    """Whether a request that ended OK kept what its class was promised."""
    story = seen.story
    return story is not None and slo.met(story.ttft_s, story.tpot_s, story.e2e_s)


def _example(seen: Seen) -> Context | None:
    return telemetry.example(seen.span, seen.kept) if seen.span is not None else None


def _one(value: float) -> Iterator[tuple[float, Attributes]]:
    yield value, {}


def _by(counts: Counter[str], attribute: str) -> Iterator[tuple[float, Attributes]]:
    for name, number in counts.items():
        yield number, {attribute: name}


def _by_two(
    counts: Counter[tuple[str, str]], first: str, second: str
) -> Iterator[tuple[float, Attributes]]:
    for (one, other), number in counts.items():
        yield number, {first: one, second: other}


def _workers(fleet: Fleet) -> Iterator[tuple[float, Attributes]]:
    snapshot = fleet.snapshot()
    views = (*snapshot.prefill, *snapshot.decode)
    counts = Counter((_ROLES[view.record.role], view.state) for view in views)
    for role in _ROLES.values():  # 0 is worth an alert: it must be there
        counts[role, "READY"] += 0
    for (role, state), number in counts.items():
        yield number, {"role": role, "state": state}
