"""The router's metrics; their names are `baton.metrics.table`'s.

Counts come from the stats as they change; everything else is read when the metrics are.
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
from router.fleet.circuit_breaker import Key
from router.fleet.fleet import Fleet
from router.frontend import GenerationService
from router.telemetry.stats import CANCELLED, OK, Outcome, RequestListener, RequestRecord

CAUSES = (
    "queue_full", "too_late", "tenant_limit", "tenant_unknown", "no_worker", "draining", "invalid",
    "deadline", "internal",
)  # fmt: skip
_CAUSE_OF = {
    Unauthenticated: "tenant_unknown",
    InvalidRequest: "invalid",
    ModelNotFound: "invalid",
    DeadlineExceeded: "deadline",
}
_CALLER_ERRORS = (InvalidRequest, ModelNotFound, Unauthenticated)
_ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}


class RouterMetrics(RequestListener):
    """Counts and measures requests. Event-loop thread only."""

    def __init__(self, recorder: Recorder, model: str, slos: Sequence[Slo]) -> None:
        self._recorder = recorder
        self._model = model
        self._slos = slos
        self._gaps = recorder.gaps("baton.request.inter_token_latency")
        self._input = self._cached = self._output = 0
        self._ejections: Counter[tuple[str, ...]] = Counter({("worker",): 0, ("pair",): 0})
        # Counted here and read at each collection: a counter of OpenTelemetry takes ten times as
        # long.
        self._ended: Counter[tuple[str, ...]] = Counter()
        self._met_slos: Counter[tuple[str, ...]] = Counter()
        self._attributes: dict[tuple[str, str], Attributes] = {}
        self._show_zeros()
        recorder.observe("baton.requests.ended", lambda: _by(self._ended, "status", "tenant"))
        recorder.observe("baton.slo.requests", lambda: _by(self._met_slos, "slo", "met"))
        recorder.observe("baton.tokens.input", lambda: _one(self._input))
        recorder.observe("baton.tokens.cached", lambda: _one(self._cached))
        recorder.observe("baton.tokens.output", lambda: _one(self._output))
        recorder.observe("baton.breaker.ejections", lambda: _by(self._ejections, "kind"))

    def observe(self, service: GenerationService) -> None:
        """Reads these at each collection, and counts ejections from now on."""
        observe = self._recorder.observe
        observe("baton.requests.running", lambda: _one(service.running))
        observe("baton.requests.queued", lambda: _one(service.wait_queue.depth))
        observe("baton.workers", lambda: _workers(service.fleet))
        service.fleet.on_ejected = self._ejected

    def delivered(self, num_tokens: int, gap_s: float | None) -> None:
        """Output is on its way to a caller; `gap_s` after the same request's last."""
        self._output += num_tokens
        if gap_s is not None:
            self._gaps.record(gap_s)

    def first_token(self, record: RequestRecord) -> None:
        """A request has its first token."""
        assert record.state is not None
        state, exemplar = record.state, _exemplar(record)
        self._record("gen_ai.server.time_to_first_token", record, state.ttft_s, exemplar)
        if state.predicted_ttft_s and state.ttft_s and not state.request.resumed:
            ratio = state.predicted_ttft_s / state.ttft_s
            self._recorder.record("baton.request.ttft_prediction", ratio, context=exemplar)

    def failed_over(self, error: BatonError) -> None:
        """An attempt failed and another follows."""
        self._recorder.count("baton.failovers", 1, {"reason": type(error).__name__})

    def ended(self, record: RequestRecord, outcome: Outcome) -> None:
        """A request is over."""
        state, exemplar = record.state, _exemplar(record)
        tenant = state.request.tenant if state else record.tenant
        self._ended[outcome.status, tenant] += 1
        if state is not None and state.placed_at is not None:
            self._input += len(state.request.prompt)
            self._cached += state.cached_tokens or 0
            waited_s = state.placed_at - state.started
            self._recorder.record("baton.request.queue_time", waited_s, context=exemplar)
        elif outcome.error is not None:
            cause = cause_of(record, outcome.error)
            self._recorder.count("baton.requests.refused", 1, {"cause": cause})
        if outcome.status == OK:
            self._finished(record, exemplar)
        if outcome.status != CANCELLED and not isinstance(outcome.error, _CALLER_ERRORS):
            for slo in self._slos:
                met = outcome.status == OK and is_within(slo, record)
                self._met_slos[slo.name, "true" if met else "false"] += 1

    def _finished(self, record: RequestRecord, exemplar: Context | None) -> None:
        assert record.state is not None
        state = record.state
        self._record("gen_ai.server.request.duration", record, state.e2e_s, exemplar)
        new_tokens = len(state.delivered) - len(state.request.resumed)
        if new_tokens > 1:
            self._record("gen_ai.server.time_per_output_token", record, state.tpot_s, exemplar)
        for kind, number in (("input", len(state.request.prompt)), ("output", new_tokens)):
            self._record("gen_ai.client.token.usage", record, number, exemplar, kind)

    def _record(
        self,
        name: str,
        record: RequestRecord,
        value: float,
        exemplar: Context | None,
        token_type: str = "",
    ) -> None:
        key = operation, _ = record.operation, token_type
        attributes = self._attributes.get(key)
        if attributes is None:
            more = {"gen_ai.token.type": token_type} if token_type else {}
            model = {"gen_ai.request.model": self._model, "gen_ai.operation.name": operation}
            attributes = self._attributes[key] = {**model, **more}
        self._recorder.record(name, value, attributes, exemplar)

    def _ejected(self, key: Key) -> None:
        self._ejections["worker" if isinstance(key, str) else "pair",] += 1

    def _show_zeros(self) -> None:
        """A series whose first value is not its first event has no rate."""
        for cause in CAUSES:
            self._recorder.count("baton.requests.refused", 0, {"cause": cause})
        for slo in self._slos:
            for met in ("true", "false"):
                self._met_slos[slo.name, met] = 0
        for reason in (Unavailable, DeadlineExceeded):
            self._recorder.count("baton.failovers", 0, {"reason": reason.__name__})


def cause_of(record: RequestRecord, error: Exception) -> str:
    """Why a request was refused: one of CAUSES."""
    for kind, cause in _CAUSE_OF.items():
        if isinstance(error, kind):
            return cause
    if isinstance(error, Unavailable):  # a draining router refuses before it looks at the key
        return "no_worker" if record.tenant else "draining"
    if not isinstance(error, Overloaded):
        return "internal"
    # By how far it had come: wait queue, tenant's limits, feasibility, the wait queue again.
    if record.state is None:
        return "tenant_limit" if record.tenant else "queue_full"
    return "queue_full" if record.state.attempts else "too_late"


def is_within(slo: Slo, record: RequestRecord) -> bool:
    """Whether a request that ended OK met the SLO."""
    state = record.state
    return state is not None and slo.met(state.ttft_s, state.tpot_s, state.e2e_s)


def _exemplar(record: RequestRecord) -> Context | None:
    return telemetry.example(record.span, record.kept) if record.span is not None else None


def _one(value: float) -> Iterator[tuple[float, Attributes]]:
    yield value, {}


def _by(counts: Counter[tuple[str, ...]], *labels: str) -> Iterator[tuple[float, Attributes]]:
    for values, number in counts.items():
        yield number, dict(zip(labels, values, strict=True))


def _workers(fleet: Fleet) -> Iterator[tuple[float, Attributes]]:
    snapshot = fleet.snapshot()
    views = (*snapshot.prefill, *snapshot.decode)
    counts: Counter[tuple[str, ...]] = Counter(
        (_ROLES[view.record.role], view.state) for view in views
    )
    for role in _ROLES.values():  # 0 is worth an alert: it must be there
        counts[role, "READY"] += 0
    return _by(counts, "role", "state")
