"""A run's report: one JSON object, of which the terminal shows tables.

`SCHEMA` is its version, which is raised when a field is renamed, removed or changes its meaning.
docs/benchmarking.md describes every field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from baton.bench.generator import Run
from baton.bench.stats import Stats, limits_of, percentile, spread_of, stats_of
from baton.bench.workload import Workload
from baton.config.slo import Slo

SCHEMA = "baton.bench.serve/3"
Report = dict[str, Any]

_GOOD_SHARE = 0.9
_MOST_REASON = 300  # characters
_LATE_MS, _BUSY = 10.0, 0.85  # of the generator: above these, results are doubtful


@dataclass
class Stage:
    """The run of one workload."""

    workload: Workload
    value: float | None = None  # of the sweep
    run: Run = field(default_factory=Run)

    def report(self, slo: Slo | None) -> dict[str, Any]:
        return {
            "label": self.workload.label,
            "value": self.value,
            "figures": stats_of(self.run.outcomes, self.run.seconds, slo),
        }


def report_of(
    workload: dict[str, Any],
    server: dict[str, str],
    stages: Sequence[Stage],
    slo: Slo | None,
    partial: bool,
    interference: Stats | None = None,
    further: Iterable[Run] = (),
) -> Report:
    """The report of the stages that have started; `further`: runs outside stages."""
    reports = [stage.report(slo) for stage in stages]
    ended = reports[:-1] if partial else reports  # an interrupted stage is no evidence of a knee
    swept = [(stage["value"], stage["figures"]) for stage in ended if stage["value"] is not None]
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "baton_version": metadata.version("baton-serving"),
        "partial": partial,
        "workload": workload,
        "slo": limits_of(slo) if slo else None,
        "server": server,
        "stages": reports,
        "interference": interference,
        "knee": knee_of(swept),
        "generator": generator_stats([*(stage.run for stage in stages), *further]),
    }


def failures_of(report: Report) -> str:
    """Number and causes of failed requests in one line; empty if none failed.

    Requests cancelled at the end of a run do not count.
    """
    parts = [stage["figures"] for stage in report["stages"]]
    if found := report["interference"]:
        parts += [found["alone"], found["beside"], found["prompts"]]
    errors = [error for part in parts for error in part["errors"]]
    if not errors:
        return ""
    number = sum(error["count"] for error in errors)
    reasons = {f"{error['status']}: {error['message'][:_MOST_REASON]}": None for error in errors}
    return f"{number} requests failed: {'; '.join(reasons)}"


def generator_stats(runs: Sequence[Run]) -> dict[str, Any]:
    """The generator's lateness and load, and why it may have been the bottleneck."""
    late_s = [outcome.sent_s - outcome.at_s for run in runs for outcome in run.outcomes]
    loop_late_s = [late for run in runs for late in run.loop_late_s]
    cpu_share = sum(run.cpu_s for run in runs) / (sum(run.seconds for run in runs) or 1.0)
    complaints = []
    if (late_ms := percentile(late_s, 99) * 1e3) > _LATE_MS:
        complaints.append(f"requests were sent late (p99 {late_ms:.1f} ms)")
    if (loop_ms := percentile(loop_late_s, 99) * 1e3) > _LATE_MS:
        complaints.append(f"its event loop was late (p99 {loop_ms:.1f} ms)")
    if cpu_share > _BUSY:
        complaints.append(f"it kept a core busy ({cpu_share:.0%})")
    return {
        "late_s": spread_of(late_s),
        "loop_late_s": spread_of(loop_late_s),
        "cpu_share": cpu_share,
        "complaints": complaints,
    }


def knee_of(stages: Sequence[tuple[float, Stats]]) -> float | None:
    """The last stage of a sweep before goodput drops below 90 %; None if there is none."""
    values = [value for value, _ in sorted(stages, key=lambda stage: stage[0])]
    good = {value for value, s in stages if s["goodput"] and s["goodput"]["share"] >= _GOOD_SHARE}
    first_bad = next((place for place, value in enumerate(values) if value not in good), 0)
    return values[first_bad - 1] if first_bad else None
