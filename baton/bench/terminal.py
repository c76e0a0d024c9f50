"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.bench.figures import Figures, latency, p95_s
from baton.bench.report import Report, StageTold
from baton.bench.spread import Spread, columns

LATENCY_TITLES = {
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "tpot_s": "time per output token",
    "e2e_s": "end to end",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_TITLE_WIDTH, _NUMBER_WIDTH = 26, 9


def text_of(report: Report) -> str:
    """The whole report, narrow enough for 80 columns."""
    lines = [f"{s['name']}  {s['url']}  {s['model']}" for s in report["servers"]]
    if report["partial"]:
        lines.append("PARTIAL: ended early; figures are of what had ended by then")
    for stage in report["stages"]:
        lines += ["", *_stage(stage)]
    lines += ["", *_sweep(report), *_generator(report)]
    return "\n".join(lines)


def milliseconds(value_s: float | None) -> str:
    """Three or more significant digits, without a unit."""
    if value_s is None:
        return "-"
    value_ms = value_s * 1e3
    return f"{value_ms:,.0f}" if value_ms >= 1000 else f"{value_ms:.4g}"


def phase_medians(figures: Figures) -> dict[str, str]:
    """The median of each phase a Baton server tells of, in ms."""
    phases = figures["phases"]
    if phases is None:
        return {}
    spreads: Mapping[str, Spread | None] = {
        "queue": phases["queue_s"],
        "first token after it": phases["first_token_after_queue_s"],
        "KV transfer": phases["transfer_s"],
        "rest of the answer": phases["decode_s"],
        "outside the server": phases["outside_s"],
    }
    return {name: milliseconds(s["p50"]) for name, s in spreads.items() if s}


def _stage(stage: StageTold) -> Iterator[str]:
    for server in stage["servers"]:
        title = f"{server['server']}: {stage['label']}"
        yield _row(f"{title}, ms", _COLUMNS)
        figures = server["figures"]
        for name, latency_title in LATENCY_TITLES.items():
            values = columns(latency(figures, name), _COLUMNS)
            yield _row(f"  {latency_title}", [milliseconds(value) for value in values])
        yield from _facts(figures)
        yield ""
    if stage["comparison"] is not None:
        yield _row("B / A", ("A", "B", "ratio", "   in blocks"))
        for one in stage["comparison"]:
            yield _row(f"  {one['figure']}", _compared(one))


def _facts(figures: Figures) -> Iterator[str]:
    requests, seconds = figures["requests"], figures["seconds"]
    yield (
        f"  requests  {requests['ok']} of {requests['sent']} ok in {seconds:.1f} s: "
        f"{figures['requests_per_s']:.3g}/s"
        + (f"; {requests['interrupted']} interrupted" if requests["interrupted"] else "")
    )
    yield (
        f"  tokens    in {figures['input_tokens']:,}: {figures['input_tokens_per_s']:,.0f}/s; "
        f"out {figures['output_tokens']:,}: {figures['output_tokens_per_s']:,.0f}/s"
    )
    if goodput := figures["goodput"]:
        met = ", ".join(
            f"{name} ≤ {most:g} s {goodput['met'][name]:.1%}"
            for name, most in goodput["slo"].items()
        )
        yield f"  goodput   {goodput['share']:.1%}: {goodput['requests_per_s']:.3g}/s ({met})"
    if (cache := figures["prefix_cache"]) is not None:
        yield f"  cached    {cache['share']:.1%} of input tokens"
    if medians := phase_medians(figures):
        told = ", ".join(f"{name} {value}" for name, value in medians.items())
        yield f"  phases    p50, ms: {told}"
    for error in figures["errors"]:
        yield f"  {error['count']} {error['status']}: {error['message'][:100]}"
    if figures["short_outputs"]:
        yield f"  {figures['short_outputs']} answers have fewer tokens than asked for"
    if figures["miscounted"]:
        yield f"  {figures['miscounted']} streams brought other counts than their usage tells"


def _compared(one: Mapping[str, object]) -> list[str]:
    ratios = one["block_ratios"]
    assert isinstance(ratios, list)
    ratio = one["ratio"]
    spread = f"   {min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-"
    first, second = (_plain(one["figure"], one[side]) for side in ("first", "second"))
    return [first, second, f"{ratio:.3f}" if isinstance(ratio, float) else "-", spread]


def _plain(figure: object, value: object) -> str:
    assert isinstance(value, float)
    return milliseconds(value) if "_s." in str(figure) else f"{value:.4g}"


def _sweep(report: Report) -> Iterator[str]:
    if report["knees"] is None:
        return
    yield _row("sweep", ("req/s", "tok/s", "TTFT p95", "TPOT p95", "good"))
    for stage in report["stages"]:
        for server in stage["servers"]:
            f = server["figures"]
            p95 = (p95_s(f, name) for name in ("ttft_s", "tpot_s"))
            good = f"{f['goodput']['share']:.1%}" if f["goodput"] else "-"
            numbers = [f"{f['requests_per_s']:.3g}", f"{f['output_tokens_per_s']:.0f}"]
            title = f"  {server['server']}: {stage['label']}"
            yield _row(title, [*numbers, *map(milliseconds, p95), good])
    for name, knee in report["knees"].items():
        why = {"slo": "the highest with 90 % good", "shape": "where latency bends upwards"}
        yield (
            f"  knee of {name}: {knee['value']:g} ({why[knee['by']]})"
            if knee
            else f"  knee of {name}: none found in this sweep"
        )
    yield ""


def _generator(report: Report) -> Iterator[str]:
    told = report["generator"]
    late, loop = told["late_s"], told["loop_late_s"]
    parts = [
        f"requests late by p50 {milliseconds(late['p50'])} p99 {milliseconds(late['p99'])} ms"
        if late
        else "",
        f"event loop by p99 {milliseconds(loop['p99'])} ms" if loop else "",
        f"{told['cpu_share']:.0%} of a core",
    ]
    yield f"generator: {', '.join(part for part in parts if part)}"
    if told["complaints"]:
        yield (
            "WARNING: the generator may have been the bottleneck: "
            f"{'; '.join(told['complaints'])}. Take its figures with care."
        )


def _row(title: str, cells: Sequence[str]) -> str:
    return title.ljust(_TITLE_WIDTH) + "".join(cell.rjust(_NUMBER_WIDTH) for cell in cells)
