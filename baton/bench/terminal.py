"""A report as text tables, and a run's progress in lines."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from baton.bench.generator import Run
from baton.bench.report import Report, failures_of
from baton.bench.stats import FIGURES, INTERFERENCE_FIGURES, Figure, percentile
from baton.net.tasks import running
from baton.tables import align

_SWEPT = (
    *("ttft_s.p95", "tpot_s.p95", "e2e_s.p95"),
    *("requests_per_s", "output_tokens_per_s", "goodput.share"),
)
_EVERY_S = 5.0
_RECENT = 100  # last requests whose TTFT is shown during a run


def report_lines(report: Report) -> Iterator[str]:
    """The whole report as lines of text."""
    yield f"{report['server']['url']}  {report['server']['model']}"
    if report["partial"]:
        yield "PARTIAL: ended early; results are of the requests until then"
    for stage in report["stages"]:
        yield from _stage(stage)
    if report["interference"]:
        columns = {"": [report["interference"]]}
        yield from ("", *median_table("interference", INTERFERENCE_FIGURES, columns))
        if why := failures_of(report):
            yield f"  {why}"
    if len(report["stages"]) > 1:
        yield from _sweep(report)
    yield from _generator(report["generator"])


def median_table(
    title: str, figures: Sequence[Figure], rounds: Mapping[str, Sequence[Any]]
) -> list[str]:
    """A column for each server with medians over its rounds, and extremes if there are several.

    Figures that no server has are left out.
    """
    rows = [[title, *rounds]]
    for figure in figures:
        values = [[figure.value_in(one) for one in found] for found in rounds.values()]
        known = [[v * figure.factor for v in some if v is not None] for some in values]
        if any(known):
            rows.append([figure.title, *(median_of(some, figure.form) for some in known)])
    return align(rows)


def median_of(values: Sequence[float], form: str) -> str:
    """The median, with extremes if there are several values: "5 (3-9)"; "-" without values."""
    if not values:
        return "-"
    middle = f"{percentile(values, 50):{form}}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{form}}-{max(values):{form}})"


def _stage(stage: Mapping[str, Any]) -> Iterator[str]:
    stats = stage["figures"]
    values = [(figure, figure.value_in(stats)) for figure in FIGURES]
    shown = [pair for pair in values if pair[1] or isinstance(pair[1], float)]  # no counts of 0
    rows = [(f"  {figure.title}", figure.show(value)) for figure, value in shown]
    yield from ("", *align([(stage["label"], ""), *rows]))
    if goodput := stats["goodput"]:
        met = (
            f"{n} ≤ {limit_s:g} s {goodput['met'][n]:.1%}" for n, limit_s in goodput["slo"].items()
        )
        yield f"  {', '.join(met)}"
    for error in stats["errors"]:
        yield f"  {error['count']} {error['status']}: {error['message'][:100]}"


def _sweep(report: Report) -> Iterator[str]:
    columns = {stage["label"]: [stage["figures"]] for stage in report["stages"]}
    figures = [figure for figure in FIGURES if figure.path in _SWEPT]
    yield from ("", *median_table("sweep", figures, columns))
    if report["slo"]:
        knee = report["knee"]
        found = "none in this sweep" if knee is None else f"{knee:g}, the highest with 90 % good"
        yield f"  knee: {found}"


def _generator(stats: Mapping[str, Any]) -> Iterator[str]:
    parts = [f"{stats['cpu_share']:.0%} of a core"]
    if late := stats["late_s"]:
        parts.append(f"requests late by p50 {late['p50'] * 1e3:.2f} p99 {late['p99'] * 1e3:.2f} ms")
    if loop := stats["loop_late_s"]:
        parts.append(f"event loop late by p99 {loop['p99'] * 1e3:.2f} ms")
    yield f"\ngenerator: {', '.join(parts)}"
    if complaints := stats["complaints"]:
        yield (
            "WARNING: the generator may have been the bottleneck: "
            f"{'; '.join(complaints)}. Take these results with care."
        )


class Progress:
    """Reports a run's progress in lines.

    `say`: takes a line; by default it is printed to stderr.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.say = say or partial(print, file=sys.stderr)

    @asynccontextmanager
    async def reporting(self, what: str, run: Run) -> AsyncIterator[None]:
        """Reports the state of `run` every few seconds during the block."""

        async def repeat() -> None:
            for number in itertools.count(1):
                await asyncio.sleep(_EVERY_S)
                self.say(f"{what}, {number * _EVERY_S:.0f} s: {_status(run)}")

        async with running(repeat(), "progress"):
            yield


def _status(run: Run) -> str:
    """The state of a run in one line."""
    sent = len(run.outcomes)
    parts = [f"{sent} sent", f"{run.ok} done", f"{sent - run.ok - run.failed} running"]
    if run.failed:
        parts.append(f"{run.failed} failed")
    recent = [o.ttft_s for o in run.outcomes[-_RECENT:] if o.ttft_s is not None]
    if recent:
        parts.append(f"TTFT p50 {percentile(recent, 50) * 1e3:.0f} ms")
    return ", ".join([*parts, f"{sum(o.output_tokens for o in run.outcomes)} tokens"])
