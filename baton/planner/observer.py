"""What routers say of one version of a model, made into an observation.

Rates are differences of their counters.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from baton.kv_descriptor import pool_tokens
from baton.planner.scaling_policy import DECODE, MIXED, PREFILL, Observation, Worker
from baton.registry.membership import ROLES
from baton.v1 import fleet_pb2
from router.placement.cost_model import STEP_BASE_SEQUENCES

# By router's address; None where it did not answer.
Statuses: TypeAlias = Mapping[str, fleet_pb2.GetStatusResponse | None]

Version: TypeAlias = tuple[str, str]  # name of a model and its version

_READY = "READY"
_OTHER_MODEL = "MISMATCH"
_MAX_STEPS = 1000  # measurements of (sequences, step) that are kept
_SPREAD = 2.0  # between the smallest and the largest batch, for a line through the steps


@dataclass(frozen=True)
class _Counts:
    """A router's counters at one time."""

    time_s: float
    arrived: int = 0
    admitted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: int = 0  # of those that ran
    output_tokens: int = 0

    @classmethod
    def from_traffic(cls, time_s: float, traffic: fleet_pb2.ModelTraffic) -> _Counts:
        counts = traffic.counts
        return cls(
            time_s,
            counts.admitted + counts.turned_away,
            counts.admitted,
            counts.prompt_tokens,
            counts.cached_tokens,
            sum(counts.ended.values()) - counts.refused,
            counts.output_tokens,
        )


@dataclass
class Observer:
    """Keeps what is needed of earlier statuses. Times are seconds of any clock."""

    version: Version = ("", "")
    window_s: float = 60.0
    silent_s: float = 30.0  # after which a router that does not answer counts as without requests
    _counts: dict[str, deque[_Counts]] = field(default_factory=dict)  # by incarnation of a router
    _answered: dict[str, float] = field(default_factory=dict)  # by address, when last
    _steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))
    _prompt_tokens: float = 0.0  # the last means that were known
    _output_tokens: float = 0.0
    _last: Observation | None = None

    def observe(self, now: float, statuses: Statuses) -> Observation | None:
        """The cluster at `now`; where no router answers, the last one with its time, incomplete."""
        answers = {address: status for address, status in statuses.items() if status}
        self._answered |= dict.fromkeys(answers, now)
        if not answers:
            return self._last and replace(self._last, incomplete="no router answers")
        routers = {
            one.incarnation: one
            for status in answers.values()
            for one in (*status.siblings, status.router)
        }
        for name in self._counts.keys() - routers.keys():
            del self._counts[name]
        traffics = {name: _traffic_of(self.version, router) for name, router in routers.items()}
        for name, traffic in traffics.items():
            self._count(name, _Counts.from_traffic(now, traffic))
        workers = _workers(self.version, answers.values())
        self._last = Observation(
            now,
            tuple(
                Worker(name, role, one.state == _READY, one.load.running)
                for name, (role, one) in sorted(workers.items())
            ),
            **self._traffic(),
            queued=sum(traffic.queued for traffic in traffics.values()),
            running=sum(traffic.running for traffic in traffics.values()),
            ttft_p95_s=_mean_ms(traffics.values(), lambda one: one.ttft_p95_ms) / 1e3,
            tpot_p95_s=_mean_ms(traffics.values(), lambda one: one.tpot_p95_ms) / 1e3,
            **self._abilities(list(workers.values())),
            incomplete=self._missing(now, statuses),
        )
        return self._last

    def _count(self, name: str, counts: _Counts) -> None:
        """Keeps the counters of the window and the last ones before it."""
        kept = self._counts.setdefault(name, deque())
        if kept and counts.arrived < kept[-1].arrived:  # the version was gone, and counts anew
            kept.clear()
        kept.append(counts)
        while len(kept) > 2 and kept[1].time_s <= counts.time_s - self.window_s:
            kept.popleft()

    def _missing(self, now: float, statuses: Statuses) -> str:
        if any(len(kept) < 2 for kept in self._counts.values()):
            return "rates are known after a second look"
        for address, status in statuses.items():
            silent_s = now - self._answered.setdefault(address, now)
            if status is None and silent_s < self.silent_s:
                return f"the router at {address} does not answer"
        return ""

    def _traffic(self) -> dict[str, Any]:
        """Rates and means over all routers."""
        changes = [
            {name: getattr(new, name) - getattr(old, name) for name in vars(new)}
            for old, new in ((kept[0], kept[-1]) for kept in self._counts.values())
        ]

        def total(name: str) -> float:
            return float(sum(change[name] for change in changes))

        if admitted := total("admitted"):
            self._prompt_tokens = total("prompt_tokens") / admitted
        if ended := total("ended"):
            self._output_tokens = total("output_tokens") / ended
        prompt_tokens = total("prompt_tokens")
        cached = total("cached_tokens") / prompt_tokens if prompt_tokens else 0.0
        return {
            "arrivals_per_s": sum(
                one["arrived"] / one["time_s"] for one in changes if one["time_s"]
            ),
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "cached_share": min(1.0, cached),  # it is counted at the end, tokens at the beginning
        }

    def _abilities(self, workers: list[tuple[str, fleet_pb2.WorkerStatus]]) -> dict[str, Any]:
        """What a usual worker can do: the median of those whose role it is, else of all."""

        def usual(role: str, read: Callable[[fleet_pb2.WorkerStatus], float]) -> float:
            own = [read(one) for its, one in workers if its in (role, MIXED)]
            known = [value for value in own if value > 0]
            known = known or [value for value in (read(one) for _, one in workers) if value > 0]
            return statistics.median_low(known) if known else 0.0

        self._steps.extend(
            (one.load.running, one.load.step_ms)
            for role, one in workers
            if role != PREFILL and one.load.running and one.load.step_ms
        )
        single_ms = usual(DECODE, lambda one: one.load.step_ms)
        step_ms, sequence_ms = self._step_line() or _usual_line(1, single_ms)
        return {
            "prefill_tokens_per_s": usual(PREFILL, lambda one: one.load.prefill_tokens_per_s),
            "step_ms": step_ms,
            "sequence_ms": sequence_ms,
            "max_batch": int(usual(DECODE, lambda one: one.record.max_batch)),
            "kv_tokens": int(
                usual(DECODE, lambda one: pool_tokens(one.record.kv, one.record.blocks_total))
            ),
        }

    def _step_line(self) -> tuple[float, float] | None:
        """(ms without sequences, ms for each) of a decode step, from all that were measured."""
        if not self._steps:
            return None
        running, steps = np.array(self._steps).T
        # In small batches the sequences' share of a step is lost in the noise.
        if running.max() >= max(STEP_BASE_SEQUENCES, _SPREAD * running.min()):
            slope, base = np.polyfit(running, steps, 1)
            if slope >= 0 and base >= 0:
                return float(base), float(slope)
        lines = [_usual_line(number, step_ms) for number, step_ms in self._steps]
        return statistics.median_low(lines)


def _usual_line(running: int, step_ms: float) -> tuple[float, float]:
    """A decode step by its sequences where one batch is known: a line as the cost model's."""
    sequence_ms = step_ms / (STEP_BASE_SEQUENCES + running)
    return STEP_BASE_SEQUENCES * sequence_ms, sequence_ms


def versions_of(statuses: Statuses) -> set[Version]:
    """Versions of models that routers serve."""
    return {
        (traffic.model, traffic.version)
        for status in filter(None, statuses.values())
        for traffic in status.router.traffic
    }


def _traffic_of(version: Version, router: fleet_pb2.RouterStatus) -> fleet_pb2.ModelTraffic:
    """A version's traffic at a router; none where it is not served."""
    mine = (one for one in router.traffic if (one.model, one.version) == version)
    return next(mine, fleet_pb2.ModelTraffic())


def _workers(
    version: Version, statuses: Iterable[fleet_pb2.GetStatusResponse]
) -> dict[str, tuple[str, fleet_pb2.WorkerStatus]]:
    """Workers of a version with their roles, as the router sees them that can use them."""
    found: dict[str, tuple[str, fleet_pb2.WorkerStatus]] = {}
    for one in [one for status in statuses for one in status.workers]:
        name, role = one.record.incarnation, ROLES.get(one.record.role)
        if not role or (one.record.model, one.record.version) != version:
            continue
        if one.state != _OTHER_MODEL and (name not in found or one.state == _READY):
            found[name] = role, one
    return found


def _mean_ms(
    routers: Iterable[fleet_pb2.ModelTraffic], read: Callable[[fleet_pb2.Latency], float]
) -> float:
    """A percentile's mean over routers, by their requests."""
    known = [(one.latency.requests, read(one.latency)) for one in routers if one.latency.requests]
    total = sum(number for number, _ in known)
    return sum(number * value for number, value in known) / total if total else 0.0
