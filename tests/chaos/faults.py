"""Faults: a plan of them over time, decided by a seed, and their injection into a running cluster.

From outside of its processes: signals, connections through proxies, KV bytes through the control
file of `tests.chaos.kv_faults`, etcd through its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.local.cluster import LocalCluster, router_serving, workers_ready
from tests.chaos.proxy import Proxy

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
    """`kind` happens to `target` (a process's name; "etcd"; a fault of KV transfers) at `at_s`.

    Of a connection that is cut, held or slowed, `other` is the end that opened it: a process's
    name, or empty for all connections. `may_hit_last` says that the fault may also hit the
    only healthy worker of a role.
    """

    at_s: float
    kind: Kind
    target: str
    duration_s: float = 0.0
    other: str = ""
    may_hit_last: bool = False

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
    may_hit_last = dice.random() < 0.1
    routers = sorted(name for name, role in processes.items() if role == "router")
    workers = sorted(name for name, role in processes.items() if role != "router")
    if kind == "etcd":
        return Fault(at_s, kind, "etcd", duration_s)
    if kind == "kv":
        return Fault(at_s, kind, dice.choice(KV_FAULTS), duration_s)
    hits_router = kind in ROUTER_KINDS and dice.random() < ROUTER_SHARE
    target = dice.choice(routers if hits_router else workers)
    if kind not in ("cut", "hole", "slow"):
        return Fault(at_s, kind, target, duration_s, may_hit_last=may_hit_last)
    callers = list(routers)
    if processes[target] == "decode":
        callers += [name for name in workers if processes[name] == "prefill"]
    other = dice.choice([*callers, ""])
    return Fault(at_s, kind, target, duration_s, other, may_hit_last)


BACK_S = 60.0  # at most, until a process that was killed serves again
RECOVERED_S = 1.5  # after a fault was taken back, until others are expected to have seen it
SLOW_BYTES_PER_S = 200_000.0
DUTY_S = (0.15, 0.05)  # a sluggish process is stopped, then runs, for so long
KV_SHARE = 0.5
KV_DELAY_S = 0.4


@dataclass
class Outage:
    """One process that does not serve as it should; `until_s` None: still. The loop's clock."""

    name: str
    kind: str
    from_s: float
    until_s: float | None = None

    def overlaps(self, from_s: float, until_s: float) -> bool:
        """Whether it was down at some time between the two."""
        return self.from_s <= until_s and (self.until_s is None or self.until_s >= from_s)


class Injector:
    """`done` counts faults by kind, `skipped` those whose target could not be hit.

    `router_address` gives the address of a router by name.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        proxies: Mapping[str, Proxy],
        kv_control: Path,
        router_address: Callable[[str], str],
        log: Callable[[str], None],
    ) -> None:
        self.done: Counter[str] = Counter()
        self.skipped = 0
        self.outages: list[Outage] = []
        self._cluster = cluster
        self._proxies = proxies
        self._kv_control = kv_control
        self._router_address = router_address
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()

    async def run(self, faults: Iterable[Fault]) -> None:
        """Does each fault at its time, counted from now; returns when the last one is over."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        for fault in faults:
            await asyncio.sleep(max(0.0, began_s + fault.at_s - clock()))
            task = asyncio.create_task(self._do(fault), name=str(fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def role_down(self, from_s: float, until_s: float) -> bool:
        """Whether at some moment between the two all workers of a role were down at once."""
        return any(self._role_down(role, from_s, until_s) for role in ("prefill", "decode"))

    def any_router_down(self, from_s: float, until_s: float, every: bool = False) -> bool:
        """Whether a router, or `every` one at once, was killed, stopped or drained between."""
        if every:
            return self._role_down("router", from_s, until_s)
        return any(
            one.overlaps(from_s, until_s) and self._role(one.name) == "router"
            for one in self.outages
        )

    def router_down(self, name: str, from_s: float, until_s: float, killed: bool = False) -> bool:
        """Whether this router was down between the two, or was `killed` then."""
        return any(
            one.name == name
            and one.overlaps(from_s, until_s)
            and (not killed or one.kind == "kill")
            for one in self.outages
        )

    def killed(self, from_s: float, until_s: float) -> bool:
        """Whether a process lost its memory, with the spans in it, between the two."""
        return any(one.kind == "kill" and from_s <= one.from_s <= until_s for one in self.outages)

    async def _do(self, fault: Fault) -> None:
        key = fault.kind if fault.kind in ("kv", "etcd") else fault.target
        if key in self._busy or self._spared(fault):
            self.skipped += 1
            self._log(f"{fault}  (skipped)")
            return
        self._log(str(fault))
        self.done[fault.kind] += 1
        self._busy.add(key)
        try:
            await getattr(self, f"_{fault.kind}")(fault)
        finally:
            self._busy.discard(key)

    async def _kill(self, fault: Fault) -> None:
        with self._outage(fault):
            self._cluster.kill(fault.target)
            await self._back(fault.target)

    async def _drain(self, fault: Fault) -> None:
        with self._outage(fault):
            self._cluster.kill(fault.target, signal.SIGTERM)
            await self._back(fault.target)

    async def _stop(self, fault: Fault) -> None:
        with self._outage(fault):
            self._cluster.kill(fault.target, signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            self._cluster.kill(fault.target, signal.SIGCONT)
            await asyncio.sleep(RECOVERED_S)

    async def _sluggish(self, fault: Fault) -> None:
        clock = asyncio.get_running_loop().time
        end_s = clock() + fault.duration_s
        with self._outage(fault):
            while clock() < end_s:
                for signum, pause_s in zip((signal.SIGSTOP, signal.SIGCONT), DUTY_S, strict=True):
                    self._cluster.kill(fault.target, signum)
                    await asyncio.sleep(pause_s)
            await asyncio.sleep(RECOVERED_S)

    async def _cut(self, fault: Fault) -> None:
        with self._outage(fault):
            self._proxies[fault.target].cut(fault.other)
            await asyncio.sleep(RECOVERED_S)

    async def _hole(self, fault: Fault) -> None:
        proxy = self._proxies[fault.target]
        with self._outage(fault):
            proxy.hold(fault.other)
            await asyncio.sleep(fault.duration_s)
            proxy.release(fault.other)
            await asyncio.sleep(RECOVERED_S)

    async def _slow(self, fault: Fault) -> None:
        proxy = self._proxies[fault.target]
        proxy.slow(SLOW_BYTES_PER_S, fault.other)
        await asyncio.sleep(fault.duration_s)
        proxy.slow(0.0, fault.other)

    async def _kv(self, fault: Fault) -> None:
        wanted = {"fault": fault.target, "share": KV_SHARE, "delay_s": KV_DELAY_S}
        self._kv_control.write_text(json.dumps(wanted))
        await asyncio.sleep(fault.duration_s)
        self._kv_control.unlink()

    async def _etcd(self, fault: Fault) -> None:
        etcd = self._cluster.etcd
        assert etcd is not None, "an external etcd cannot be killed"
        await etcd.kill()
        await asyncio.sleep(fault.duration_s)
        await etcd.start()

    async def _back(self, name: str) -> None:
        """Returns when the process has been started again and serves."""
        process = self._cluster.processes[name]
        starts = process.starts
        async with asyncio.timeout(BACK_S):
            while process.starts == starts:  # noqa: ASYNC110 - its supervisor sends no event
                await asyncio.sleep(0.05)
            if process.role == "router":
                await router_serving(self._router_address(name))
            else:
                await workers_ready(self._cluster.membership, lambda: {process.pid})
                await asyncio.sleep(RECOVERED_S)

    @contextlib.contextmanager
    def _outage(self, fault: Fault) -> Iterator[None]:
        """The target is down from the beginning of the block to its end."""
        clock = asyncio.get_running_loop().time
        outage = Outage(fault.target, fault.kind, clock())
        self.outages.append(outage)
        try:
            yield
        finally:
            outage.until_s = clock()

    def _spared(self, fault: Fault) -> bool:
        """Whether the target is what is left of a role, and the fault is not meant for the last."""
        if fault.target not in self._cluster.processes or fault.may_hit_last:
            return False
        now = asyncio.get_running_loop().time()
        role = self._role(fault.target)
        if sum(p.role == role for p in self._cluster.processes.values()) == 1:
            return False  # there never is another one
        imagined = Outage(fault.target, fault.kind, now)
        down = [one for one in self.outages if one.until_s is None]
        return self._all_down([*down, imagined], role, now)

    def _role_down(self, role: str, from_s: float, until_s: float) -> bool:
        down = [one for one in self.outages if one.overlaps(from_s, until_s)]
        moments = [from_s, *(max(one.from_s, from_s) for one in down)]
        return any(self._all_down(down, role, moment_s) for moment_s in moments)

    def _all_down(self, outages: list[Outage], role: str, moment_s: float) -> bool:
        names = {one.name for one in outages if one.overlaps(moment_s, moment_s)}
        return {p.name for p in self._cluster.processes.values() if p.role == role} <= names

    def _role(self, name: str) -> str:
        return self._cluster.processes[name].role
