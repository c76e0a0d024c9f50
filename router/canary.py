"""Canaries: a new version gets more of a name's requests step by step, or none if it is worse.

Each router compares the requests that it served itself, and the first one that decides writes the
route, over what it had read: two never decide at once. In a step it looks when the new version has
ended `min_requests`, again at each doubling, and before the step ends. A look asks three questions,
each by a one-sided test:

    errors      Fisher's exact test of failed requests, new against old
    TTFT, TPOT  Mann and Whitney's rank test, and the medians' ratio above `max_slowdown`

Look k of a step tests at LEVEL / 3 / 2^k, so that of equal versions at most LEVEL of the steps is
rolled back, however often it looks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from opentelemetry.trace import Tracer

from baton.config import shown_name
from baton.errors import BatonError, InvalidRequest, ModelNotFound, Unauthenticated
from baton.registry import RouteTable
from baton.v1 import fleet_pb2
from baton.v1.route_pb2 import (
    CANARY_STATE_PROMOTED,
    CANARY_STATE_ROLLED_BACK,
    CANARY_STATE_RUNNING,
    Canary,
    ModelRoute,
    RouteTarget,
)
from router.models import Models
from router.request import LimitReached
from router.telemetry.metrics import CANARY_DECISIONS
from router.telemetry.stats import CANCELLED, OK, RequestListener, RequestOutcome, RequestRecord

log = logging.getLogger(__name__)

LEVEL = 0.05
_TESTS = 3
_MIN_VALUES = 20  # of each version, for the rank test's normal approximation
_MAX_VALUES = 2000  # the latest ones that are kept
_LOOK_S = 0.5
# Errors of the caller, which are not counted.
_CALLER_ERRORS = (InvalidRequest, ModelNotFound, Unauthenticated, LimitReached)

STEPPED, PROMOTED, ROLLED_BACK = CANARY_DECISIONS


@dataclass
class VersionStats:
    """How requests to a version ended in a step."""

    ended: int = 0
    errors: int = 0
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_VALUES))
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_VALUES))

    def add(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        """Counts a request, unless its caller left it or is to blame for its error."""
        if outcome.status == CANCELLED or isinstance(outcome.error, _CALLER_ERRORS):
            return
        state = record.state
        self.ended += 1
        self.errors += outcome.status != OK
        if outcome.status == OK and state is not None and not state.request.resumed:
            self.ttft_s.append(state.ttft_s)
            if len(state.delivered) > 1:
                self.tpot_s.append(state.tpot_s)


@dataclass
class _Step:
    """What this router knows of a canary's step."""

    changed_ms: int  # of the route: another value is another step
    new: VersionStats = field(default_factory=VersionStats)
    old: VersionStats = field(default_factory=VersionStats)
    looks: int = 0
    next_look: int = 0  # ended requests of the new version; 0: the first look
    unready_since: float | None = None


@dataclass(frozen=True)
class Decision:
    """A decision on a canary, and its reason."""

    kind: str  # STEPPED, PROMOTED or ROLLED_BACK
    reason: str


class Canaries(RequestListener):
    """Decides on the running canaries of the route table. Event-loop thread only."""

    def __init__(
        self,
        models: Models,
        table: RouteTable,
        tracer: Tracer,
        unready_s: float,
        note: Callable[[fleet_pb2.EventKind, str], None],
        count: Callable[[str, str], None],
    ) -> None:
        """`unready_s`: how long a new version may have no usable workers. `note` gets an event for
        the router's status, `count` the route and the kind of each decision."""
        self._models, self._table, self._tracer = models, table, tracer
        self._unready_s, self._note, self._count = unready_s, note, count
        self._steps: dict[str, _Step] = {}

    def ended(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        """Counts a request that a canary's route gave to one of its versions."""
        route = self._table.routes.get(record.route)
        if route is None or route.canary.state != CANARY_STATE_RUNNING or record.in_batch:
            return
        step, target = self._step(route), route.canary.target
        labels = record.labels["gen_ai.request.model"], record.labels["baton.model.version"]
        is_new = labels == (target.model, target.version)
        (step.new if is_new else step.old).add(record, outcome)

    async def follow(self) -> None:
        """Looks at the running canaries until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            routes = self._table.routes
            running = {n: r for n, r in routes.items() if r.canary.state == CANARY_STATE_RUNNING}
            self._steps = {name: step for name, step in self._steps.items() if name in running}
            for route in running.values():
                if (decision := self._look(route)) is not None:
                    await self._apply(route, decision)

    def _step(self, route: ModelRoute) -> _Step:
        step = self._steps.get(route.name)
        if step is None or step.changed_ms != route.changed_ms:
            before, step = step, _Step(route.changed_ms)
            if before is not None and len(route.targets) == 1:
                step.old = before.old  # all requests go to the new version: nothing else to compare
            self._steps[route.name] = step
        return step

    def _look(self, route: ModelRoute) -> Decision | None:
        step, target, now = self._step(route), route.canary.target, time.monotonic()
        if self._models.is_ready(target):
            step.unready_since = None
        elif step.unready_since is None:
            step.unready_since = now
        elif now - step.unready_since > self._unready_s:
            name = shown_name(target.model, target.version)
            return Decision(
                ROLLED_BACK, f"{name} has had no usable workers for {self._unready_s:g} s"
            )
        else:
            return None
        return look(route.canary, step, time.time() - route.changed_ms / 1e3)

    async def _apply(self, route: ModelRoute, decision: Decision) -> None:
        new = advanced(route, decision)
        try:
            if not await self._table.write(route.name, new):
                await self._table.refresh()  # another router has decided, or an operator
                return
        except BatonError as error:
            log.warning("canary of %s: the decision cannot be written: %s", route.name, error)
            return
        target = shown_name(route.canary.target.model, route.canary.target.version)
        what = decision.kind.replace("_", " ")
        text = f"canary of {route.name}: {target} {what}: {new.canary.reason}"
        log.log(logging.WARNING if decision.kind == ROLLED_BACK else logging.INFO, "%s", text)
        self._note(fleet_pb2.EVENT_KIND_CANARY, text)
        self._count(route.name, decision.kind)
        span = self._tracer.start_span("router.canary")
        span.set_attributes({
            "baton.route": route.name, "baton.canary.target": target,
            "baton.canary.decision": decision.kind, "baton.canary.reason": decision.reason,
            "baton.canary.step": new.canary.step,
        })  # fmt: skip
        span.end()


def look(canary: Canary, step: _Step, age_s: float) -> Decision | None:
    """Compares the versions if it is time to, and ends the step if it was long enough."""
    new, old = step.new, step.old
    if new.ended < max(1, canary.min_requests):
        return None
    is_over = age_s >= canary.step_s
    if not is_over and new.ended < step.next_look:
        return None
    step.looks += 1
    step.next_look = 2 * new.ended
    if worse := why_worse(new, old, canary.max_slowdown, LEVEL / _TESTS / 2**step.looks):
        return Decision(ROLLED_BACK, worse)
    if not is_over:
        return None
    is_last = canary.step + 1 >= len(canary.steps)
    return Decision(PROMOTED if is_last else STEPPED, f"no worse: {_figures(new, old)}")


def why_worse(new: VersionStats, old: VersionStats, max_slowdown: float, level: float) -> str:
    """Why the new version is worse than the old one; empty if no test says so."""
    p = fisher_greater(new.errors, new.ended, old.errors, old.ended)
    if p < level:
        return f"more errors (Fisher's p {p:.2g} < {level:.2g}): {_figures(new, old)}"
    for name, ours, theirs in _latencies(new, old):
        if min(len(ours), len(theirs)) < _MIN_VALUES:
            continue
        medians = statistics.median(ours), statistics.median(theirs)
        p = rank_greater(ours, theirs)
        if p < level and medians[0] > max_slowdown * medians[1]:
            return f"slower {name} (rank test's p {p:.2g} < {level:.2g}): {_figures(new, old)}"
    return ""


def advanced(route: ModelRoute, decision: Decision) -> ModelRoute:
    """The route after a decision."""
    new = ModelRoute()
    new.CopyFrom(route)
    canary = new.canary
    new.changed_ms, canary.reason = (
        max(time.time_ns() // 1_000_000, route.changed_ms + 1),
        decision.reason,
    )
    del new.targets[:]
    if decision.kind == ROLLED_BACK:
        canary.state = CANARY_STATE_ROLLED_BACK
        new.targets.extend(canary.before)
    elif decision.kind == PROMOTED:
        canary.state = CANARY_STATE_PROMOTED
        new.targets.extend(shared(canary.before, canary.target, 100.0))
    else:
        canary.step += 1
        percent = canary.steps[canary.step]
        canary.reason = f"{percent:g} %, {decision.reason}"
        new.targets.extend(shared(canary.before, canary.target, percent))
    return new


def shared(before: Sequence[RouteTarget], target: RouteTarget, percent: float) -> list[RouteTarget]:
    """The targets with a share for the new one; what is left is divided as before."""
    total = sum(one.weight for one in before)
    left = [
        RouteTarget(
            model=one.model,
            version=one.version if one.HasField("version") else None,
            weight=(100.0 - percent) * one.weight / total,
        )
        for one in before
    ]
    new = RouteTarget(model=target.model, version=target.version, weight=percent)
    return [*(one for one in left if one.weight > 0), new]


def fisher_greater(errors: int, ended: int, others_errors: int, others_ended: int) -> float:
    """One-sided p of Fisher's exact test: these errors or more if both had one error rate."""
    failed, total = errors + others_errors, ended + others_ended

    def log_choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    every, sum_of = log_choose(total, failed), 0.0
    for count in range(errors, min(failed, ended) + 1):
        if failed - count > others_ended:
            continue
        one = math.exp(log_choose(ended, count) + log_choose(others_ended, failed - count) - every)
        sum_of += one
        if count * total > failed * ended and one < 1e-12 * sum_of:
            break  # behind the mode terms only fall
    return min(1.0, sum_of)


def rank_greater(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """One-sided p of the rank test of Mann and Whitney (1947), by its normal approximation with
    ties: ranks of `ours` so high or higher if both had one distribution."""
    n, m = len(ours), len(theirs)
    _, index, ties = np.unique([*ours, *theirs], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[index]
    above = float(ranks[:n].sum()) - n * (n + 1) / 2
    total = n + m
    tied = float((ties**3 - ties).sum()) / (total * (total - 1))
    deviation = math.sqrt(n * m / 12 * (total + 1 - tied))
    if not deviation:
        return 1.0
    return 0.5 * math.erfc((above - n * m / 2 - 0.5) / deviation / math.sqrt(2))


def _latencies(
    new: VersionStats, old: VersionStats
) -> Iterator[tuple[str, Sequence[float], Sequence[float]]]:
    """Name and both versions' values of each latency, in seconds."""
    yield "TTFT", new.ttft_s, old.ttft_s
    yield "TPOT", new.tpot_s, old.tpot_s


def _figures(new: VersionStats, old: VersionStats) -> str:
    """Both versions' figures, the new one's first."""
    texts = [f"errors {new.errors} of {new.ended}, before {old.errors} of {old.ended}"]
    for name, ours, theirs in _latencies(new, old):
        if ours and theirs:
            median, before = (statistics.median(one) * 1e3 for one in (ours, theirs))
            texts.append(f"median {name} {median:.3g} ms, before {before:.3g} ms")
    return "; ".join(texts)
