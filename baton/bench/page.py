"""A report as one HTML page that loads nothing: the terminal's tables, and plots as inline SVG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

from baton.bench.report import Report
from baton.bench.stats import LATENCIES
from baton.bench.terminal import show

_LOG_FROM = 5.0  # smaller spans are easier to read on an even scale
_WIDTH = 110  # of the tables, characters
_COLUMNS = 3  # plots in a row
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "baton", "font.size": 8}
_STYLE = """
body { max-width: 1400px; margin: 0 auto; padding: 20px; font: 15px/1.5 system-ui, sans-serif;
  color: #1d2430; background: #fff; }
pre { font: 13px/1.4 ui-monospace, monospace; overflow-x: auto; }
svg { width: 100%; height: auto; }
"""
_TIMELINES = (
    ("Time to first token over time", "ms", ("ttft_p50_s", "ttft_p95_s")),
    ("Inter-token latency over time", "ms", ("itl_p50_s", "itl_p95_s")),
    ("Output tokens", "per second", ("output_tokens",)),
    ("Requests sent, ended and failed", "per second", ("sent", "ended_ok", "failed")),
    ("Requests running", "", ("running",)),
)


class Line(NamedTuple):
    """One line of a plot; `texts` stand at its points."""

    x: Sequence[float]
    y: Sequence[float]
    color: int
    label: str
    style: str = "-"
    texts: Sequence[str] = ()


class Plot(NamedTuple):
    """One plot: titles of itself and its axes, and which axis is logarithmic, if any."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: str = ""


def page_of(report: Report) -> str:
    """The page's whole text."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    show(report, console)
    tables = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    limits = {f"slo {name}": f"{limit_s:g} s" for name, limit_s in (report["slo"] or {}).items()}
    load = {**{k: v for k, v in report["workload"].items() if v}, **limits}
    text = " · ".join(f"{k.replace('_', ' ')} {v}" for k, v in load.items())
    data = json.dumps(report, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace("&", "\\u0026")
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>Baton bench, {escape(report['created'])}</title>",
        f"<style>{_STYLE}</style></head><body><h1>Load report</h1>",
        f"<p>{escape(text)} · {escape(report['created'])}</p>",
        tables,
    ]
    if report["knees"]:
        parts += ["<h2>Sweep</h2>", _svg(list(_sweep(report)))]
    for stage in report["stages"]:
        parts += [f"<h2>{escape(stage['label'])}</h2>", _svg(list(_stage(stage["servers"])))]
    parts.append(f'<script type="application/json" id="report">{data}</script></body></html>')
    return "\n".join(parts)


def _sweep(report: Report) -> Iterator[Plot]:
    """Throughput against latency, a point for each value of the sweep."""
    for name, title in LATENCIES.items():
        lines = []
        for i, server in enumerate(report["servers"]):
            found = [(stage["servers"][i]["figures"], stage["value"]) for stage in report["stages"]]
            found = [(figures, value) for figures, value in found if figures[name]]
            x = [figures["output_tokens_per_s"] for figures, _ in found]
            y = [figures[name]["p95"] * 1e3 for figures, _ in found]
            lines.append(Line(x, y, i, server["name"], "o-", [f"{value:g}" for _, value in found]))
        yield Plot(f"Throughput and {title}, p95", "output tokens/s", "ms", lines, "y")


def _stage(servers: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    """Distributions of latencies, and how they and the load went over time."""
    for name, title in LATENCIES.items():
        lines = []
        for i, server in enumerate(servers):
            values = [value * 1e3 for value in server["figures"]["quantiles"][name]]
            shares = [100 * k / max(1, len(values) - 1) for k in range(len(values))]
            lines.append(Line(values, shares, i, server["server"]))
        yield Plot(f"{title.capitalize()}, distribution", "ms", "% of values", lines, "x")
    for title, unit, names in _TIMELINES:
        lines = []
        for i, server in enumerate(servers):
            timeline = server["timeline"]
            scale = {"ms": 1e3, "per second": 1 / timeline["width_s"], "": 1}[unit]
            for k, name in enumerate(names):
                values = [float("nan") if v is None else v * scale for v in timeline[name]]
                label = f"{server['server']} {name.removesuffix('_s').replace('_', ' ')}"
                # Of two servers each has a colour, and each of its values a style.
                color, style = (i, (".-", ".:", ".--")[k]) if len(servers) > 1 else (k, ".-")
                lines.append(Line(timeline["begin_s"], values, color, label, style))
        yield Plot(title, "s", unit, lines)


def _svg(plots: Sequence[Plot]) -> str:
    """The plots beside each other as one SVG element, which is the same for the same report.

    A logarithmic axis is an even one where its values differ little. Text stays text.
    """
    rows = -(-len(plots) // _COLUMNS)
    out = io.StringIO()
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(5 * _COLUMNS, 3 * rows), layout="constrained")
        for place, plot in enumerate(plots, 1):
            axes: Any = figure.add_subplot(rows, _COLUMNS, place)
            for line in plot.lines:
                axes.plot(line.x, line.y, line.style, color=f"C{line.color}", label=line.label)
                for text, x, y in zip(line.texts, line.x, line.y, strict=False):
                    axes.annotate(text, (x, y), xytext=(5, 5), textcoords="offset points")
            lines = plot.lines if plot.log else ()
            logs = [v for line in lines for v in getattr(line, plot.log) if v > 0]
            if logs and max(logs) > _LOG_FROM * min(logs):
                axes.set(**{f"{plot.log}scale": "log"})
            if not plot.log:
                axes.set_ylim(bottom=0)
            axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
            axes.grid(color="#e3e7ee")
            axes.legend()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.S)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
