"""Requests of mixed sizes at random times: what everyday load looks like; and what is the most."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypedDict

from baton.bench.figures import Figures, figures_of
from baton.bench.generator import Generator
from baton.bench.lengths import Lengths
from baton.bench.server import Server
from baton.bench.slo import Slo
from baton.bench.workload import Workload
from benchmarks.serving.gaps import long_gap_share


@dataclass(frozen=True)
class Mixed:
    """The load: prompts of 363 tokens on average and outputs of 58."""

    prompts: str = "lognormal:260,0.85,2000"
    outputs: str = "lognormal:45,0.7,256"
    duration_s: float = 45.0
    slo: str = "ttft=1,tpot=0.1"
    at_once: int = 16  # requests at a time when the capacity is measured
    capacity_s: float = 24.0

    def workload(self, rate: float, seed: int) -> Workload:
        """At that rate, or as many at once as it says for a rate of 0."""
        return Workload(
            rate=rate,
            concurrency=0 if rate else self.at_once,
            duration_s=self.duration_s if rate else 0.0,
            prompt_lengths=Lengths.parse(self.prompts),
            output_lengths=Lengths.parse(self.outputs),
            seed=seed,
        )


class MixedFigures(TypedDict):
    """One run of it; `figures` are those of `baton bench serve`."""

    rate: float
    figures: Figures
    long_gap_share: float


async def mixed(server: Server, load: Mixed, rate: float, seed: int) -> MixedFigures:
    """Sends it, and waits for all answers."""
    run = await Generator(server, asyncio.Event()).open_loop(load.workload(rate, seed).demands())
    return MixedFigures(
        rate=rate,
        figures=figures_of(run.outcomes, run.seconds, Slo.parse(load.slo)),
        long_gap_share=long_gap_share([outcome for outcome in run.outcomes if outcome.ok]),
    )


async def capacity(server: Server, load: Mixed, seed: int) -> float:
    """Requests a second of these sizes that it finishes, always `at_once` in flight.

    The first quarter of the time is not looked at, and what runs at the end is given up.
    """
    stop = asyncio.Event()
    generator = Generator(server, stop)
    running = asyncio.create_task(
        generator.closed_loop(load.workload(0.0, seed).demands(), load.at_once, 0.0)
    )
    try:
        await asyncio.sleep(load.capacity_s)
    finally:
        stop.set()
        await running
    begin_s = load.capacity_s / 4
    ended = [
        outcome
        for outcome in generator.run.outcomes
        if outcome.ok and begin_s <= outcome.sent_s + outcome.ended_s < load.capacity_s
    ]
    return len(ended) / (load.capacity_s - begin_s)
