"""A report as tables for a terminal, and how a run goes while it goes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from baton.bench.generator import Run
from baton.bench.report import Report, failures_of
from baton.bench.stats import FIGURES, INTERFERENCE_FIGURES, Figure, percentile

_SWEPT = (
    *("ttft_s.p95", "tpot_s.p95", "e2e_s.p95"),
    *("requests_per_s", "output_tokens_per_s", "goodput.share"),
)
_EVERY_S = 5.0
_RECENT = 100  # requests whose TTFT is shown while a run goes on


def show(report: Report, console: Console) -> None:
    """Prints the whole report."""
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> Iterator[RenderableType]:
    yield Text(f"{report['server']['url']}  {report['server']['model']}")
    if report["partial"]:
        yield Text("PARTIAL: ended early; results are of what had ended by then", "bold yellow")
    for stage in report["stages"]:
        yield from _stage(stage)
    if report["interference"]:
        yield Text()
        yield median_table("interference", INTERFERENCE_FIGURES, {"": [report["interference"]]})
        if why := failures_of(report):
            yield Text(f"  {why}")
    if len(report["stages"]) > 1:
        yield from _sweep(report)
    yield from _generator(report["generator"])


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """One whose first column has the title as its head; all others are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column(title, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for name, *cells in rows:
        made.add_row(Text(name), *map(Text, cells))
    return made


def median_table(
    title: str, figures: Sequence[Figure], rounds: Mapping[str, Sequence[Any]]
) -> Table:
    """A column for each server: medians over its rounds, with the extremes of several.

    Without figures that no server has.
    """
    rows = []
    for figure in figures:
        values = [[figure.of(one) for one in found] for found in rounds.values()]
        known = [[v * figure.factor for v in some if v is not None] for some in values]
        if any(known):
            rows.append([figure.title, *(median_of(some, figure.form) for some in known)])
    return table(title, list(rounds), rows)


def median_of(values: Sequence[float], form: str) -> str:
    """The median, and the extremes of several: "5 (3-9)"; "-" of none."""
    if not values:
        return "-"
    middle = f"{percentile(values, 50):{form}}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{form}}-{max(values):{form}})"


def _stage(stage: Mapping[str, Any]) -> Iterator[RenderableType]:
    stats = stage["figures"]
    values = [(figure, figure.of(stats)) for figure in FIGURES]
    rows = [(f"  {figure.title}", figure.show(value)) for figure, value in values if value]
    yield Text()
    yield table(stage["label"], [""], rows)
    if goodput := stats["goodput"]:
        met = (
            f"{n} ≤ {limit_s:g} s {goodput['met'][n]:.1%}" for n, limit_s in goodput["slo"].items()
        )
        yield Text(f"  {', '.join(met)}")
    for error in stats["errors"]:
        yield Text(f"  {error['count']} {error['status']}: {error['message'][:100]}")


def _sweep(report: Report) -> Iterator[RenderableType]:
    columns = {stage["label"]: [stage["figures"]] for stage in report["stages"]}
    yield Text()
    yield median_table("sweep", [one for one in FIGURES if one.path in _SWEPT], columns)
    if report["slo"]:
        knee = report["knee"]
        found = "none in this sweep" if knee is None else f"{knee:g}, the highest with 90 % good"
        yield Text(f"  knee: {found}")


def _generator(stats: Mapping[str, Any]) -> Iterator[Text]:
    parts = [f"{stats['cpu_share']:.0%} of a core"]
    if late := stats["late_s"]:
        parts.append(f"requests late by p50 {late['p50'] * 1e3:.2f} p99 {late['p99'] * 1e3:.2f} ms")
    if loop := stats["loop_late_s"]:
        parts.append(f"event loop late by p99 {loop['p99'] * 1e3:.2f} ms")
    yield Text(f"\ngenerator: {', '.join(parts)}")
    if complaints := stats["complaints"]:
        yield Text(
            "WARNING: the generator may have been the bottleneck: "
            f"{'; '.join(complaints)}. Take these results with care.",
            "bold yellow",
        )


class Progress:
    """Says how a run goes, in lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    @asynccontextmanager
    async def of(self, what: str, run: Run) -> AsyncIterator[None]:
        """Says what the run has done, every few seconds as long as the block lasts."""

        async def repeat() -> None:
            for number in itertools.count(1):
                await asyncio.sleep(_EVERY_S)
                self.say(f"{what}, {number * _EVERY_S:.0f} s: {_status(run)}")

        task = asyncio.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()


def _status(run: Run) -> str:
    """A run in one line."""
    sent = len(run.outcomes)
    parts = [f"{sent} sent", f"{run.ok} done", f"{sent - run.ok - run.failed} running"]
    if run.failed:
        parts.append(f"{run.failed} failed")
    recent = [o.ttft_s for o in run.outcomes[-_RECENT:] if o.ttft_s is not None]
    if recent:
        parts.append(f"TTFT p50 {percentile(recent, 50) * 1e3:.0f} ms")
    return ", ".join([*parts, f"{sum(o.output_tokens for o in run.outcomes)} tokens"])
