"""Goodput of mixed workers, whose router decides where each part of a request runs, beside fixed
arrangements of the same two devices, simulated on a virtual clock.

Cells are prompts (short, long) x load (light, heavy) x TPOT target (tight, loose). A request counts
if it meets both targets. Arrangements: one prefill and one decode worker; two replicas, each with
every other request; two mixed workers; and one engine on both devices, ideally twice as fast, which
also computes one prompt on both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.bench.request import Demand
from baton.bench.workload import Lengths, Workload
from baton.config import RouterLimits, SimulatedSpeed
from baton.config.slo import Slo
from baton.simulator.simulation import Simulation
from baton.simulator.worker import WorkerSpec
from baton.tables import table

DEVICE = WorkerSpec(
    SimulatedSpeed.parse("8000,10,0.5"), num_blocks=8192, token_bytes=40_000, chunk_s=0.03
)
BOTH = replace(DEVICE, speed=SimulatedSpeed.parse("16000,5,0.25"), num_blocks=16384, max_batch=128)
# Tokens of prompts and of outputs, requests a second by load, TTFT target in seconds.
PROMPTS = {
    "short": (256, 96, {"light": 4.0, "heavy": 14.0}, 0.5),
    "long": (4096, 96, {"light": 0.5, "heavy": 1.6}, 3.0),
}
TPOT_S = {"tight": 0.025, "loose": 0.060}


def goodput(spec: WorkerSpec, roles: dict[str, int], demands: list[Demand], slo: str) -> Any:
    """(share of requests that met the targets, TTFT p50 in seconds, share handed over)."""
    limits = RouterLimits(slos=(slo,))
    stats = Simulation(spec, roles, limits).run(demands).stats(Slo.parse(slo))
    met = stats["goodput"]["share"] * stats["requests"]["ok"] / len(demands)
    return met, stats["ttft_s"]["p50"], stats["handed_over_share"]


def cell(prompts: str, load: str, target: str, count: int, seeds: int) -> dict[str, Any]:
    """One cell of the sweep, the mean over several seeds' loads."""
    rows = [_measured(prompts, load, target, count, seed) for seed in range(seeds)]
    found = {
        name: statistics.mean(row[name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }
    of = [row["mixed"] / max(row["1P1D"], row["replicas"], 1e-9) for row in rows]
    two = max(found["1P1D"], found["replicas"], 1e-9)
    best = max(two, found["one engine"])
    ratios = {
        "of the best of two devices": found["mixed"] / two,
        "least, most": f"{min(of):.3f}, {max(of):.3f}", "of the best": found["mixed"] / best,
    }  # fmt: skip
    return {"prompts": prompts, "load": load, "tpot": target, **found, **ratios}


def _measured(prompts: str, load: str, target: str, count: int, seed: int) -> dict[str, float]:
    prompt, output, rates, ttft_s = PROMPTS[prompts]
    slo = f"ttft={ttft_s},tpot={TPOT_S[target]}"
    demands = list(
        Workload(
            rate=rates[load],
            count=count,
            seed=seed,
            prompt_lengths=Lengths(prompt // 2, prompt * 3 // 2),
            output_lengths=Lengths(output // 2, output * 3 // 2),
        ).demands()
    )
    pair = goodput(DEVICE, {"prefill": 1, "decode": 1}, demands, slo)
    one = goodput(BOTH, {"mixed": 1}, demands, slo)
    halves = [goodput(DEVICE, {"mixed": 1}, demands[at::2], slo) for at in (0, 1)]
    replicas = sum(half[0] for half in halves) / 2
    mixed = goodput(DEVICE, {"mixed": 2}, demands, slo)
    return {
        "1P1D": pair[0], "replicas": replicas, "one engine": one[0], "mixed": mixed[0],
        "handed over": mixed[2], "TTFT s: 1P1D": pair[1],
        "replicas ": sum(half[1] for half in halves) / 2, "one engine ": one[1], "mixed ": mixed[1],
    }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=300, help="of each cell (default: 300)")
    add("--seeds", type=int, default=1, help="loads of each cell (default: 1)")
    add("--json", type=Path, help="file for the table")


def main(args: argparse.Namespace) -> None:
    rows = []
    for names in itertools.product(PROMPTS, ("light", "heavy"), TPOT_S):
        print("simulating", *names, file=sys.stderr, flush=True)
        row = cell(*names, args.requests, args.seeds)
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    print("\n".join(table({name: name for name in rows[0]}, rows)))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
