"""The comparison of variants under loads, and bits of reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from baton.bench import serve, servers
from baton.bench.generator import Run
from baton.bench.request import RequestOptions
from baton.bench.servers import Server
from baton.bench.stats import FIGURES, INTERFERENCE_FIGURES, Stats, percentile
from baton.bench.terminal import Progress, median_table
from baton.bench.workload import Settings
from baton.errors import BatonError
from benchmarks.child import Failed
from benchmarks.environment import Missing, console, rotated

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


def connected(url: str, **options: Any) -> AbstractAsyncContextManager[Server]:
    """A server as the generator sends to it."""
    return servers.connected(url, RequestOptions(**options))


def spread(values_s: Iterable[float | None]) -> str:
    """p50, p99 and maximum of seconds, in ms."""
    known = [value for value in values_s if value is not None]
    p50, p99, most = (percentile(known, p) * 1e3 for p in (50, 99, 100))
    return f"p50 {p50:.1f} p99 {p99:.1f} max {most:.1f} ms"


def lag_of(run: Run) -> str:
    """How late requests were sent and how late the generator's own loop ran."""
    late, loop = spread(o.sent_s - o.at_s for o in run.outcomes), spread(run.loop_late_s)
    return f"generator: requests sent late by {late}, its event loop late by {loop}"
