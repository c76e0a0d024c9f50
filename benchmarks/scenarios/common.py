"""What scenarios share: clusters, the comparison of variants under loads, and bits of reports."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from baton.bench import serve, servers
from baton.bench.generator import Run
from baton.bench.request import RequestOptions
from baton.bench.servers import Server
from baton.bench.stats import FIGURES, INTERFERENCE_FIGURES, Stats, percentile
from baton.bench.terminal import Progress, median_table
from baton.bench.workload import Settings
from baton.cli import options
from baton.client import AsyncClient
from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.errors import BatonError
from baton.local.cluster import LocalCluster
from baton.options import build
from benchmarks.child import Failed
from benchmarks.environment import Missing, console, rotated

TINY = Path(__file__).with_name("tiny.json")
_POLL_S = 0.5

Target = tuple[str, RequestOptions]
Variants = Mapping[str, Callable[[], AbstractAsyncContextManager[Target]]]


@dataclass
class Comparison:
    """Variants under the same loads, one at a time, in rounds whose order rotates.

    Loads are runs of `baton bench serve`, by name. A variant that fails is left out from then on;
    what there is when ctrl-C comes is kept.
    """

    loads: Mapping[str, Settings]
    results: dict[str, dict[str, list[Stats]]] = field(default_factory=dict)  # by load, by variant
    absent: dict[str, str] = field(default_factory=dict)  # and why
    is_partial: bool = False

    def run(self, variants: Variants, rounds: int) -> int:
        """Measures and prints a table for each load; the exit status."""
        self.results = {kind: {} for kind in self.loads}
        try:
            asyncio.run(self._rounds(variants, rounds))
        except KeyboardInterrupt:  # what was started has been stopped on its way
            self.is_partial = True
        for kind, load in self.loads.items():
            title = f"{kind}: median (min-max){', PARTIAL: ended early' * self.is_partial}"
            figures = INTERFERENCE_FIGURES if load.interference else FIGURES
            console.print("", median_table(title, figures, self.results[kind]), sep="\n")
        return 130 if self.is_partial else int(bool(self.absent) and not any(self.results.values()))

    async def _rounds(self, variants: Variants, rounds: int) -> None:
        for round_ in range(rounds):
            for name in rotated([name for name in variants if name not in self.absent], round_):
                try:
                    async with variants[name]() as target:
                        await self._round(name, round_, target)
                except (Missing, Failed, BatonError, OSError) as error:
                    kind = "not installed" if isinstance(error, Missing) else "failed"
                    self.absent[name] = f"{kind}: {error}"
                    console.print(f"{name}: {self.absent[name]}")

    async def _round(self, name: str, round_: int, target: Target) -> None:
        progress = Progress(Console(stderr=True))
        for place, (kind, load) in enumerate(self.loads.items()):
            progress.say(f"round {round_ + 1}: {name}, {kind}")
            # No two loads have a prompt in common, all variants have the same.
            workload = replace(load.workload, seed=place << 16 | round_)
            report = await serve.run(replace(load, workload=workload, targets=[target]), progress)
            if report["partial"]:
                raise KeyboardInterrupt
            for complaint in report["generator"]["complaints"]:
                console.print(f"{name}, {kind}: the generator was slow: {complaint}")
            of_prompts = report["interference"] and report["interference"][0]["rounds"]
            stats = of_prompts or [report["stages"][0]["servers"][0]["figures"]]
            self.results[kind].setdefault(name, []).append(stats[0])


def add_cluster_options(parser: argparse.ArgumentParser, workers: int, **engine: Any) -> None:
    """How many workers of each role there are, and their engines; `engine`: other defaults."""
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}", type=int, default=workers, help=f"workers: {workers}")
    options.add_declared(parser, EngineConfig, f"engines (here by default: {engine})")
    parser.set_defaults(engine={name.replace("_", "-"): value for name, value in engine.items()})


def cluster(
    args: argparse.Namespace,
    programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
    **limits: Any,
) -> LocalCluster:
    """The cluster that the options describe, with these of `RouterLimits`."""
    values = args.engine | vars(args)
    if "simulate" in values:
        values = {"random-weights": str(TINY)} | values
    engine = build(EngineConfig, values)
    config = ClusterConfig(
        engine=engine,
        limits=RouterLimits(**limits),
        port=0,
        prefill=args.prefill,
        decode=args.decode,
    )
    return LocalCluster(config, programs=programs)


@asynccontextmanager
async def target_of(cluster: LocalCluster, **options: Any) -> AsyncIterator[Target]:
    """A cluster's router as a variant, while the cluster runs."""
    async with cluster:
        yield cluster.address, RequestOptions(**options)


def connected(url: str, **options: Any) -> AbstractAsyncContextManager[Server]:
    """A server as the generator sends to it."""
    return servers.connected(url, RequestOptions(**options))


async def blocks_held(address: str, wait_s: float = 20.0) -> int:
    """KV blocks held or quarantined on all workers once that is none, or after `wait_s`."""
    async with AsyncClient(address) as client, asyncio.timeout(wait_s + 10):
        for left in range(int(wait_s / _POLL_S), -1, -1):
            workers = (await client.status())["workers"]
            held = sum(w["blocks_held"] + w["blocks_quarantined"] for w in workers)
            if not held or not left:
                break
            await asyncio.sleep(_POLL_S)
        return int(held)


def spread(values_s: Iterable[float | None]) -> str:
    """p50, p99 and maximum of seconds, in ms."""
    known = [value for value in values_s if value is not None]
    p50, p99, most = (percentile(known, p) * 1e3 for p in (50, 99, 100))
    return f"p50 {p50:.1f} p99 {p99:.1f} max {most:.1f} ms"


def lag_of(run: Run) -> str:
    """How late requests were sent and how late the generator's own loop ran."""
    late, loop = spread(o.sent_s - o.at_s for o in run.outcomes), spread(run.loop_late_s)
    return f"generator: requests sent late by {late}, its event loop late by {loop}"
