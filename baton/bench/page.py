"""A report as one HTML page that loads nothing: the terminal's tables, and plots as inline SVG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

from baton.bench.report import Report
from baton.bench.stats import LATENCIES
from baton.bench.terminal import show

_LOG_FROM = 5.0  # smaller spans are easier to read on an even scale
_WIDTH = 110  # of the tables, characters
_COLUMNS = 3  # plots in a row
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


# Text stays text; ids of equal plots are equal, so that the page does not change by chance.
@rc_context({"svg.fonttype": "none", "svg.hashsalt": "baton", "font.size": 8})
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
        parts += ["<h2>Sweep</h2>", _sweep(report)]
    for stage in report["stages"]:
        parts += [f"<h2>{escape(stage['label'])}</h2>", _stage(stage["servers"])]
    parts.append(f'<script type="application/json" id="report">{data}</script></body></html>')
    return "\n".join(parts)


def _sweep(report: Report) -> str:
    """Throughput against latency, a point for each value of the sweep."""
    figure, grid = _grid(len(LATENCIES))
    for axes, (name, title) in zip(grid, LATENCIES.items(), strict=True):
        for i, server in enumerate(report["servers"]):
            found = [(stage["servers"][i]["figures"], stage["value"]) for stage in report["stages"]]
            found = [(figures, value) for figures, value in found if figures[name]]
            x = [figures["output_tokens_per_s"] for figures, _ in found]
            y = [figures[name]["p95"] * 1e3 for figures, _ in found]
            axes.plot(x, y, "o-", color=f"C{i}", label=server["name"])
            for (_, value), *at in zip(found, x, y, strict=True):
                axes.annotate(f"{value:g}", at, xytext=(5, 5), textcoords="offset points")
        _finish(axes, f"Throughput and {title}, p95", "output tokens/s", "ms", log="y")
    return _svg(figure)


def _stage(servers: Sequence[dict[str, Any]]) -> str:
    """Distributions of latencies, and how they and the load went over time."""
    figure, grid = _grid(len(LATENCIES) + len(_TIMELINES))
    for axes, (name, title) in zip(grid, LATENCIES.items(), strict=False):
        for i, server in enumerate(servers):
            values = [value * 1e3 for value in server["figures"]["quantiles"][name]]
            shares = [100 * k / max(1, len(values) - 1) for k in range(len(values))]
            axes.plot(values, shares, color=f"C{i}", label=server["server"])
        _finish(axes, f"{title.capitalize()}, distribution", "ms", "% of values", log="x")
    for axes, (title, unit, names) in zip(grid[len(LATENCIES) :], _TIMELINES, strict=True):
        for i, server in enumerate(servers):
            timeline = server["timeline"]
            scale = {"ms": 1e3, "per second": 1 / timeline["width_s"], "": 1}[unit]
            for k, name in enumerate(names):
                values = [float("nan") if v is None else v * scale for v in timeline[name]]
                label = f"{server['server']} {name.removesuffix('_s').replace('_', ' ')}"
                # Of two servers each has a colour, and each of its values a style.
                color, style = (i, (".-", ".:", ".--")[k]) if len(servers) > 1 else (k, ".-")
                axes.plot(timeline["begin_s"], values, style, color=f"C{color}", label=label)
        axes.set_ylim(bottom=0)
        _finish(axes, title, "s", unit)
    return _svg(figure)


def _grid(number: int) -> tuple[Figure, list[Any]]:
    """A figure and the axes of so many plots, side by side."""
    rows = -(-number // _COLUMNS)
    figure = Figure(figsize=(5 * _COLUMNS, 3 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, _COLUMNS, i + 1) for i in range(number)]


def _finish(axes: Any, title: str, x: str, y: str, log: str = "") -> None:
    """Titles; the axis `log` is logarithmic where its values differ enough."""
    lines = axes.get_lines() if log else ()
    values = [value for line in lines for value in getattr(line, f"get_{log}data")() if value > 0]
    if values and max(values) > _LOG_FROM * min(values):
        axes.set(**{f"{log}scale": "log"})
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(color="#e3e7ee")
    axes.legend()


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.S)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
