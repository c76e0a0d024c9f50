"""The planner of a simulation: its own observer and decisions, over what a router would say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from baton.config.slo import Slo
from baton.planner.observer import Observer
from baton.planner.scaling_policy import Policy, State, plan
from baton.simulator.router import SimulatedRequest, SimulatedRouter
from baton.v1 import fleet_pb2

_LATEST, _LATEST_S = 512, 60.0  # requests of a router's percentiles
_ADDRESS = "simulated"


@dataclass(frozen=True)
class RoleChange:
    """A change of a worker's role, and why."""

    at_s: float
    worker: str
    before: str
    after: str
    why: str


@dataclass
class PlannedRoles:
    """Observes a router at each call, and changes its workers' roles as the planner decides."""

    slo: Slo
    changes: list[RoleChange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._policy = Policy(self.slo.ttft_s, self.slo.tpot_s)
        self._observer, self._state = Observer(window_s=self._policy.window_s), State()

    def __call__(self, now: float, router: SimulatedRouter) -> None:
        seen = self._observer.observe(now, {_ADDRESS: status_of(now, router)})
        decided = plan(now, seen, self._state, self._policy)
        self._state = decided.state
        for flip in decided.flips:
            router.fleet.set_role(flip.worker, flip.after)
            change = RoleChange(now, flip.worker, flip.before, flip.after, decided.explanation)
            self.changes.append(change)


def status_of(now: float, router: SimulatedRouter) -> fleet_pb2.GetStatusResponse:
    """What a router's `GetStatus` answers, as far as planners read it."""
    counts, running = router.counts, router.running
    traffic = fleet_pb2.ModelTraffic(
        queued=router.wait_queue.depth,
        running=running,
        counts=counts,
        latency=_latency(now, router.ended),
    )
    status = fleet_pb2.RouterStatus(incarnation=_ADDRESS, traffic=[traffic])
    workers = [
        fleet_pb2.WorkerStatus(record=view.record, load=view.load, state=view.state)
        for view in router.fleet.views()
    ]
    return fleet_pb2.GetStatusResponse(router=status, workers=workers)


def _latency(now: float, ended: deque[SimulatedRequest]) -> fleet_pb2.Latency:
    latest = [one for one in list(ended)[-_LATEST:] if one.last_at > now - _LATEST_S]
    if not latest:
        return fleet_pb2.Latency()
    ttft = np.percentile([one.ttft_s for one in latest], (50, 95)) * 1e3
    tpot = np.percentile([one.tpot_s or 0.0 for one in latest], (50, 95)) * 1e3
    return fleet_pb2.Latency(
        requests=len(latest),
        ttft_p50_ms=ttft[0],
        ttft_p95_ms=ttft[1],
        tpot_p50_ms=tpot[0],
        tpot_p95_ms=tpot[1],
    )
