"""A run's report: one JSON object from which the terminal's table and the page are made.

`SCHEMA` names its form. A field that is added keeps the number; one that is renamed, removed or
changes its meaning raises it. docs/benchmarking.md describes every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import TypedDict

from baton.bench.comparison import Compared, compared
from baton.bench.figures import Figures, figures_of
from baton.bench.generator import Run
from baton.bench.knee import Knee, knee_of
from baton.bench.lag import Lag
from baton.bench.outcome import Outcome
from baton.bench.slo import Slo
from baton.bench.spread import Spread, spread_of
from baton.bench.timeline import Timeline, timeline_of
from baton.bench.workload import Workload

SCHEMA = "baton.bench.serve/1"


class ServerTold(TypedDict):
    """A server that was asked."""

    name: str  # "A", "B"
    url: str
    protocol: str  # "grpc", "openai"
    model: str


class WorkloadTold(TypedDict):
    """What was asked of each."""

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
    figures: Figures
    timeline: Timeline


class StageTold(TypedDict):
    """One load, put to each server."""

    label: str
    value: float | None  # of the sweep
    servers: list[ServerStage]
    comparison: list[Compared] | None


class GeneratorTold(TypedDict):
    """How well the generator itself kept up."""

    late_s: Spread | None
    loop_late_s: Spread | None
    cpu_share: float
    complaints: list[str]


class Report(TypedDict):
    """The whole."""

    schema: str
    created: str
    baton_version: str
    partial: bool  # ended early: figures are of what had ended by then
    workload: WorkloadTold
    slo: dict[str, float] | None
    servers: list[ServerTold]
    stages: list[StageTold]
    knees: dict[str, Knee | None] | None  # of a sweep, by server
    generator: GeneratorTold


@dataclass
class Stage:
    """The runs of one load: for each block, one run for each server, in the servers' order."""

    workload: Workload
    value: float | None = None
    blocks: list[list[Run]] = field(default_factory=list)

    def told(self, servers: Sequence[ServerTold], slo: Slo | None) -> StageTold:
        """Its part of the report."""
        stages = [
            _server_stage(
                server["name"], [block[i] for block in self.blocks if i < len(block)], slo
            )
            for i, server in enumerate(servers)
        ]
        comparison = None
        if len(servers) == 2:
            pairs = [
                (_figures([block[0]], slo), _figures([block[1]], slo))
                for block in self.blocks
                if len(block) == 2
            ]
            comparison = compared(stages[0]["figures"], stages[1]["figures"], pairs)
        return StageTold(
            label=self.workload.label, value=self.value, servers=stages, comparison=comparison
        )


def report_of(
    workload: WorkloadTold,
    servers: Sequence[ServerTold],
    stages: Sequence[Stage],
    slo: Slo | None,
    partial: bool,
) -> Report:
    """The report of stages that have at least begun."""
    told = [stage.told(servers, slo) for stage in stages]
    lag = Lag()
    for run in (run for stage in stages for block in stage.blocks for run in block):
        lag.add(run.lag)
    return Report(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        baton_version=_version(),
        partial=partial,
        workload=workload,
        slo=dict(slo.limits_s) if slo else None,
        servers=list(servers),
        stages=told,
        knees=_knees(told, servers),
        generator=GeneratorTold(
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


def _server_stage(name: str, runs: Sequence[Run], slo: Slo | None) -> ServerStage:
    return ServerStage(
        server=name,
        blocks=len(runs),
        figures=_figures(runs, slo),
        timeline=timeline_of(stitched(runs)),
    )


def _figures(runs: Sequence[Run], slo: Slo | None) -> Figures:
    outcomes = (outcome for run in runs for outcome in run.outcomes)
    return figures_of(outcomes, sum(run.seconds for run in runs), slo)


def _knees(
    stages: Sequence[StageTold], servers: Sequence[ServerTold]
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
