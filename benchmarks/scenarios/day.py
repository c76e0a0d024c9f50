"""Goodput by hour of a day's load, simulated on a virtual clock: fixed numbers of prefill and
decode workers, the same workers with the planner's changes of roles, and mixed workers.

The requests are a trace's in order, their times and lengths follow the day: at hour 14 most arrive,
with the trace's lengths; at hour 2 fewest (`--night-rate`), with shorter prompts and longer outputs
(`--night-lengths`), as of jobs that run at night. A day takes `--day` seconds of virtual time, in
which the planner decides as it does in as many real ones. Routers refuse requests that would miss
the TTFT target: these count as sent.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.bench import trace_workload
from baton.bench.request import Demand
from baton.bench.trace_workload import Scale
from baton.config import RouterLimits, SimulatedSpeed
from baton.config.slo import Slo
from baton.errors import ConfigError
from baton.simulator.advise import coarse
from baton.simulator.planned import PlannedRoles
from baton.simulator.router import SimulatedRequest
from baton.simulator.settings import parse_roles
from baton.simulator.simulation import Simulation
from baton.simulator.worker import WorkerSpec
from baton.tables import table

HOURS, PEAK_HOUR = 24, 14.0
ARRANGEMENTS = ("prefill=3,decode=3", "prefill=4,decode=2", "prefill=2,decode=4", "mixed=6")
_STEPS = 24 * 60  # of the day's curve


def daylight(hour: float) -> float:
    """1 at the day's peak, 0 twelve hours later."""
    return (1 + math.cos((hour - PEAK_HOUR) / HOURS * 2 * math.pi)) / 2


def arrivals(count: int, night_rate: float) -> Iterator[float]:
    """The hours at which requests arrive, at a rate between `night_rate` and 1."""
    step = HOURS / _STEPS
    rates = [night_rate + (1 - night_rate) * daylight(i * step) for i in range(_STEPS)]
    each, due = sum(rates) / count, 0.0
    for i, rate in enumerate(rates):
        while due < rate:
            yield (i + due / rate) * step
            due += each
        due -= rate


def demands(args: argparse.Namespace) -> list[Demand]:
    """The day's requests, in order of time. Raises ConfigError for an unusable trace."""
    scale = Scale(length=args.length_scale, max_prompt=args.max_prompt)
    found = trace_workload.demands(args.trace, scale)[: args.requests]
    day = []
    for one, hour in zip(found, arrivals(len(found), args.night_rate), strict=False):
        factor = args.night_lengths ** (1 - daylight(hour))
        prompt = max(1, round(one.prompt_tokens / factor))
        at_s, outputs = hour / HOURS * args.day, max(1, round(one.new_tokens * factor))
        day.append(replace(one, at_s=at_s, parts=_first(one.parts, prompt), new_tokens=outputs))
    return day


def _first(parts: Sequence[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """The parts of a prompt that is cut to `tokens`."""
    taken = []
    for seed, length in parts:
        if tokens > 0:
            taken.append((seed, min(length, tokens)))
        tokens -= length
    return tuple(taken)


def by_hour(requests: Sequence[SimulatedRequest], slo: Slo, day_s: float) -> list[float]:
    """The share of each hour's requests that met the SLO."""
    met, sent = [0] * HOURS, [0] * HOURS
    for one in requests:
        hour = min(HOURS - 1, int(one.arrived_at / day_s * HOURS))
        sent[hour] += 1
        times = one.ttft_s, one.tpot_s or 0.0, one.last_at - one.arrived_at
        met[hour] += not one.refused and slo.met(*times)
    return [good / max(1, count) for good, count in zip(met, sent, strict=True)]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="Mooncake JSONL or Azure CSV trace")
    add("--requests", type=int, default=6000, help="of the trace, at most (default: 6000)")
    add("--length-scale", type=float, default=0.25, help="factor for lengths (default: 0.25)")
    add("--max-prompt", type=int, default=8192, help="tokens (default: 8192)")
    add("--day", type=float, default=600.0, help="seconds of virtual time (default: 600)")
    add("--night-rate", type=float, default=0.8, help="of the day's most (default: 0.8)")
    add("--night-lengths", type=float, default=6.0,
        help="factor for outputs, and divisor for prompts, at night (default: 6)")  # fmt: skip
    add("--arrangement", action="append", metavar="ROLES",
        help=f"fixed numbers of workers; with the first one the planner begins "
        f"(default: {' '.join(ARRANGEMENTS)})")  # fmt: skip
    add("--simulate", default="8000,10,0.5", help="a worker's speed (default: 8000,10,0.5)")
    add("--slo", default="ttft=1,tpot=0.03", help="default: ttft=1,tpot=0.03")
    add("--json", type=Path, help="file for the table and the planner's changes")


def main(args: argparse.Namespace) -> None:
    try:
        load, slo = demands(args), Slo.parse(args.slo)
        roles = [parse_roles(text) for text in args.arrangement or ARRANGEMENTS]
        speed = SimulatedSpeed.parse(args.simulate)
    except ConfigError as error:
        sys.exit(str(error))
    spec = WorkerSpec(speed, num_blocks=8192, token_bytes=40_000, chunk_s=0.03)
    spec = coarse(spec, sum(one.prompt_tokens for one in load) / len(load))
    limits = RouterLimits(slos=(args.slo,), ttft_target_s=slo.ttft_s)
    planner = PlannedRoles(slo)
    columns: dict[str, list[float]] = {}
    for one, follow in [(roles[0], planner), *((one, None) for one in roles)]:
        name = "planner" if follow else " + ".join(f"{n} {role}" for role, n in one.items())
        print("simulating", name, file=sys.stderr, flush=True)
        simulation = Simulation(spec, one, limits)
        requests = simulation.run(load, follow=follow).requests
        columns[name] = by_hour(requests, slo, args.day)
    rows: list[dict[str, Any]] = []
    for hour in range(HOURS):
        sent = sum(int(one.at_s / args.day * HOURS) == hour for one in load)
        changes = sum(int(one.at_s / args.day * HOURS) == hour for one in planner.changes)
        shares = {name: round(values[hour], 3) for name, values in columns.items()}
        rows.append({"hour": hour, "requests": sent, **shares, "changes of roles": changes})
    day = {name: _of_day(rows, name) for name in columns}
    rows.append(
        {"hour": "day", "requests": len(load), **day, "changes of roles": len(planner.changes)}
    )
    print("\n".join(table({name: name for name in rows[0]}, rows)))
    if args.json:
        changed = [vars(change) for change in planner.changes]
        args.json.write_text(json.dumps({"hours": rows, "changes": changed}, indent=1))


def _of_day(rows: Sequence[dict[str, Any]], name: str) -> float:
    good = sum(row[name] * row["requests"] for row in rows)
    return round(float(good / max(1, sum(row["requests"] for row in rows))), 3)
