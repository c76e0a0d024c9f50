"""Runs a load on a simulated cluster, and computes what its callers would have seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.bench.request import Demand
from baton.bench.stats import limits_of, spread_of
from baton.config import RouterLimits
from baton.config.slo import Slo
from baton.simulator import virtual_loop
from baton.simulator.fleet import SimulatedFleet
from baton.simulator.router import Costs, SimulatedRequest, SimulatedRouter
from baton.simulator.worker import WorkerSpec

_GAP_MS = 1.02  # ratio of two neighbouring classes of times between tokens


@dataclass
class Result:
    """What happened to every request, and what each worker did."""

    requests: list[SimulatedRequest]
    gaps: Counter[int]  # number of times between tokens by class: powers of _GAP_MS, in ms
    seconds: float  # until the last token
    workers: dict[str, dict[str, float]]  # by role, sums and shares
    roles: dict[str, int]  # at the end

    def stats(self, slo: Slo | None = None) -> dict[str, Any]:
        """Percentiles, goodput under the SLO and utilisation; names as in `baton bench serve`."""
        ok = [one for one in self.requests if not one.refused]
        ttft_s = np.array([one.ttft_s for one in ok])
        e2e_s = np.array([one.last_at - one.arrived_at for one in ok])
        outputs = np.array([one.output_tokens for one in ok], np.float64)
        tpot_s = np.array([one.tpot_s for one in ok], np.float64)  # NaN for None
        per_s = 1 / self.seconds if self.seconds else 0.0
        prompts = sum(one.prompt_tokens for one in ok)
        return {
            "seconds": self.seconds,
            "requests": {"sent": len(self.requests), "ok": len(ok)},
            "refusals": dict(Counter(_kind(one) for one in self.requests if one.refused)),
            "requests_per_s": len(ok) * per_s,
            "output_tokens_per_s": float(outputs.sum()) * per_s,
            "ttft_s": spread_of(ttft_s),
            "tpot_s": spread_of(tpot_s[~np.isnan(tpot_s)]),
            "itl_s": self._itl(),
            "e2e_s": spread_of(e2e_s),
            "cached_share": sum(one.cached_tokens for one in ok) / max(1, prompts),
            "handed_over_share": sum(one.path == "handed over" for one in ok) / max(1, len(ok)),
            "goodput": self._goodput(slo, ttft_s, tpot_s, e2e_s, per_s) if slo else None,
            "workers": self.workers,
            "roles": self.roles,
        }

    def _itl(self) -> dict[str, float] | None:
        if not self.gaps:
            return None
        classes = np.array(sorted(self.gaps))
        counts = np.array([self.gaps[one] for one in classes], np.float64)
        values, shares = _GAP_MS ** (classes + 0.5) / 1e3, counts.cumsum() / counts.sum()
        found = {
            f"p{percent}": float(values[np.searchsorted(shares, percent / 100)])
            for percent in (50, 90, 95, 99)
        }
        return {"count": counts.sum(), **found, "max": float(values[-1])}

    def _goodput(
        self, slo: Slo, ttft_s: Any, tpot_s: Any, e2e_s: Any, per_s: float
    ) -> dict[str, Any]:
        values = {"ttft": ttft_s, "tpot": np.nan_to_num(tpot_s), "e2e": e2e_s}
        met = {name: values[name] <= limit_s for name, limit_s in limits_of(slo).items()}
        good = np.logical_and.reduce([*met.values(), np.ones(len(ttft_s), np.bool_)]).sum()
        count = max(1, len(self.requests))
        return {
            "slo": limits_of(slo),
            "share": float(good) / count,
            "requests_per_s": float(good) * per_s,
            "met": {name: float(flags.sum()) / count for name, flags in met.items()},
        }


def _kind(request: SimulatedRequest) -> str:
    return request.refused.split(" in ")[0][:60]


Follow = Callable[[float, SimulatedRouter], None]


@dataclass(frozen=True)
class Simulation:
    """A cluster that can be simulated."""

    spec: WorkerSpec
    roles: Mapping[str, int]
    limits: RouterLimits = field(default_factory=RouterLimits)
    costs: Costs = field(default_factory=Costs)

    def run(
        self,
        demands: Iterable[Demand],
        *,
        follow: Follow | None = None,
        interval_s: float = 5.0,
        progress: Callable[[float], None] = lambda at_s: None,
    ) -> Result:
        """Runs a load to its end.

        `follow` is called every `interval_s` with the time, and may change roles and add workers;
        `progress`, with the time of each arrival.
        """
        return virtual_loop.run(self._run(demands, follow, interval_s, progress))

    async def _run(
        self,
        demands: Iterable[Demand],
        follow: Follow | None,
        interval_s: float,
        progress: Callable[[float], None],
    ) -> Result:
        gaps: Counter[int] = Counter()
        log_ratio = float(np.log(_GAP_MS))
        classes: dict[float, int] = {}

        def on_gap(seconds: float, count: int) -> None:
            if count:
                at = classes.get(seconds)
                if at is None:
                    at = int(np.floor(np.log(max(seconds, 1e-6) * 1e3) / log_ratio))
                    if len(classes) < 100_000:
                        classes[seconds] = at
                gaps[at] += count

        fleet = SimulatedFleet(self.spec, self.roles, on_gap)
        router = SimulatedRouter(fleet, self.limits, self.costs)
        following = asyncio.create_task(_every(interval_s, follow, router)) if follow else None
        requests: list[SimulatedRequest] = []
        num_ended, has_sent = 0, False
        loop = asyncio.get_running_loop()
        all_ended = loop.create_future()

        def end() -> None:
            nonlocal num_ended
            num_ended += 1
            if has_sent and num_ended == len(requests):
                all_ended.set_result(None)

        for demand in demands:
            if (wait_s := demand.at_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            progress(demand.at_s)
            requests.append(router.receive(demand, end))
        has_sent = True
        if num_ended < len(requests):
            await all_ended
        if following is not None:
            following.cancel()
        seconds = max((one.last_at for one in requests), default=0.0)
        workers = _workers(fleet, seconds)
        return Result(requests, gaps, seconds, workers, dict(fleet.roles))


async def _every(interval_s: float, follow: Follow, router: SimulatedRouter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(interval_s)
        follow(loop.time(), router)


def _workers(fleet: SimulatedFleet, seconds: float) -> dict[str, dict[str, float]]:
    """By role: how busy its workers were, with which batch, and how full their pools."""
    found = {}
    for role in sorted(set(fleet.roles)):
        of_role = [one.worker for one in fleet.members.values() if one.role == role]
        totals = [worker.totals for worker in of_role]
        steps = max(1, sum(one.steps for one in totals))
        found[role] = {
            "count": len(of_role),
            "busy_share": sum(one.busy_s for one in totals) / max(1e-9, seconds * len(of_role)),
            "mean_batch": sum(one.sequence_steps for one in totals) / steps,
            "prompt_tokens": sum(one.prompt_tokens for one in totals),
            "generated_tokens": sum(one.generated for one in totals),
            "preemptions": sum(one.preemptions for one in totals),
            "peak_kv_share": max(one.peak_blocks for one in totals)
            / fleet.members[of_role[0].name].worker.spec.num_blocks,
        }
    return found
