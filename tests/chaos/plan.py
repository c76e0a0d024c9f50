"""What goes wrong and when: a list of faults over time that a seed decides. Knows no process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "drain", "cut", "hole", "slow", "sluggish", "kv", "etcd"]

# How often each kind happens, relative to the others.
WEIGHTS: Mapping[Kind, int] = {
    "kill": 4,
    "stop": 4,
    "drain": 2,
    "cut": 4,
    "hole": 3,
    "slow": 2,
    "sluggish": 2,
    "kv": 4,
    "etcd": 1,
}
# Seconds that a fault lasts; the others are over at once.
LASTING: Mapping[Kind, tuple[float, float]] = {
    "stop": (0.3, 5.0),
    "hole": (0.3, 5.0),
    "slow": (1.0, 4.0),
    "sluggish": (1.0, 4.0),
    "kv": (1.0, 4.0),
    "etcd": (1.0, 5.0),
}
KV_FAULTS = ("corrupt", "lose", "fail", "delay")
ROUTER_KINDS: tuple[Kind, ...] = ("kill", "stop", "drain")
# Of the faults that may hit a router or a worker, this share hits a router.
ROUTER_SHARE = 0.25


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `target` (a process's name; "etcd"; for "kv" how bytes suffer) at `at_s`.

    Of a connection that is cut, held or slowed, `other` is the end that opened it: a process's
    name, or empty for everybody's connections. `even_the_last` says that the fault may also hit the
    only healthy worker of a role.
    """

    at_s: float
    kind: Kind
    target: str
    duration_s: float = 0.0
    other: str = ""
    even_the_last: bool = False

    def __str__(self) -> str:
        lasting = f" for {self.duration_s:.1f} s" if self.duration_s else ""
        other = f" from {self.other}" if self.other else ""
        return f"{self.at_s:6.1f} s  {self.kind} {self.target}{other}{lasting}"


def plan(
    seed: int, seconds: float, processes: Mapping[str, str], mean_pause_s: float = 2.0
) -> Iterator[Fault]:
    """The faults of one run, in order; `processes` are roles by name.

    The same seed gives the same plan. Pauses between faults are exponential.
    """
    dice = random.Random(seed)
    at_s = dice.uniform(0.2, 1.0)
    while at_s < seconds:
        yield _fault(dice, at_s, processes)
        at_s += dice.expovariate(1 / mean_pause_s)


def _fault(dice: random.Random, at_s: float, processes: Mapping[str, str]) -> Fault:
    kind = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    duration_s = dice.uniform(*LASTING[kind]) if kind in LASTING else 0.0
    even_the_last = dice.random() < 0.1
    routers = sorted(name for name, role in processes.items() if role == "router")
    workers = sorted(name for name, role in processes.items() if role != "router")
    if kind == "etcd":
        return Fault(at_s, kind, "etcd", duration_s)
    if kind == "kv":
        return Fault(at_s, kind, dice.choice(KV_FAULTS), duration_s)
    hits_router = kind in ROUTER_KINDS and dice.random() < ROUTER_SHARE
    target = dice.choice(routers if hits_router else workers)
    if kind not in ("cut", "hole", "slow"):
        return Fault(at_s, kind, target, duration_s, even_the_last=even_the_last)
    callers = list(routers)
    if processes[target] == "decode":
        callers += [name for name in workers if processes[name] == "prefill"]
    other = dice.choice([*callers, ""])
    return Fault(at_s, kind, target, duration_s, other, even_the_last)
