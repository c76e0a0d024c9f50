"""`baton advise`: simulates arrangements of workers under a load, and says which one serves it.

An arrangement is a number of workers by role. Without prefill workers every worker computes its own
prompts: prefill and decode are not disaggregated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baton.bench.request import Demand
from baton.bench.workload import Workload
from baton.config import RouterLimits
from baton.config.slo import Slo
from baton.errors import ConfigError
from baton.simulator.planned import PlannedRoles, RoleChange
from baton.simulator.router import Costs
from baton.simulator.settings import DECODE, MIXED, PREFILL, AdviseConfig
from baton.simulator.simulation import Simulation
from baton.simulator.worker import WorkerSpec

_SMALL = 0.01  # difference of goodput that is none
_LEAST_S, _MOST_REQUESTS = 60.0, 4000  # of a load, where neither is given
_OTHER_CHUNKS = (0.5, 2.0)  # of the usual duration
_NEIGHBOURS = 1  # splits on both sides of the one that the load suggests
_BLOCKS_OF_A_PROMPT = 16  # longer prompts are simulated in larger blocks
_BLOCK_SIZES = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Load:
    """The requests to serve, and their means."""

    demands: list[Demand]
    seconds: float  # of arrivals
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def from_workload(cls, workload: Workload) -> Load:
        """Its first requests: of a minute at least, as far as there are any. Raises ConfigError."""
        if not (workload.count or workload.duration_s or workload.trace):
            workload = replace(workload, count=max(_MOST_REQUESTS, int(workload.rate * _LEAST_S)))
        demands = list(workload.demands())
        count = len(demands)
        return cls(
            demands,
            demands[-1].at_s,
            sum(one.prompt_tokens for one in demands) / count,
            sum(one.new_tokens for one in demands) / count,
        )

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.demands) / self.seconds if self.seconds else float(len(self.demands))


@dataclass(frozen=True)
class Tried:
    """An arrangement, and what was simulated."""

    roles: Mapping[str, int]
    chunk_s: float
    stats: dict[str, Any]
    changes: tuple[RoleChange, ...] | None = None  # of roles, by the planner; None: there was none

    @property
    def share(self) -> float:
        """The share of requests that met the limits."""
        share: float = self.stats["goodput"]["share"]
        return share

    @property
    def is_disaggregated(self) -> bool:
        return PREFILL in self.roles

    @property
    def num_workers(self) -> int:
        return sum(self.roles.values())

    @property
    def name(self) -> str:
        name = " + ".join(f"{count} {role}" for role, count in self.roles.items())
        return name if self.changes is None else f"{name}, planner"

    @property
    def latency(self) -> float:
        """Orders arrangements with as much goodput: the sum of the latencies at p95, in limits."""
        slo, total = self.stats["goodput"]["slo"], 0.0
        for name in ("ttft", "tpot"):
            if (spread := self.stats[f"{name}_s"]) and name in slo:
                total += spread["p95"] / slo[name]
        return total


@dataclass
class Advice:
    """The best arrangement, and all that were tried, in order."""

    best: Tried
    meets: bool  # whether enough requests meet the limits
    why: str
    tried: list[Tried] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            "advice": {
                "disaggregate": best.is_disaggregated,
                "meets_slo": self.meets,
                "roles": dict(best.roles),
                "chunk_ms": round(best.chunk_s * 1e3, 1),
                "why": self.why,
                "expected": best.stats,
            },
            "tried": [
                {
                    **one.stats,
                    "roles": dict(one.roles),
                    "chunk_ms": round(one.chunk_s * 1e3, 1),
                    "role_changes": [asdict(change) for change in one.changes or ()],
                }
                for one in self.tried
            ],
        }


class Advisor:
    """Tries arrangements; `show` is called with each before it is simulated."""

    def __init__(
        self,
        config: AdviseConfig,
        load: Load,
        spec: WorkerSpec,
        show: Callable[[Tried], None] = lambda tried: None,
    ) -> None:
        self._config, self._load, self._show = config, load, show
        self._spec = coarse(spec, load.prompt_tokens)
        limits = ",".join(f"{name}={value:g}" for name, value in _limits(config.slo))
        self._limits = RouterLimits(slos=(limits,))
        kv_tokens = self._spec.num_blocks * self._spec.block_size
        if all(one.prompt_tokens + one.new_tokens > kv_tokens for one in load.demands):
            text = "no request of the load fits the KV cache of a worker"
            raise ConfigError(f"{text}, {kv_tokens} tokens: give more --kv-tokens")
        self._costs = Costs(
            config.router_ms / 1e3,
            config.handoff_ms / 1e3,
            (config.transfer_gb_per_s or 4.0) * 1e9,
        )
        self._tried: list[Tried] = []

    def advise(self) -> Advice:
        """Tries arrangements, then other chunks for the best one."""
        config = self._config
        if config.arrangements:
            for roles in config.arrangements:
                self._try(roles)
        else:
            for count in [config.workers] if config.workers else self._counts():
                for roles in self._splits(count):
                    self._try(roles)
                if max(one.share for one in self._tried) >= config.share:
                    break
        best = self._best()
        for factor in _OTHER_CHUNKS:
            self._try(best.roles, self._spec.chunk_s * factor)
        if self._config.planner:
            self._try(self._best().roles, planner=PlannedRoles(self._config.slo))
        best = self._best()
        meets = best.share >= config.share
        return Advice(best, meets, self._why(best, meets), self._tried)

    def _try(
        self,
        roles: Mapping[str, int],
        chunk_s: float | None = None,
        planner: PlannedRoles | None = None,
    ) -> None:
        spec = replace(self._spec, chunk_s=chunk_s or self._spec.chunk_s)
        simulation = Simulation(spec, roles, self._limits, self._costs)
        stats = simulation.run(self._load.demands, follow=planner).stats(self._config.slo)
        changes = tuple(planner.changes) if planner else None
        self._tried.append(Tried(roles, spec.chunk_s, stats, changes))
        self._show(self._tried[-1])

    def _best(self) -> Tried:
        """The most goodput; where that hardly differs, what is simpler, then what is faster."""
        most = max(one.share for one in self._tried)
        near = [one for one in self._tried if one.share >= most - _SMALL]
        usual = self._spec.chunk_s
        return min(
            near,
            key=lambda one: (
                one.num_workers,
                one.is_disaggregated,
                one.changes is not None,
                one.chunk_s != usual and one.latency > self._latency_of(one.roles, usual) * 0.9,
                one.latency,
            ),
        )

    def _latency_of(self, roles: Mapping[str, int], chunk_s: float) -> float:
        return next(o.latency for o in self._tried if (o.roles, o.chunk_s) == (roles, chunk_s))

    def _work(self) -> tuple[float, float]:
        """Workers that are busy with prompts and with outputs, with full batches."""
        load, spec = self._load, self._spec
        prompt, output = load.prompt_tokens, load.output_tokens
        prefill = load.rate * spec.speed.step_s(round(prompt), 0, 0, prompt * prompt / 2)
        context = prompt + output / 2
        batch = max(1, min(spec.max_batch, spec.num_blocks * spec.block_size / (context + 1)))
        while batch > 1 and self._step_s(batch, context) > self._config.slo.tpot_s:
            batch = max(1.0, batch * 0.9)
        decode = load.rate * output * self._step_s(batch, context) / batch
        return prefill, decode

    def _step_s(self, batch: float, context: float) -> float:
        return self._spec.speed.step_s(0, round(batch), batch * context)

    def _counts(self) -> Iterator[int]:
        """Numbers of workers, from what the work itself takes."""
        count = max(1, math.floor(sum(self._work()) * 0.6))
        while count <= self._config.max_workers:
            yield count
            count += max(1, count // 8)
        if not self._tried:
            yield self._config.max_workers

    def _splits(self, count: int) -> Iterator[dict[str, int]]:
        """All mixed, and the splits near what the work suggests."""
        yield {MIXED: count}
        prefill, decode = self._work()
        middle = round(count * prefill / (prefill + decode))
        middle = min(max(middle, 1), count - 1)
        for number in range(middle - _NEIGHBOURS, middle + _NEIGHBOURS + 1):
            if 1 <= number < count:
                yield {PREFILL: number, DECODE: count - number}

    def _why(self, best: Tried, meets: bool) -> str:
        same = [one for one in self._tried if one.num_workers == best.num_workers]
        split = max((one.share for one in same if one.is_disaggregated), default=None)
        mixed = max((one.share for one in same if not one.is_disaggregated), default=None)
        text = f"{best.share:.1%} of the requests meet the limits"
        if not meets:
            text += f", and {self._config.share:.0%} should: more or faster workers are needed"
        elif split is None or mixed is None:
            pass
        elif best.is_disaggregated:
            text += f", and {mixed:.1%} with as many workers that do both"
        elif split >= mixed - _SMALL:
            text += ", as many as with separate prefill and decode workers, which add handoffs"
        else:
            text += f", and {split:.1%} at most with separate prefill and decode workers"
        return text


def _limits(slo: Slo) -> Iterator[tuple[str, float]]:
    for name in ("ttft", "tpot", "e2e"):
        if math.isfinite(value := getattr(slo, f"{name}_s")):
            yield name, value


def coarse(spec: WorkerSpec, prompt_tokens: float) -> WorkerSpec:
    """The same worker with blocks so large that a usual prompt has few of them."""
    wanted = prompt_tokens / _BLOCKS_OF_A_PROMPT
    size = next((one for one in _BLOCK_SIZES if one >= wanted), _BLOCK_SIZES[-1])
    size = max(size, spec.block_size)
    return replace(spec, block_size=size, num_blocks=spec.num_blocks * spec.block_size // size)
