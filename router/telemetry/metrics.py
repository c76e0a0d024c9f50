"""The router's metrics; `baton.telemetry.metrics.instruments` defines their names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from opentelemetry.context import Context

from baton.config.slo import Slo
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from baton.net.http_errors import ServerFull
from baton.registry.membership import ROLES
from baton.telemetry import tracing
from baton.telemetry.metrics.prometheus import Attributes, Recorder
from baton.v1.route_pb2 import CANARY_STATE_RUNNING, ModelRoute
from router.fleet.circuit_breaker import Key
from router.fleet.fleet import Fleet
from router.fleet.snapshot import WorkerView
from router.request import LimitReached
from router.telemetry.stats import (
    CANCELLED,
    OK,
    RequestListener,
    RequestOutcome,
    RequestRecord,
    RouterStats,
)

CAUSES = (
    "overloaded", "queue_full", "too_late", "tenant_limit", "tenant_unknown", "no_worker",
    "draining", "invalid", "deadline", "internal",
)  # fmt: skip
CANARY_DECISIONS = ("stepped", "promoted", "rolled_back")
_CAUSES_BY_ERROR = (
    (Unauthenticated, "tenant_unknown"),
    ((InvalidRequest, ModelNotFound), "invalid"),
    (DeadlineExceeded, "deadline"),
)
_CALLER_ERRORS = (InvalidRequest, ModelNotFound, Unauthenticated)


class ObservedVersion(Protocol):
    """The part of a served model version whose state is exported."""

    fleet: Fleet
    output_tokens: int

    @property
    def labels(self) -> Mapping[str, str]: ...


class ObservedModels(Protocol):
    """The part of the served models whose state is exported."""

    @property
    def versions(self) -> Mapping[tuple[str, str], ObservedVersion]: ...
    @property
    def workers(self) -> Sequence[WorkerView]: ...
    @property
    def routes(self) -> Callable[[], Mapping[str, ModelRoute]]: ...


class ObservedService(Protocol):
    """The part of the generation service whose state is exported."""

    @property
    def running(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def stats(self) -> RouterStats: ...

    @property
    def models(self) -> ObservedModels: ...

    batches: Counter[str]
    batch_lines: Counter[str]


class RouterMetrics(RequestListener):
    """Counts and measures requests. Event-loop thread only."""

    def __init__(self, recorder: Recorder, slos: Sequence[Slo]) -> None:
        self._recorder = recorder
        self._slos = slos
        self.gaps = recorder.gaps("baton.request.inter_token_latency")
        self.placements = recorder.gaps("baton.placement.duration")
        self.lag = recorder.gaps("baton.event_loop.lag")
        # A series that starts with its first event has no rate for it.
        for name, label, values in (
            ("baton.breaker.ejections", "kind", ("worker", "pair")),
            ("baton.requests.refused", "cause", CAUSES),
            ("baton.failovers", "reason", (Unavailable.__name__, DeadlineExceeded.__name__)),
        ):
            for value in values:
                recorder.count(name, 0, {label: value})
        for slo in slos:
            for met in ("true", "false"):
                recorder.count("baton.slo.requests", 0, {"slo": slo.name, "met": met})

    def observe(self, service: ObservedService) -> None:
        """Reads the service's state at each collection, and records its events from now on."""
        stats, models, observe = service.stats, service.models, self._recorder.observe
        stats.on_gap, stats.on_placed = self.gaps.record, self.placements.record
        observe("baton.requests.running", lambda: service.running)
        observe("baton.requests.queued", lambda: service.queued)
        observe("baton.tokens.output", lambda: self._output_tokens(models))
        for name, label, counts in (
            ("baton.requests.served", "way", stats.counts.served),
            ("baton.batches", "status", service.batches),
            ("baton.batch.requests", "result", service.batch_lines),
        ):
            observe(name, partial(_values_by_label, label, counts))
        observe("baton.workers", lambda: _workers(models))
        observe("baton.route.share", lambda: _route_shares(models))
        observe("baton.canary.step.age", lambda: self._canary_ages(models))

    def first_token(self, record: RequestRecord) -> None:
        assert record.state is not None
        state, context = record.state, _exemplar(record)
        if not record.in_batch:
            self._record("gen_ai.server.time_to_first_token", record, state.ttft_s, context)
        began_late = state.request.resumed or state.request.is_further_choice
        if state.predicted_ttft_s and state.ttft_s and not began_late:
            ratio = state.predicted_ttft_s / state.ttft_s
            self._recorder.record("baton.request.ttft_prediction", ratio, context=context)

    def failed_over(self, error: BatonError) -> None:
        self._recorder.count("baton.failovers", 1, {"reason": type(error).__name__})

    def ended(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        state, count, context = record.state, self._recorder.count, _exemplar(record)
        tenant = state.request.tenant if state else record.tenant
        count("baton.requests.ended", 1, {"status": outcome.status, "tenant": tenant})
        if state is not None and state.placed_at is not None:
            if not state.request.is_further_choice:  # of a prompt that is counted once
                count("baton.tokens.input", len(state.request.prompt), record.labels)
                count("baton.tokens.cached", state.cached_tokens or 0, record.labels)
            if not record.in_batch:
                waited_s = state.placed_at - state.started
                self._recorder.record("baton.request.queue_time", waited_s, context=context)
        elif outcome.error is not None and not record.in_batch:
            count("baton.requests.refused", 1, {"cause": _refusal_cause(record, outcome.error)})
        if state is not None and not record.in_batch:
            kind = type(outcome.error).__name__ if outcome.error else outcome.status
            failed = {"error.type": "" if outcome.status == OK else kind}
            self._record("gen_ai.server.request.duration", record, state.e2e_s, context, failed)
        if outcome.status == OK and state is not None:
            new_tokens = len(state.delivered) - len(state.request.resumed)
            if new_tokens > 1 and not record.in_batch:
                self._record("gen_ai.server.time_per_output_token", record, state.tpot_s, context)
            used = {"output": new_tokens}
            if not state.request.is_further_choice:
                used["input"] = len(state.request.prompt)
            for kind, number in used.items():
                more = {"gen_ai.token.type": kind}
                self._record("gen_ai.client.token.usage", record, number, context, more)
        if not (
            record.in_batch
            or outcome.status == CANCELLED
            or isinstance(outcome.error, _CALLER_ERRORS)
        ):
            for slo in self._slos:
                met = outcome.status == OK and state is not None and state.is_within(slo)
                count("baton.slo.requests", 1, {"slo": slo.name, "met": str(met).lower()})

    def _record(
        self,
        name: str,
        record: RequestRecord,
        value: float,
        context: Context | None,
        more: Attributes | None = None,
    ) -> None:
        attributes = {
            **record.labels,
            "gen_ai.provider.name": tracing.PROVIDER,
            "gen_ai.operation.name": record.operation,
            **(more or {}),
        }
        self._recorder.record(name, value, attributes, context)

    def canary_decided(self, route: str, decision: str) -> None:
        """A canary of a route went a step on, was promoted or rolled back by this router."""
        self._recorder.count("baton.canary.decisions", 1, {"route": route, "decision": decision})

    def ejected(self, key: Key) -> None:
        """A worker or pair is left alone after failures."""
        kind = "worker" if isinstance(key, str) else "pair"
        self._recorder.count("baton.breaker.ejections", 1, {"kind": kind})

    def _output_tokens(self, models: ObservedModels) -> Iterator[tuple[float, Attributes]]:
        for version in models.versions.values():
            for name in ("baton.tokens.input", "baton.tokens.cached"):
                self._recorder.count(name, 0, version.labels)
            yield version.output_tokens, version.labels

    def _canary_ages(self, models: ObservedModels) -> Iterator[tuple[float, Attributes]]:
        for route in models.routes().values():
            if route.canary.state != CANARY_STATE_RUNNING:
                continue
            for decision in CANARY_DECISIONS:
                counted = {"route": route.name, "decision": decision}
                self._recorder.count("baton.canary.decisions", 0, counted)
            yield time.time() - route.changed_ms / 1e3, {"route": route.name}


def _values_by_label(label: str, counts: Mapping[str, int]) -> list[tuple[float, Attributes]]:
    return [(number, {label: value}) for value, number in counts.items()]


def _refusal_cause(record: RequestRecord, error: Exception) -> str:
    if isinstance(error, ServerFull):
        return "overloaded"
    if isinstance(error, Unavailable):  # a draining router refuses before it checks the key
        return "no_worker" if record.tenant else "draining"
    if isinstance(error, Overloaded):
        if isinstance(error, LimitReached):
            return "tenant_limit"
        # By its progress: wait queue, early rejection, the wait queue again.
        return "too_late" if record.state and not record.state.attempts else "queue_full"
    return next((cause for kind, cause in _CAUSES_BY_ERROR if isinstance(error, kind)), "internal")


def _exemplar(record: RequestRecord) -> Context | None:
    return tracing.example(record.span, record.kept) if record.span is not None else None


def _route_shares(models: ObservedModels) -> Iterator[tuple[float, Attributes]]:
    for route in models.routes().values():
        total = sum(target.weight for target in route.targets)
        for one in route.targets:
            model = {"gen_ai.request.model": one.model, "baton.model.version": one.version}
            yield one.weight / total, {"route": route.name, **model}


def _workers(models: ObservedModels) -> Iterator[tuple[float, Attributes]]:
    counts = Counter(
        (view.record.model, view.record.version, ROLES[view.record.role], view.state)
        for view in models.workers
    )
    for key in models.versions:
        for role in ROLES.values():  # exported when 0, too: alerts need it
            counts[*key, role, "READY"] += 0
    for (model, version, role, state), number in counts.items():
        labels = {"gen_ai.request.model": model, "baton.model.version": version}
        yield number, {**labels, "role": role, "state": state}
