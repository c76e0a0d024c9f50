"""A report as one HTML page that loads nothing: the terminal's tables, and plots as inline SVG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from matplotlib import rc_context
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
        parts += ["<h2>Sweep</h2><div class='plots'>", *_sweep(report), "</div>"]
    for stage in report["stages"]:
        plots = _stage(stage["servers"])
        parts += [f"<h2>{escape(stage['label'])}</h2><div class='plots'>", *plots, "</div>"]
    parts.append(f'<script type="application/json" id="report">{data}</script></body></html>')
    return "\n".join(parts)


def _sweep(report: Report) -> Iterator[str]:
    """Throughput against latency, a point for each value of the sweep."""
    for name, title in LATENCY_TITLES.items():
        plot = _Plot(f"Throughput and {title}, p95", "output tokens/s", "ms")
        for i, server in enumerate(report["servers"]):
            points = [
                (figures["output_tokens_per_s"], figures[name]["p95"] * 1e3, stage["value"])
                for stage in report["stages"]
                if (figures := stage["servers"][i]["figures"])[name]
            ]
            x, y = [x for x, _, _ in points], [y for _, y, _ in points]
            plot.axes.plot(x, y, marker="o", color=f"C{i}", label=server["name"])
            for at, height, value in points:
                plot.axes.annotate(
                    f"{value:g}", (at, height), xytext=(5, 5), textcoords="offset points"
                )
        yield plot.svg(log="y")


def _stage(servers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Distributions of latencies, and how they and the load went over time."""
    for name, title in LATENCY_TITLES.items():
        plot = _Plot(f"{title.capitalize()}, distribution", "ms", "% of values")
        for i, server in enumerate(servers):
            values = [value * 1e3 for value in server["figures"]["quantiles"][name]]
            shares = [100 * k / max(1, len(values) - 1) for k in range(len(values))]
            plot.axes.plot(values, shares, color=f"C{i}", label=server["server"])
        yield plot.svg(log="x")
    for title, unit, names in (
        ("Time to first token over time", "ms", ("ttft_p50_s", "ttft_p95_s")),
        ("Inter-token latency over time", "ms", ("itl_p50_s", "itl_p95_s")),
        ("Output tokens", "per second", ("output_tokens",)),
        ("Requests sent, ended and failed", "per second", ("sent", "ended_ok", "failed")),
        ("Requests running", "", ("running",)),
    ):
        plot = _Plot(title, "s", unit)
        for i, server in enumerate(servers):
            timeline = server["timeline"]
            scale = {"ms": 1e3, "per second": 1 / timeline["width_s"], "": 1}[unit]
            for k, name in enumerate(names):
                values = [float("nan") if v is None else v * scale for v in timeline[name]]
                label = name.removesuffix("_s").replace("_", " ")
                color, style = f"C{k}", "-"
                if len(servers) > 1:  # a colour each, and a line style for each value
                    label = f"{server['server']} {label}"
                    color, style = f"C{i}", "-" if k == 0 else ":"
                marker = "." if len(values) < 40 else ""
                plot.axes.plot(
                    timeline["begin_s"], values, style, color=color, marker=marker, label=label
                )
        plot.axes.set_ylim(bottom=0)
        yield plot.svg()


class _Plot:
    def __init__(self, title: str, x: str, y: str) -> None:
        # Text stays text; ids of equal plots are equal, so that the page does not change by chance.
        self._settings: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}
        with rc_context(self._settings):
            self._figure = Figure(figsize=(5.6, 3.0), layout="constrained")
            self.axes = self._figure.add_subplot(title=title, xlabel=x, ylabel=y)

    def svg(self, log: str = "") -> str:
        """An SVG element; the axis `log` is logarithmic where its values differ enough."""
        lines: Any = self.axes.get_lines()
        values = [v for line in lines if log for v in getattr(line, f"get_{log}data")() if v > 0]
        if values and max(values) > _LOG_FROM * min(values):
            self.axes.set(**{f"{log}scale": "log"})
        self.axes.grid(color="#e3e7ee")
        out = io.StringIO()
        with rc_context(self._settings):
            if lines:
                self.axes.legend(fontsize=8)
            self._figure.savefig(out, format="svg", metadata={"Date": None})
        svg = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.S)
        return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
