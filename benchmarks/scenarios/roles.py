"""Goodput of mixed workers, whose router decides where each part of a request runs, beside fixed
arrangements of the same two devices: simulated on a virtual clock, or with `--model` measured, with
a core as a device.

Cells are prompts (short, long) x load (light, heavy) x TPOT target (tight, loose). A request counts
if it meets both targets. Arrangements: one prefill and one decode worker; two replicas, each with
every other request; two mixed workers; and one engine on both devices, which also computes one
prompt on both (simulated: ideally twice as fast).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from baton.bench.generator import Generator
from baton.bench.request import Demand, Outcome, RequestOptions
from baton.bench.servers import Server, connected
from baton.bench.stats import stats_of
from baton.bench.workload import Lengths, Workload
from baton.config import ClusterConfig, EngineConfig, RouterLimits, SimulatedSpeed
from baton.config.slo import Slo
from baton.local.cluster import LocalCluster
from baton.simulator.simulation import Simulation
from baton.simulator.worker import WorkerSpec
from baton.tables import table

DEVICE = WorkerSpec(
    SimulatedSpeed.parse("8000,10,0.5"), num_blocks=8192, token_bytes=40_000, chunk_s=0.03
)
BOTH = replace(DEVICE, speed=SimulatedSpeed.parse("16000,5,0.25"), num_blocks=16384, max_batch=128)
# Tokens of prompts and of outputs, requests a second by load, TTFT target in seconds.
PROMPTS = {
    "short": (256, 96, {"light": 4.0, "heavy": 14.0}, 0.5),
    "long": (4096, 96, {"light": 0.5, "heavy": 1.6}, 3.0),
}
TPOT_S = {"tight": 0.025, "loose": 0.060}


@dataclass(frozen=True)
class Scale:
    """How the cells' loads and targets differ from those of the simulated device."""

    prompts: float = 1.0  # factor for tokens
    times: float = 1.0  # factor for targets and between arrivals


Roles = dict[str, int]  # number of workers by role
Found = tuple[float, float, float]  # share that met the targets, TTFT p50 in s, share handed over
Run = Callable[[Sequence[Roles], bool, list[Demand], str], Found]


def simulated(clusters: Sequence[Roles], engine: bool, demands: list[Demand], slo: str) -> Found:
    """Runs a load on clusters, each of which gets every other request where there are two.

    `engine`: their worker has both devices.
    """
    spec, limits = BOTH if engine else DEVICE, RouterLimits(slos=(slo,))
    found: list[Found] = []
    for at, roles in enumerate(clusters):
        own = demands[at :: len(clusters)]
        stats = Simulation(spec, roles, limits).run(own).stats(Slo.parse(slo))
        met, ttft_s = stats["goodput"]["share"], stats["ttft_s"]["p50"]
        found.append((met, ttft_s, stats["handed_over_share"]))
    met, ttft_s, handed_over = map(statistics.mean, zip(*found, strict=True))
    return met, ttft_s, handed_over


class Alternating(Server):
    """Sends every other request to each of several servers."""

    protocol = "grpc"

    def __init__(self, servers: list[Server], options: RequestOptions) -> None:
        super().__init__(servers[0].url, options)
        self._servers, self._next = servers, itertools.cycle(servers)

    async def connect(self) -> None:
        """They are connected."""

    def body(self, demand: Demand) -> bytes:
        return self._servers[0].body(demand)

    async def send(self, body: bytes, outcome: Outcome, began: float) -> None:
        await next(self._next).send(body, outcome, began)

    async def close(self) -> None:
        """Their owner closes them."""


async def _measured(
    model: Path, clusters: Sequence[Roles], engine: bool, demands: list[Demand], slo: str
) -> Found:
    """As `simulated`, on clusters of processes that it starts, with a core as a device."""
    options = RequestOptions(ids=range(10, 40_000), timeout_s=600.0)
    settings = EngineConfig(model=str(model), dtype="bfloat16", threads=2 if engine else 1)
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(_cluster(settings, roles, slo, options))
            for roles in clusters
        ]
        for server in servers:  # rates are measured, and links made
            first = [replace(one, at_s=0.0, new_tokens=16) for one in _others(demands[:8])]
            await Generator(server).closed_loop(first, 2)
        run = await Generator(Alternating(servers, options)).open_loop(demands)
    stats = stats_of(run.outcomes, run.seconds, Slo.parse(slo))
    for error in stats["errors"]:
        print(error, file=sys.stderr)
    if not stats["requests"]["ok"]:
        return 0.0, 0.0, 0.0
    handed_over = stats["phases"]["transferred"] / stats["requests"]["ok"]
    return stats["goodput"]["share"], stats["ttft_s"]["p50"], handed_over


def measured(
    model: Path, clusters: Sequence[Roles], engine: bool, demands: list[Demand], slo: str
) -> Found:
    return asyncio.run(_measured(model, clusters, engine, demands, slo))


@asynccontextmanager
async def _cluster(
    engine: EngineConfig, roles: Roles, slo: str, options: RequestOptions
) -> AsyncIterator[Server]:
    """A router over workers of some roles, while it runs."""
    config = ClusterConfig(
        prefill=roles.get("prefill", 0), decode=roles.get("decode", 0),
        mixed=roles.get("mixed", 0), engine=engine,
        limits=RouterLimits(slos=(slo,)), port=0, trace_sample=0.0,
    )  # fmt: skip
    async with (
        LocalCluster(config) as cluster,
        connected(cluster.addresses[0], options) as server,
    ):
        yield server


def _others(demands: list[Demand]) -> list[Demand]:
    """Requests as long as these with other prompts."""
    return [
        replace(one, parts=tuple((seed + 1_000_003, length) for seed, length in one.parts))
        for one in demands
    ]


def cell(
    run: Run, scale: Scale, names: tuple[str, str, str],
    count: int, duration_s: float, seeds: int,
) -> dict[str, Any]:  # fmt: skip
    """One cell of the sweep, the mean over several seeds' loads."""
    rows = [_row(run, scale, names, count, duration_s, seed) for seed in range(seeds)]
    found = {
        name: statistics.mean(row[name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }
    of = [row["mixed"] / max(row["1P1D"], row["replicas"], 1e-9) for row in rows]
    two = max(found["1P1D"], found["replicas"], 1e-9)
    best = max(two, found["one engine"])
    ratios = {
        "of the best of two devices": found["mixed"] / two,
        "least, most": f"{min(of):.3f}, {max(of):.3f}", "of the best": found["mixed"] / best,
    }  # fmt: skip
    prompts, load, target = names
    return {"prompts": prompts, "load": load, "tpot": target, **found, **ratios}


def _row(
    run: Run, scale: Scale, names: tuple[str, str, str],
    count: int, duration_s: float, seed: int,
) -> dict[str, float]:  # fmt: skip
    prompts, load, target = names
    prompt, output, rates, ttft_s = PROMPTS[prompts]
    prompt = round(prompt * scale.prompts)
    rate = rates[load] / scale.times
    slo = f"ttft={ttft_s * scale.times:g},tpot={TPOT_S[target] * scale.times:g}"
    demands = list(
        Workload(
            rate=rate,
            count=min(count, max(8, round(rate * duration_s))) if duration_s else count,
            seed=seed,
            prompt_lengths=Lengths(prompt // 2, prompt * 3 // 2),
            output_lengths=Lengths(output // 2, output * 3 // 2),
        ).demands()
    )
    pair = run([{"prefill": 1, "decode": 1}], False, demands, slo)
    replicas = run([{"mixed": 1}] * 2, False, demands, slo)
    one = run([{"mixed": 1}], True, demands, slo)
    mixed = run([{"mixed": 2}], False, demands, slo)
    return {
        "1P1D": pair[0], "replicas": replicas[0], "one engine": one[0], "mixed": mixed[0],
        "handed over": mixed[2], "TTFT s: 1P1D": pair[1],
        "replicas ": replicas[1], "one engine ": one[1], "mixed ": mixed[1],
    }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=300, help="of each cell (default: 300)")
    add("--seeds", type=int, default=1, help="loads of each cell (default: 1)")
    add("--model", type=Path, metavar="DIR",
        help="measure workers of this model, of a thread each (default: simulate)")  # fmt: skip
    add("--prompt-scale", type=float, default=1.0, help="factor for prompts (default: 1)")
    add("--time-scale", type=float, default=1.0,
        help="factor for targets and times between requests (default: 1)")  # fmt: skip
    add("--duration", type=float, default=0.0, metavar="S",
        help="of a cell's arrivals, at most, but 8 requests (default: no limit)")  # fmt: skip
    add("--json", type=Path, help="file for the table")


def main(args: argparse.Namespace) -> None:
    rows = []
    run: Run = partial(measured, args.model) if args.model else simulated
    scale = Scale(args.prompt_scale, args.time_scale)
    for names in itertools.product(PROMPTS, ("light", "heavy"), TPOT_S):
        print("measuring" if args.model else "simulating", *names, file=sys.stderr, flush=True)
        row = cell(run, scale, names, args.requests, args.duration, args.seeds)
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    print("\n".join(table({name: name for name in rows[0]}, rows)))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
