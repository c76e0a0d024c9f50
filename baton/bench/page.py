"""A report as one HTML page that needs nothing else: tables, and plots as inline SVG."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from baton.bench.charts import Axis, Line, chart
from baton.bench.figures import Figures, latency, p95_s
from baton.bench.report import Report, ServerStage, StageTold
from baton.bench.spread import columns
from baton.bench.terminal import LATENCY_TITLES, milliseconds, phase_medians

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_COLORS = 6


def page_of(report: Report) -> str:
    """The page's whole text."""
    style = resources.files("baton.bench").joinpath("page.css").read_text()
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Baton bench, {escape(report['created'])}</title><style>{style}</style></head>",
        "<body><main>",
        *_head(report),
        *_sweep(report),
        *(part for stage in report["stages"] for part in _stage(stage, len(report["stages"]) > 1)),
        *_foot(report),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _head(report: Report) -> Iterator[str]:
    yield "<h1>Load report</h1>"
    servers = "".join(
        f'<li><b class="c{i} dot">{s["name"]}</b> {escape(s["url"])} '
        f"<small>{escape(s['model'])}, {s['protocol']}</small></li>"
        for i, s in enumerate(report["servers"])
    )
    yield f"<ul class='servers'>{servers}</ul>"
    sweep = ", ".join(f"{value:g}" for value in report["workload"]["sweep"])
    told = {
        **report["workload"],
        "sweep": sweep,
        **{f"slo {k}": f"{v:g} s" for k, v in (report["slo"] or {}).items()},
    }
    asked = " · ".join(
        f"{name.replace('_', ' ')} <b>{escape(str(value))}</b>"
        for name, value in told.items()
        if value not in (None, 0, "")
    )
    yield f"<p class='asked'>{asked} · {escape(report['created'])}</p>"
    if report["partial"]:
        yield "<p class='warning'>Ended early: figures are of what had ended by then.</p>"
    if complaints := report["generator"]["complaints"]:
        yield (
            "<p class='warning'>The load generator may have been the bottleneck: "
            f"{escape('; '.join(complaints))}.</p>"
        )


def _sweep(report: Report) -> Iterator[str]:
    """Throughput against latency, a point for each value of the sweep."""
    if report["knees"] is None:
        return
    yield "<h2>Sweep</h2>"
    knees = {name: k["value"] for name, k in report["knees"].items() if k}
    rows = [
        [
            f"{server['server']}: {stage['label']}"
            + (" ◀ knee" if knees.get(server["server"]) == stage["value"] else ""),
            f"{server['figures']['requests_per_s']:.3g}",
            f"{server['figures']['output_tokens_per_s']:,.0f}",
            *(
                milliseconds(p95_s(server["figures"], name))
                for name in ("ttft_s", "tpot_s", "e2e_s")
            ),
            _good(server["figures"]),
        ]
        for stage in report["stages"]
        for server in stage["servers"]
    ]
    head = ("", "requests/s", "output tokens/s", "TTFT p95 ms", "TPOT p95 ms", "E2E p95 ms", "good")
    yield _table(head, rows)
    yield "<div class='charts'>"
    for name, title in LATENCY_TITLES.items():
        lines = [
            Line(server["name"], _knee_points(report, i, name), i, False, True, _values(report))
            for i, server in enumerate(report["servers"])
        ]
        yield chart(
            f"Throughput and {title}, p95",
            Axis("output tokens/s", from_zero=True),
            Axis("ms", is_log=True),
            lines,
        )
    yield "</div>"


def _knee_points(report: Report, i: int, name: str) -> list[tuple[float, float | None]]:
    stages = [stage["servers"][i]["figures"] for stage in report["stages"]]
    return [(f["output_tokens_per_s"], _ms(p95_s(f, name))) for f in stages]


def _values(report: Report) -> list[str]:
    return [f"{stage['value']:g}" for stage in report["stages"]]


def _stage(stage: StageTold, is_one_of_many: bool) -> Iterator[str]:
    title = f"{'Stage: ' if is_one_of_many else ''}{stage['label']}"
    yield f"<h2>{escape(title)}</h2>"
    for server in stage["servers"]:
        yield f"<h3>{escape(server['server'])}</h3>"
        yield _latencies(server["figures"])
        yield f"<dl>{''.join(_facts(server['figures']))}</dl>"
    if stage["comparison"] is not None:
        yield _comparison(stage)
    yield "<div class='charts'>"
    yield from _distributions(stage["servers"])
    yield from _timelines(stage["servers"])
    yield "</div>"


def _latencies(figures: Figures) -> str:
    rows = []
    for name, title in LATENCY_TITLES.items():
        rows.append([title, *map(milliseconds, columns(latency(figures, name), _COLUMNS))])
    return _table(("ms", *_COLUMNS), rows)


def _facts(figures: Figures) -> Iterator[str]:
    requests = figures["requests"]
    facts = {
        "requests": f"{requests['ok']} of {requests['sent']} ok, {figures['requests_per_s']:.3g}/s "
        f"over {figures['seconds']:.1f} s",
        "input tokens": f"{figures['input_tokens']:,}, {figures['input_tokens_per_s']:,.0f}/s",
        "output tokens": f"{figures['output_tokens']:,}, {figures['output_tokens_per_s']:,.0f}/s",
    }
    if goodput := figures["goodput"]:
        each = ", ".join(f"{name} {share:.1%}" for name, share in goodput["met"].items())
        facts["goodput"] = f"{goodput['share']:.1%}, {goodput['requests_per_s']:.3g}/s ({each})"
    if (cache := figures["prefix_cache"]) is not None:
        facts["prefix cache"] = f"{cache['share']:.1%} of input tokens"
    if medians := phase_medians(figures):
        facts["phases, p50 ms"] = ", ".join(f"{name} {value}" for name, value in medians.items())
    if phases := figures["phases"]:
        facts["KV transfer"] = (
            f"{phases['transferred']} requests, {phases['transfer_bytes']:,} bytes"
        )
        facts["prefilled by decode"] = f"{phases['prefilled_by_decode']} requests"
        facts["failovers"] = f"{phases['failovers']} requests"
    for error in figures["errors"]:
        facts[error["status"]] = f"{error['count']}: {error['message'][:200]}"
    for name, text in facts.items():
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"


def _comparison(stage: StageTold) -> str:
    rows = []
    for one in stage["comparison"] or ():
        show = milliseconds if "_s." in one["figure"] else "{:.4g}".format
        ratios = one["block_ratios"]
        rows.append(
            [
                _figure_title(one["figure"]),
                show(one["first"]),
                show(one["second"]),
                "-" if one["ratio"] is None else f"{one['ratio']:.3f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-",
                {"first": "A", "second": "B", "": "undecided"}[one["better"]],
            ]
        )
    head = ("A and B, latencies in ms", "A", "B", "B / A", "in blocks", "better in every block")
    return f"<h3>Compared</h3>{_table(head, rows)}"


def _figure_title(path: str) -> str:
    """A figure's path as words: latencies are in ms here."""
    return path.replace("_s.", " ").replace("_per_s", "/s").replace("_", " ").replace(".", " ")


def _distributions(servers: Sequence[ServerStage]) -> Iterator[str]:
    for name, title in LATENCY_TITLES.items():
        lines = []
        for i, server in enumerate(servers):
            values = server["figures"]["quantiles"][name]
            steps = max(1, len(values) - 1)
            points = [(value * 1e3, 100 * k / steps) for k, value in enumerate(values)]
            lines.append(Line(server["server"], points, i))
        yield chart(
            f"{title[0].upper()}{title[1:]}, distribution",
            Axis("ms", is_log=True),
            Axis("% of values", from_zero=True),
            lines,
        )


def _timelines(servers: Sequence[ServerStage]) -> Iterator[str]:
    ms, count = Axis("ms", from_zero=True), Axis("", from_zero=True)
    yield _timeline(servers, "Time to first token over time", ms, ("ttft_p50_s", "ttft_p95_s"))
    yield _timeline(servers, "Inter-token latency over time", ms, ("itl_p50_s", "itl_p95_s"))
    rate = Axis("per second", from_zero=True)
    yield _timeline(servers, "Output tokens", rate, ("output_tokens",))
    yield _timeline(
        servers, "Requests sent, ended and failed", rate, ("sent", "ended_ok", "failed")
    )
    yield _timeline(servers, "Requests running", count, ("running",))


def _timeline(servers: Sequence[ServerStage], title: str, y: Axis, names: Sequence[str]) -> str:
    lines = []
    for i, server in enumerate(servers):
        timeline = server["timeline"]
        for k, name in enumerate(names):
            values: Sequence[float | None] = timeline[name]  # type: ignore[literal-required]
            factor = _factor(name, timeline["width_s"])
            points = [
                (at, None if value is None else value * factor)
                for at, value in zip(timeline["begin_s"], values, strict=True)
            ]
            told = name.removesuffix("_s").replace("_", " ")
            label = f"{server['server']} {told}" if len(servers) > 1 else told
            color = i if len(servers) > 1 else k
            lines.append(Line(label, points, color % _COLORS, len(servers) > 1 and k > 0))
    return chart(title, Axis("s"), y, lines)


def _factor(name: str, width_s: float) -> float:
    """From a span's value to what is drawn: ms, or a rate; what runs is counted."""
    if name.endswith("_s"):
        return 1e3
    return 1.0 if name == "running" else 1 / width_s


def _foot(report: Report) -> Iterator[str]:
    told = report["generator"]
    rows = [
        [title, *map(milliseconds, columns(spread, _COLUMNS))]
        for title, spread in (
            ("requests sent late", told["late_s"]),
            ("event loop late", told["loop_late_s"]),
        )
    ]
    yield "<h2>The generator itself</h2>"
    yield _table(("ms", *_COLUMNS), rows)
    yield f"<p>It used {told['cpu_share']:.0%} of a core.</p>"
    data = json.dumps(report, separators=(",", ":")).replace("<", "\\u003c")
    yield f'<script type="application/json" id="report">{data}</script>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3


def _good(figures: Figures) -> str:
    return f"{figures['goodput']['share']:.1%}" if figures["goodput"] else "-"
