"""A report as tables for a terminal, and how a run goes while it goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from baton.bench.generator import Run
from baton.bench.report import Report
from baton.bench.stats import (
    FIGURES,
    INTERFERENCE_FIGURES,
    LATENCIES,
    LOAD_FIGURES,
    Figure,
    percentile,
)

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_KNEES = {"slo": "the highest with 90 % good", "shape": "where latency bends upwards"}
_SWEPT = (
    *("ttft_s.p95", "tpot_s.p95", "e2e_s.p95"),
    *("requests_per_s", "output_tokens_per_s", "goodput.share"),
)
_REWRITE_S, _LOG_S = 0.5, 5.0


def show(report: Report, console: Console) -> None:
    """Prints the whole report."""
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> Iterator[RenderableType]:
    for server in report["servers"]:
        yield Text(f"{server['name']}  {server['url']}  {server['model']}")
    if report["partial"]:
        yield Text("PARTIAL: ended early; results are of what had ended by then", "bold yellow")
    for stage in report["stages"]:
        yield from _stage(stage)
    if report["interference"]:
        rounds = {one["server"]: one["rounds"] for one in report["interference"]}
        yield Text()
        yield median_table("median (min-max)", INTERFERENCE_FIGURES, rounds)
    if report["knees"]:
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
    servers = {server["server"]: server["figures"] for server in stage["servers"]}
    spreads = {
        f"  {name}: {title}": stats[latency]
        for latency, title in LATENCIES.items()
        for name, stats in servers.items()
    }
    rows = [[t, *(_ms(spread and spread[c]) for c in _COLUMNS)] for t, spread in spreads.items()]
    yield Text()
    yield table(f"{stage['label']}, ms", _COLUMNS, rows)
    compared = {one["figure"]: one for one in stage["comparison"] or ()}
    rows = []
    for figure in [one for one in FIGURES if one.path in compared or one in LOAD_FIGURES]:
        values = [figure.of(stats) for stats in servers.values()]
        if not any(values):
            continue
        rows.append([f"  {figure.title}", *map(figure.show, values)])
        if one := compared.get(figure.path):
            ratios = one["block_ratios"]
            rows[-1] += [
                "" if one["ratio"] is None else f"{one['ratio']:.3f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "",
                {"first": "A", "second": "B", "": ""}[one["better"]],
            ]
    head = ("B / A", "in blocks", "better in every block") if compared else ()
    yield Text()
    yield table(stage["label"], (*servers, *head), rows)
    for name, stats in servers.items():
        if goodput := stats["goodput"]:
            met = (
                f"{n} ≤ {limit_s:g} s {goodput['met'][n]:.1%}"
                for n, limit_s in goodput["slo"].items()
            )
            yield Text(f"  {name}: {', '.join(met)}")
        for error in stats["errors"]:
            yield Text(f"  {name}: {error['count']} {error['status']}: {error['message'][:100]}")


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:,.2f}"


def _sweep(report: Report) -> Iterator[RenderableType]:
    columns = {
        f"{server['server']}: {stage['label']}": [server["figures"]]
        for stage in report["stages"]
        for server in stage["servers"]
    }
    yield Text()
    yield median_table("sweep", [one for one in FIGURES if one.path in _SWEPT], columns)
    for name, knee in report["knees"].items():
        found = f"{knee['value']:g} ({_KNEES[knee['by']]})" if knee else "none in this sweep"
        yield Text(f"  knee of {name}: {found}")


def _generator(stats: Mapping[str, Any]) -> Iterator[Text]:
    parts = [f"{stats['cpu_share']:.0%} of a core"]
    if late := stats["late_s"]:
        parts.append(f"requests late by p50 {_ms(late['p50'])} p99 {_ms(late['p99'])} ms")
    if loop := stats["loop_late_s"]:
        parts.append(f"event loop late by p99 {_ms(loop['p99'])} ms")
    yield Text(f"\ngenerator: {', '.join(parts)}")
    if complaints := stats["complaints"]:
        yield Text(
            "WARNING: the generator may have been the bottleneck: "
            f"{'; '.join(complaints)}. Take these results with care.",
            "bold yellow",
        )


class Progress:
    """Shows how a run goes: a line that is rewritten on a terminal, lines in a log elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    @asynccontextmanager
    async def of(self, what: str, run: Run) -> AsyncIterator[None]:
        """Shows the run's counts as long as the block lasts."""
        is_terminal, status = self._console.is_terminal, self._console.status(what)

        async def rewrite(step_s: float) -> None:
            for number in itertools.count(1):
                await asyncio.sleep(step_s)
                text = f"{what}, {number * step_s:.0f} s: {status_of(run)}"
                status.update(Text(text)) if is_terminal else self.say(text)

        with status if is_terminal else contextlib.nullcontext():
            task = asyncio.create_task(rewrite(_REWRITE_S if is_terminal else _LOG_S))
            try:
                yield
            finally:
                task.cancel()


def status_of(run: Run) -> str:
    """A run in one line."""
    sent = len(run.outcomes)
    parts = [f"{sent} sent", f"{run.ok} done", f"{sent - run.ok - run.failed} running"]
    if run.failed:
        parts.append(f"{run.failed} failed")
    if run.recent_ttfts_s:
        parts.append(f"TTFT p50 {percentile(run.recent_ttfts_s, 50) * 1e3:.0f} ms")
    return ", ".join([*parts, f"{run.output_tokens} tokens"])
