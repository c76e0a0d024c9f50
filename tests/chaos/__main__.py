"""`python -m tests.chaos --minutes 10 [--seed N]`: rounds of chaos until the time is over.

Prints what is done to the cluster as it is done, and the stats at the end. The exit status is 0
only if the promise was kept. The same seed does the same faults to the same requests; how they
meet is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

from baton.local.supervisor import INTERRUPTED, cancel_on_signals
from tests.chaos.harness import Harness
from tests.chaos.judge import ChaosStats
from tests.chaos.load import COMPLETE, oracle_runs
from tests.chaos.versions import Versions
from tests.processes import left_behind, own_shared_memory

ROUND_S = 60.0
NEW_TOKENS = 150
COMPLETE_SHARE = 0.4  # of requests, at least: a fifth is meant to end otherwise
MOST_MISSES = 6  # of a kind of fault that never hits


def main() -> int:
    """Runs it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="(default: a new one)")
    parser.add_argument("--prefill-tp", type=int, default=1, metavar="RANKS", help="(default: 1)")
    parser.add_argument("--decode-tp", type=int, default=1, metavar="RANKS", help="(default: 1)")
    parser.add_argument(
        "--versions", action="store_true",
        help="two versions with one worker of each role, an adapter, and planners",
    )  # fmt: skip
    args = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    log(f"seed {seed}, {args.minutes:g} minutes")
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory  # of every process that is started
        shared_memory = own_shared_memory()
        versions = Versions(Path(directory)) if args.versions else None
        tp = (args.prefill_tp, args.decode_tp)
        try:
            stats = asyncio.run(run(seed, args.minutes * 60.0, tp, versions))
        except asyncio.CancelledError:
            log(f"interrupted: everything is stopped (seed {seed})")
            return INTERRUPTED
        stats.violations += left_behind(Path(directory), shared_memory)
    log(stats.render())
    if not stats.violations:
        log(f"the promise was kept (seed {seed})")
        return 0
    again = f"--minutes {args.minutes:g} --seed {seed}"
    ranks = f"--prefill-tp {args.prefill_tp} --decode-tp {args.decode_tp}"
    ranks += " --versions" if args.versions else ""
    log(f"VIOLATED {len(stats.violations)} times; again: python -m tests.chaos {again} {ranks}")
    return 1


async def run(
    seed: int, seconds: float, tp: tuple[int, int], versions: Versions | None
) -> ChaosStats:
    """Rounds of at most ROUND_S, the nth with the seed `seed + n`, on one cluster.

    SIGINT and SIGTERM cancel it, which ends all of its processes.
    """
    cancel_on_signals(log)
    log("asking the oracle…")
    ask = versions.runs if versions else oracle_runs
    runs = await asyncio.to_thread(ask, NEW_TOKENS)
    harness = Harness(log, workers=1 if versions else 2, tp=tp, versions=versions)
    stats = harness.stats
    async with harness:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 1.0:
            log(f"round with seed {seed}")
            before = len(stats.violations)
            await harness.round(runs, seed, min(ROUND_S, left_s))
            if found := stats.violations[before:]:
                log("\n".join(["VIOLATIONS:", *found, harness.logs()]))
            sent = stats.counts["requests"].total()
            log(f"{sent} requests and {len(stats.violations)} violations so far")
            seed += 1
    requests = stats.counts["requests"]
    if requests[COMPLETE] < COMPLETE_SHARE * requests.total():
        stats.violations.append(
            f"only {requests[COMPLETE]} of {requests.total()} requests completed"
        )
    done = stats.counts["faults"]
    for kind, misses in stats.counts["faults that hit nothing"].items():
        if not done[kind] and misses >= MOST_MISSES:
            stats.violations.append(f"all {misses} faults of the kind {kind} hit nothing")
    return stats


def log(line: str) -> None:
    """A line for the person at the terminal, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
