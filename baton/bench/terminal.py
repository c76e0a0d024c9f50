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
from baton.bench.stats import Spread, Stats, percentile, value_at

LATENCY_TITLES = {
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "tpot_s": "time per output token",
    "e2e_s": "end to end",
}
_PHASES = {
    "queue": "queue_s",
    "first token after it": "first_token_after_queue_s",
    "KV transfer": "transfer_s",
    "rest of the answer": "decode_s",
    "outside the server": "outside_s",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_KNEES = {"slo": "the highest with 90 % good", "shape": "where latency bends upwards"}
_REWRITE_S, _LOG_S = 0.5, 5.0

Row = tuple[str, str, float, str]  # title, path in statistics, factor, format
INTERFERENCE_ROWS: Sequence[Row] = (
    ("streams alone, tokens/s", "alone.tokens_per_s", 1, ".0f"),
    ("streams beside prompts, tokens/s", "beside.tokens_per_s", 1, ".0f"),
    ("share of tokens/s kept, %", "kept", 100, ".1f"),
    *(
        (f"{phase}: ITL {name}, ms", f"{phase}.itl_s.{name}", 1e3, ".1f")
        for phase in ("alone", "beside")
        for name in ("p50", "p99", "max")
    ),
    ("alone: time in gaps over 200 ms, %", "alone.long_gap_share", 100, ".2f"),
    ("beside: time in gaps over 200 ms, %", "beside.long_gap_share", 100, ".2f"),
    ("alone: streams' TTFT p50, ms", "alone.ttft_s.p50", 1e3, ".0f"),
    ("beside: streams' TTFT p50, ms", "beside.ttft_s.p50", 1e3, ".0f"),
    ("long prompts' TTFT p50, ms", "prompts.ttft_s.p50", 1e3, ".0f"),
    ("long prompts' TTFT p95, ms", "prompts.ttft_s.p95", 1e3, ".0f"),
    ("long prompts not answered", "prompts.failed", 1, ".0f"),
)


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
        yield median_table("median (min-max)", INTERFERENCE_ROWS, rounds)
    if report["knees"]:
        yield from _sweep(report)
    yield from _generator(report["generator"])


def milliseconds(value_s: float | None) -> str:
    """Three or more significant digits, without a unit."""
    if value_s is None:
        return "-"
    value_ms = value_s * 1e3
    return f"{value_ms:,.0f}" if value_ms >= 1000 else f"{value_ms:.4g}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """One whose first column has the title as its head; all others are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column(title, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for name, *cells in rows:
        made.add_row(Text(name), *map(Text, cells))
    return made


def median_table(title: str, rows: Sequence[Row], rounds: Mapping[str, Sequence[Any]]) -> Table:
    """A column for each server: medians over its rounds, with the extremes of several."""

    def cell(found: Sequence[Any], path: str, factor: float, form: str) -> str:
        values = (value_at(one, path) for one in found)
        return median_of([value * factor for value in values if value is not None], form)

    cells = [
        [name, *(cell(found, path, factor, form) for found in rounds.values())]
        for name, path, factor, form in rows
    ]
    return table(title, list(rounds), cells)


def median_of(values: Sequence[float], form: str) -> str:
    """The median, and the extremes of several: "5 (3-9)"; "-" of none."""
    if not values:
        return "-"
    middle = f"{percentile(values, 50):{form}}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{form}}-{max(values):{form}})"


def _latencies(spread: Spread | None, columns: Sequence[str]) -> list[str]:
    return [milliseconds(spread[name] if spread else None) for name in columns]


def _stage(stage: Mapping[str, Any]) -> Iterator[RenderableType]:
    for server in stage["servers"]:
        stats = server["figures"]
        rows = [[f"  {t}", *_latencies(stats[n], _COLUMNS)] for n, t in LATENCY_TITLES.items()]
        yield Text()
        yield table(f"{server['server']}: {stage['label']}, ms", _COLUMNS, rows)
        yield from (Text(f"  {line}") for line in _facts(stats))
    if stage["comparison"] is not None:
        rows = []
        for one in stage["comparison"]:
            form = milliseconds if "_s." in one["figure"] else "{:.4g}".format
            ratios = one["block_ratios"]
            rows.append(
                [
                    f"  {one['figure']}",
                    form(one["first"]),
                    form(one["second"]),
                    "-" if one["ratio"] is None else f"{one['ratio']:.3f}",
                    f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-",
                    {"first": "A", "second": "B", "": ""}[one["better"]],
                ]
            )
        yield Text()
        head = ("A", "B", "B / A", "in blocks", "better in every block")
        yield table("latencies in ms", head, rows)


def _facts(stats: Stats) -> Iterator[str]:
    requests = stats["requests"]
    interrupted = f"; {requests['interrupted']} interrupted" if requests["interrupted"] else ""
    yield (
        f"requests  {requests['ok']} of {requests['sent']} ok in {stats['seconds']:.1f} s: "
        f"{stats['requests_per_s']:.3g}/s{interrupted}"
    )
    yield (
        f"tokens    in {stats['input_tokens']:,}: {stats['input_tokens_per_s']:,.0f}/s; "
        f"out {stats['output_tokens']:,}: {stats['output_tokens_per_s']:,.0f}/s"
    )
    if goodput := stats["goodput"]:
        met = ", ".join(
            f"{name} ≤ {limit_s:g} s {goodput['met'][name]:.1%}"
            for name, limit_s in goodput["slo"].items()
        )
        yield f"goodput   {goodput['share']:.1%}: {goodput['requests_per_s']:.3g}/s ({met})"
    if cache := stats["prefix_cache"]:
        yield f"cached    {cache['share']:.1%} of input tokens"
    if phases := stats["phases"]:
        medians = (f"{t} {milliseconds(phases[n]['p50'])}" for t, n in _PHASES.items() if phases[n])
        yield f"phases    p50, ms: {', '.join(medians)}"
        yield (
            f"handoffs  {phases['transferred']} with {phases['transfer_bytes']:,} bytes of KV; "
            f"{phases['prefilled_by_decode']} prefilled by decode; {phases['failovers']} failovers"
        )
    for error in stats["errors"]:
        yield f"{error['count']} {error['status']}: {error['message'][:100]}"
    if stats["short_outputs"]:
        yield f"{stats['short_outputs']} answers have fewer tokens than asked for"
    if stats["miscounted"]:
        yield f"{stats['miscounted']} streams have another number of tokens than their usage"


def _sweep(report: Report) -> Iterator[RenderableType]:
    rows = []
    for stage in report["stages"]:
        for server in stage["servers"]:
            f = server["figures"]
            p95s = [_latencies(f[name], ("p95",))[0] for name in ("ttft_s", "tpot_s", "e2e_s")]
            good = f"{f['goodput']['share']:.1%}" if f["goodput"] else "-"
            numbers = [f"{f['requests_per_s']:.3g}", f"{f['output_tokens_per_s']:.0f}"]
            rows.append([f"  {server['server']}: {stage['label']}", *numbers, *p95s, good])
    yield Text()
    head = ("req/s", "tok/s", "TTFT p95", "TPOT p95", "E2E p95", "good")
    yield table("sweep, ms", head, rows)
    for name, knee in report["knees"].items():
        found = f"{knee['value']:g} ({_KNEES[knee['by']]})" if knee else "none in this sweep"
        yield Text(f"  knee of {name}: {found}")


def _generator(stats: Mapping[str, Any]) -> Iterator[Text]:
    parts = [f"{stats['cpu_share']:.0%} of a core"]
    if late := stats["late_s"]:
        p50, p99 = _latencies(late, ("p50", "p99"))
        parts.append(f"requests late by p50 {p50} p99 {p99} ms")
    if loop := stats["loop_late_s"]:
        parts.append(f"event loop late by p99 {milliseconds(loop['p99'])} ms")
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
