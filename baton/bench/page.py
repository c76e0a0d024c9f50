"""A report as one HTML page that loads nothing: the terminal's tables, and plots as inline SVG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from baton.bench.report import Report
from baton.bench.terminal import LATENCY_TITLES, show

_LOG_FROM = 5.0  # smaller spans are easier to read on an even scale
_WIDTH = 110  # of the tables, characters
_STYLE = """
body { max-width: 1200px; margin: 0 auto; padding: 20px; font: 15px/1.5 system-ui, sans-serif;
  color: #1d2430; background: #fff; }
pre { font: 13px/1.4 ui-monospace, monospace; overflow-x: auto; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr));
  gap: 12px; }
svg { width: 100%; height: auto; }
"""


def page_of(report: Report) -> str:
    """The page's whole text."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    show(report, console)
    tables = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    workload = {name: value for name, value in report["workload"].items() if value}
    limits = {f"slo {name}": f"{limit_s:g} s" for name, limit_s in (report["slo"] or {}).items()}
    load = " · ".join(f"{k.replace('_', ' ')} {v}" for k, v in {**workload, **limits}.items())
    data = json.dumps(report, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Baton bench, {escape(report['created'])}</title>",
            f"<style>{_STYLE}</style></head><body><h1>Load report</h1>",
            f"<p>{escape(load)} · {escape(report['created'])}</p>",
            tables,
            *_sweep(report),
            *(
                part
                for stage in report["stages"]
                for part in _stage(stage["label"], stage["servers"])
            ),
            f'<script type="application/json" id="report">{data}</script></body></html>',
        ]
    )


def _sweep(report: Report) -> Iterator[str]:
    """Throughput against latency, a point for each value of the sweep."""
    if not report["knees"]:
        return
    yield "<h2>Sweep</h2><div class='plots'>"
    for name, title in LATENCY_TITLES.items():

        def draw(axes: Axes, name: str = name) -> None:
            for i, server in enumerate(report["servers"]):
                stages = [(s["value"], s["servers"][i]["figures"]) for s in report["stages"]]
                points = [
                    (stats["output_tokens_per_s"], spread["p95"] * 1e3, value)
                    for value, stats in stages
                    if (spread := stats[name])
                ]
                x, y = [x for x, _, _ in points], [y for _, y, _ in points]
                axes.plot(x, y, marker="o", color=f"C{i}", label=server["name"])
                for at, height, value in points:
                    axes.annotate(
                        f"{value:g}", (at, height), xytext=(5, 5), textcoords="offset points"
                    )

        yield _plot(f"Throughput and {title}, p95", "output tokens/s", "ms", draw, log="y")
    yield "</div>"


def _stage(label: str, servers: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"<h2>{escape(label)}</h2><div class='plots'>"
    for name, title in LATENCY_TITLES.items():

        def draw(axes: Axes, name: str = name) -> None:
            for i, server in enumerate(servers):
                values = [value * 1e3 for value in server["figures"]["quantiles"][name]]
                shares = [100 * k / max(1, len(values) - 1) for k in range(len(values))]
                axes.plot(values, shares, color=f"C{i}", label=server["server"])

        yield _plot(f"{title.capitalize()}, distribution", "ms", "% of values", draw, log="x")
    for title, unit, names in (
        ("Time to first token over time", "ms", ("ttft_p50_s", "ttft_p95_s")),
        ("Inter-token latency over time", "ms", ("itl_p50_s", "itl_p95_s")),
        ("Output tokens", "per second", ("output_tokens",)),
        ("Requests sent, ended and failed", "per second", ("sent", "ended_ok", "failed")),
        ("Requests running", "", ("running",)),
    ):

        def draw_times(
            axes: Axes, names: Sequence[str] = names, per_s: bool = unit == "per second"
        ) -> None:
            for i, server in enumerate(servers):
                timeline = server["timeline"]
                factor = 1 / timeline["width_s"] if per_s else 1
                for k, name in enumerate(names):
                    scale = 1e3 if name.endswith("_s") else factor
                    values = [float("nan") if v is None else v * scale for v in timeline[name]]
                    label = name.removesuffix("_s").replace("_", " ")
                    # Two servers: a colour each, and a line style for each value.
                    color, style = (f"C{i}", "-:") if len(servers) > 1 else (f"C{k}", "-")
                    axes.plot(
                        timeline["begin_s"],
                        values,
                        style[min(k, len(style) - 1)],
                        color=color,
                        marker="." if len(values) < 40 else "",
                        label=f"{server['server']} {label}" if len(servers) > 1 else label,
                    )
                axes.set_ylim(bottom=0)

        yield _plot(title, "s", unit, draw_times)
    yield "</div>"


def _plot(title: str, x: str, y: str, draw: Callable[[Axes], None], log: str = "") -> str:
    """An SVG element; `log` is the axis that is logarithmic where its values differ enough."""
    # Text stays text; ids of equal plots are equal, so that the page does not change by chance.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
        draw(axes)
        lines: Any = axes.get_lines()
        if log and lines:
            values = [v for line in lines for v in getattr(line, f"get_{log}data")() if v > 0]
            if values and max(values) > _LOG_FROM * min(values):
                (axes.set_xscale if log == "x" else axes.set_yscale)("log")
        axes.grid(color="#e3e7ee")
        if lines:
            axes.legend(fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.S)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
