"""`python -m tests.chaos --minutes 10 [--seed N]`: rounds of chaos until the time is over.

Prints what is done to the cluster as it is done, and the tally at the end. The exit status is 0
only if the promise was kept. The same seed does the same faults to the same requests; how they
meet is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from collections import Counter
from dataclasses import fields

from tests.chaos.arena import Arena, ArenaConfig, logs
from tests.chaos.tally import Tally
from tests.chaos.wishes import oracle_runs

ROUND_S = 60.0
NEW_TOKENS = 150


def main() -> int:
    """Runs it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="(default: a new one)")
    parser.add_argument("--routers", type=int, default=ArenaConfig.routers)
    parser.add_argument("--transport", default=ArenaConfig.transport)
    parser.add_argument("--callers", type=int, default=ArenaConfig.callers)
    args = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    config = ArenaConfig(routers=args.routers, transport=args.transport, callers=args.callers)
    say(f"seed {seed}, {args.minutes:g} minutes")
    tally = asyncio.run(run(config, seed, args.minutes * 60.0))
    say(tally.render())
    if not tally.violations:
        say(f"the promise was kept (seed {seed})")
        return 0
    again = f"make chaos MINUTES={args.minutes:g} SEED={seed}"
    say(f"VIOLATED {len(tally.violations)} times; once more with: {again}")
    return 1


async def run(config: ArenaConfig, seed: int, seconds: float) -> Tally:
    """Rounds of at most ROUND_S, the nth with the seed `seed + n`, on one cluster."""
    say("asking the oracle…")
    runs = await asyncio.to_thread(oracle_runs, NEW_TOKENS)
    total = Tally()
    arena = Arena(config, say)
    async with arena:
        await arena.warm_up(runs)
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 1.0:
            say(f"round with seed {seed}")
            tally = await arena.round(runs, seed, min(ROUND_S, left_s))
            add(total, tally)
            for violation in tally.violations:
                say(f"VIOLATION: {violation}")
            if tally.violations:
                say(logs(arena))
            say(f"{tally.requests} requests, {tally.faults.total()} faults, "
                f"{len(tally.violations)} violations")  # fmt: skip
            seed += 1
    total.violations += arena.left_behind()
    if not total.endings["complete"]:
        total.violations.append("no request completed: nothing was tried")
    return total


def add(total: Tally, one: Tally) -> None:
    """Adds the counts of one round."""
    for field in fields(Tally):
        ours, theirs = getattr(total, field.name), getattr(one, field.name)
        if isinstance(ours, (Counter, list)):
            ours += theirs
        else:
            largest = field.name.startswith("largest")
            setattr(total, field.name, max(ours, theirs) if largest else ours + theirs)


def say(line: str) -> None:
    """A line for the person at the terminal, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
