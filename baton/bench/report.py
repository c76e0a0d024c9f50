"""A run's report: one JSON object from which the terminal's tables and the page are made.

`SCHEMA` names its form. A field that is added keeps the number; one that is renamed, removed or
changes its meaning raises it. docs/benchmarking.md describes every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import TypedDict

from baton.bench.comparison import Compared, Knee, compared, knee_of
from baton.bench.generator import Lag, Run
from baton.bench.interference import InterferenceStats
from baton.bench.request import Outcome
from baton.bench.stats import Spread, Stats, limits_of, spread_of, stats_of
from baton.bench.timeline import Timeline, timeline_of
from baton.bench.workload import Workload
from baton.slo import Slo

SCHEMA = "baton.bench.serve/1"


class ServerInfo(TypedDict):
    """A server under load."""

    name: str  # "A", "B"
    url: str
    protocol: str  # "grpc", "openai"
    model: str


class WorkloadInfo(TypedDict):
    """What was sent to each; None where it does not apply."""

    rate: float | None
    sweep: list[float]
    concurrency: int | None
    arrivals: str | None
    burstiness: float | None
    count: int | None
    duration_s: float | None
    prompt_tokens: str | None
    output_tokens: str | None
    shared_prefix: int
    prefixes: int
    trace: str | None
    rate_scale: float | None
    length_scale: float | None
    seed: int
    prompt_form: str
    ignore_eos: bool
    timeout_s: float


class ServerStage(TypedDict):
    """What one server did in one stage."""

    server: str  # its name
    blocks: int
    figures: Stats
    timeline: Timeline


class StageReport(TypedDict):
    """One load, sent to each server."""

    label: str
    value: float | None  # of the sweep
    servers: list[ServerStage]
    comparison: list[Compared] | None


class InterferenceReport(TypedDict):
    """The interference workload on one server."""

    server: str
    rounds: list[InterferenceStats]


class GeneratorStats(TypedDict):
    """How well the generator itself kept time."""

    late_s: Spread | None
    loop_late_s: Spread | None
    cpu_share: float
    complaints: list[str]


class Report(TypedDict):
    """The whole."""

    schema: str
    created: str
    baton_version: str
    partial: bool  # ended early: results are of what had ended by then
    workload: WorkloadInfo
    slo: dict[str, float] | None
    servers: list[ServerInfo]
    stages: list[StageReport]
    interference: list[InterferenceReport] | None
    knees: dict[str, Knee | None] | None  # of a sweep, by server
    generator: GeneratorStats


@dataclass
class Stage:
    """The runs of one load: for each block, one run for each server, in the servers' order."""

    workload: Workload
    value: float | None = None
    blocks: list[list[Run]] = field(default_factory=list)

    def runs_of(self, server: int) -> list[Run]:
        return [block[server] for block in self.blocks if server < len(block)]

    def report(self, servers: Sequence[ServerInfo], slo: Slo | None) -> StageReport:
        of_servers = []
        for i, server in enumerate(servers):
            runs = self.runs_of(i)
            of_servers.append(
                ServerStage(
                    server=server["name"],
                    blocks=len(runs),
                    figures=_stats(runs, slo),
                    timeline=timeline_of(stitched(runs)),
                )
            )
        comparison = None
        if len(servers) == 2:
            first, second = (stage["figures"] for stage in of_servers)
            pairs = [
                (_stats([block[0]], slo), _stats([block[1]], slo))
                for block in self.blocks
                if len(block) == 2
            ]
            comparison = compared(first, second, pairs)
        return StageReport(
            label=self.workload.label, value=self.value, servers=of_servers, comparison=comparison
        )


def report_of(
    workload: WorkloadInfo,
    servers: Sequence[ServerInfo],
    stages: Sequence[Stage],
    slo: Slo | None,
    partial: bool,
    interference: list[InterferenceReport] | None = None,
    lag: Lag | None = None,
) -> Report:
    """The report of stages that have at least begun; `lag` is that of runs in no stage."""
    reports = [stage.report(servers, slo) for stage in stages]
    lag = lag or Lag()
    for run in (run for stage in stages for block in stage.blocks for run in block):
        lag.add(run.lag)
    return Report(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        baton_version=_version(),
        partial=partial,
        workload=workload,
        slo=limits_of(slo) if slo else None,
        servers=list(servers),
        stages=reports,
        interference=interference,
        knees=_knees(reports, servers),
        generator=GeneratorStats(
            late_s=spread_of(lag.late_s),
            loop_late_s=spread_of(lag.loop_late_s),
            cpu_share=lag.cpu_share,
            complaints=lag.complaints(),
        ),
    )


def stitched(runs: Sequence[Run]) -> list[Outcome]:
    """Outcomes of consecutive runs on one clock: each run begins where the one before ended."""
    outcomes: list[Outcome] = []
    offset_s = 0.0
    for run in runs:
        outcomes += [
            replace(o, at_s=o.at_s + offset_s, sent_s=o.sent_s + offset_s) for o in run.outcomes
        ]
        offset_s += run.seconds
    return outcomes


def _stats(runs: Sequence[Run], slo: Slo | None) -> Stats:
    outcomes = (outcome for run in runs for outcome in run.outcomes)
    return stats_of(outcomes, sum(run.seconds for run in runs), slo)


def _knees(
    stages: Sequence[StageReport], servers: Sequence[ServerInfo]
) -> dict[str, Knee | None] | None:
    if not any(stage["value"] is not None for stage in stages):
        return None
    return {
        server["name"]: knee_of(
            [(stage["value"] or 0.0, stage["servers"][i]["figures"]) for stage in stages]
        )
        for i, server in enumerate(servers)
    }


def _version() -> str:
    try:
        return metadata.version("baton-serving")
    except metadata.PackageNotFoundError:
        return "unknown"
