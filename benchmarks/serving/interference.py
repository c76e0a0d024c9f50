"""Streams that run, and long prompts that arrive beside them: what do the streams notice?

Two phases on the same server, one after the other: the streams alone, and with a long prompt every
few seconds. A window of whole periods is looked at; what was sent in it is waited for while the
streams go on, so that no slow answer is left out.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from baton.bench.demand import Demand
from baton.bench.generator import Generator
from baton.bench.server import Server
from benchmarks.serving.gaps import (
    PromptFigures,
    StreamFigures,
    Window,
    prompt_figures,
    stream_figures,
)

_LATEST_END_S = 40.0  # after the window; a prompt that is not answered by then has failed
_PROMPT_SEEDS = 1 << 48  # apart from the streams'


@dataclass(frozen=True)
class Interference:
    """The load. Lengths are tokens."""

    streams: int = 6
    stream_prompt: int = 64
    stream_output: int = 200
    prompt: int = 2048
    prompt_output: int = 8
    every_s: float = 6.0
    periods: int = 4
    ramp_s: float = 4.0  # before the window, until all streams run

    @property
    def window(self) -> Window:
        """What is looked at: whole periods."""
        return Window(self.ramp_s, self.ramp_s + self.periods * self.every_s)


class InterferenceFigures(TypedDict):
    """Both phases; `kept` is the streams' tokens/s with prompts over those without."""

    alone: StreamFigures
    beside: StreamFigures
    prompts: PromptFigures
    kept: float


async def interference(
    server: Server, load: Interference, seed: int, alone_first: bool
) -> InterferenceFigures:
    """Runs both phases, with prompts that no cache has."""
    found: dict[bool, tuple[StreamFigures, PromptFigures]] = {}
    for number, has_prompts in enumerate((False, True) if alone_first else (True, False)):
        found[has_prompts] = await _phase(server, load, (seed * 2 + number) << 56, has_prompts)
    alone, (beside, prompts) = found[False][0], found[True]
    kept = beside["tokens_per_s"] / alone["tokens_per_s"] if alone["tokens_per_s"] else 0.0
    return InterferenceFigures(alone=alone, beside=beside, prompts=prompts, kept=kept)


async def _phase(
    server: Server, load: Interference, seed: int, has_prompts: bool
) -> tuple[StreamFigures, PromptFigures]:
    stop = asyncio.Event()
    streams, prompts = Generator(server, stop), Generator(server, stop)
    running = asyncio.create_task(
        streams.closed_loop(stream_demands(load, seed), load.streams, 0.0)
    )
    arriving = asyncio.create_task(prompts.open_loop(prompt_demands(load, seed, has_prompts)))
    window = load.window
    try:
        await asyncio.sleep(window.end_s)
        await asyncio.wait([arriving], timeout=_LATEST_END_S)
    finally:
        stop.set()
        await asyncio.gather(running, arriving)
    return stream_figures(streams.run.outcomes, window), prompt_figures(prompts.run.outcomes)


def stream_demands(load: Interference, seed: int) -> Iterator[Demand]:
    """Endless. The first ones end one after the other, so that the streams do not start in step."""
    for number in itertools.count():
        share = min(1.0, (number + 1) / load.streams)
        parts = ((seed + number, load.stream_prompt),)
        yield Demand(0.0, parts, max(1, round(load.stream_output * share)))


def prompt_demands(load: Interference, seed: int, has_prompts: bool) -> Iterator[Demand]:
    """One at the beginning of each period of the window."""
    for number in range(load.periods if has_prompts else 0):
        parts = ((seed + _PROMPT_SEEDS + number, load.prompt),)
        yield Demand(load.ramp_s + number * load.every_s, parts, load.prompt_output)
