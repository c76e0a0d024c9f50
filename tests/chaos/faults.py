"""Faults: a plan of them over time, decided by a seed, and their injection into a running cluster.

From outside of its processes: signals, connections through proxies, KV bytes through the control
file of `tests.chaos.kv_faults`, etcd through its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton.config import RouterLimits
from baton.errors import BatonError
from baton.local.cluster import LocalCluster, router_says, serves, workers_ready
from baton.local.etcd_process import EmbeddedEtcd
from baton.local.router_processes import RouterProcess
from baton.net import rpc
from baton.registry.membership import ROLES
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.v1.common_pb2 import WorkerRecord
from tests.chaos.kv_faults import done as kv_done
from tests.chaos.versions import ADAPTER, NAME, Changes
from tests.etcd_members import leader_of
from tests.preloaded import ranks_of
from tests.proxy import Proxy
from tests.waiting import WAIT_S

# By kind: how often it happens, relative to the others; seconds that it lasts, if it does.
KINDS: Mapping[str, tuple[float, tuple[float, float] | None]] = {
    "kill": (4, None),
    "pair": (1, None),  # a router and a worker are killed together
    "stop": (4, (0.3, 12.0)),
    "freeze": (0.5, (30.0, 40.0)),  # a router stops for longer than its callers wait for it
    "drain": (2, None),
    "cut": (4, None),
    "hole": (3, (0.3, 20.0)),
    "slow": (2, (1.0, 4.0)),
    "sluggish": (2, (1.0, 4.0)),
    "kv": (4, (1.0, 4.0)),
    "role": (3, None),
    "etcd": (1, (1.0, 5.0)),
    "etcd_stop": (2, (5.0, 8.0)),  # longer than leases live: on waking it ends all at once
    "adapter": (3, (0.0, 2.0)),  # unloaded, then loaded again
    "route": (4, None),
    "canary": (2, (2.0, 8.0)),
    "planner": (2, None),  # the leading one is killed
}
OF_VERSIONS = ("adapter", "route", "canary", "planner")  # need a cluster of several versions
# Of kinds that hit no process, of which one at a time happens.
TARGETS = {
    "kv": ("corrupt", "lose", "fail", "delay"), "etcd": ("etcd",), "etcd_stop": ("etcd",),
    "adapter": (ADAPTER,), "route": (NAME,), "canary": (NAME,), "planner": ("planner",),
}  # fmt: skip
KILLS = ("kill", "pair")
ROUTER_KINDS = ("kill", "stop", "drain")
ROUTER_SHARE = 0.25  # of the faults that may hit a router or a worker, this share hits a router
# Their targets serve on: they excuse no error.
HARMLESS = ("slow", "kv", "role", "etcd", "etcd_stop", "route", "canary", "planner")
DOWN = tuple(kind for kind in KINDS if kind not in HARMLESS)
SLOWING = ("slow", "sluggish", "kv")  # while they last nothing is bounded
SILENCE_S = RouterLimits().silence_s  # after which a router gives a worker up
# After which gRPC gives a router up.
ROUTER_SILENCE_S = sum(
    dict(rpc.OPTIONS)[f"grpc.keepalive_{name}_ms"] / 1000 for name in ("time", "timeout")
)
RECOVERED_S = 1.5  # after a fault was taken back, until others are expected to have seen it
SLOW_BYTES_PER_S = 200_000.0
STOPPED_S, RUNNING_S = 0.15, 0.05  # a sluggish process does the two by turns
KV_SHARE = 0.5  # of handoffs, each of which is a put for each pair of ranks


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `target` (a process's name; "etcd"; a fault of KV transfers) at `at_s`.

    Of a connection that is cut, held or slowed, `other` is the end that opened it: a process's
    name, or empty for all connections. `may_hit_last` says that the fault may also hit the
    only healthy worker of a role. `share`, from 0 to 1, chooses which of a worker's ranks is
    killed or stopped, the role that it takes, or the second version's share of a route.
    """

    at_s: float
    kind: str
    target: str
    duration_s: float = 0.0
    other: str = ""
    may_hit_last: bool = False
    share: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.duration_s:.1f} s" if self.duration_s else ""
        other = f" from {self.other}" if self.other else ""
        return f"{self.at_s:6.1f} s  {self.kind} {self.target}{other}{lasting}"


def plan(
    seed: int,
    seconds: float,
    processes: Mapping[str, str],
    mean_pause_s: float = 2.0,
    kinds: Collection[str] = KINDS,
) -> Iterator[Fault]:
    """The faults of one run, in order; `processes` are roles by name.

    The same seed gives the same plan. Pauses between faults are exponential.
    """
    dice = random.Random(seed)
    routers = sorted(name for name, role in processes.items() if role == "router")
    workers = sorted(name for name, role in processes.items() if role != "router")
    at_s = dice.uniform(0.2, 1.0)
    while at_s < seconds:
        kind = dice.choices(list(kinds), [KINDS[kind][0] for kind in kinds])[0]
        lasts = KINDS[kind][1]
        duration_s, may_hit_last = dice.uniform(*lasts) if lasts else 0.0, dice.random() < 0.1
        other = ""
        if kind in TARGETS:
            target = dice.choice(TARGETS[kind])
        else:
            hits_router = kind in ROUTER_KINDS and dice.random() < ROUTER_SHARE
            target = dice.choice(routers if hits_router or kind == "freeze" else workers)
        if kind == "pair":
            yield Fault(at_s, kind, dice.choice(routers), may_hit_last=True)
        if kind in ("cut", "hole", "slow"):
            decodes = processes[target] == "decode"
            callers = [name for name in workers if decodes and processes[name] == "prefill"]
            other = dice.choice([*routers, *callers, ""])
        yield Fault(at_s, kind, target, duration_s, other, may_hit_last, dice.random())
        at_s += dice.expovariate(1 / mean_pause_s)


@dataclass
class Outage:
    """One process that does not serve as it should; without an end so far. The loop's clock."""

    name: str
    kind: str
    from_s: float
    until_s: float = math.inf


@dataclass
class Outages:
    """When which of the processes were down, or hit by a fault that does no harm.

    `roles`: by name, what a process is one of: the routers, or the workers of a version.
    """

    roles: Mapping[str, str]
    all: list[Outage] = field(default_factory=list)

    def any_down(
        self, names: Collection[str], from_s: float, until_s: float, kinds: Collection[str] = DOWN
    ) -> bool:
        """Whether one of these processes was down between the two, by one of these kinds."""
        return any(
            one.name in names and one.kind in kinds
            for one in self.all
            if one.from_s <= until_s and one.until_s >= from_s
        )

    def role_down(self, role: str, from_s: float, until_s: float) -> bool:
        """Whether at some moment between the two all of a role were down at once."""
        moments = [from_s, *(one.from_s for one in self.all if from_s <= one.from_s <= until_s)]
        return any(
            all(self.any_down((name,), moment_s, moment_s) for name in self.names(role))
            for moment_s in moments
        )

    def excused_s(
        self, roles: Collection[str], router: str, from_s: float, until_s: float
    ) -> float:
        """Seconds of a pause between the two that the longest of its faults explains.

        `roles`: without any of one of them nothing goes on. `router`: the one that it depends on.
        """
        if any(self.role_down(role, from_s, until_s) for role in roles):
            return math.inf
        found_s = 0.0
        for one in self.all:
            overlap_s = max(0.0, min(until_s, one.until_s) - max(from_s, one.from_s))
            if one.name == router or one.kind in SLOWING:
                found_s = max(found_s, overlap_s)
            elif one.kind in DOWN:
                of_router = self.roles.get(one.name) == "router"
                bound_s = ROUTER_SILENCE_S if of_router else SILENCE_S
                found_s = max(found_s, min(overlap_s, bound_s))
        return found_s

    def memory_lost(self, from_s: float, until_s: float) -> bool:
        """Whether a process was killed, with the spans it had not sent, between the two."""
        return any(one.kind in KILLS and from_s <= one.from_s <= until_s for one in self.all)

    def names(self, role: str) -> list[str]:
        """The processes of a role."""
        return [name for name, its in self.roles.items() if its == role]


async def set_role(record: WorkerRecord, role: str) -> bool:
    """Has a worker take a role, and returns True; one that does not answer now keeps its own."""
    numbers = {name: number for number, name in ROLES.items()}
    with contextlib.suppress(BatonError), rpc.translated():
        async with rpc.channel(record.address, role="worker") as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            request = worker_pb2.SetRoleRequest(role=numbers[role])
            await stub.SetRole(request, timeout=RECOVERED_S)
            return True
    return False


@dataclass
class Injector:
    """`done` counts faults by kind, `missed` those that changed nothing, such as connections that
    do not exist, and `skipped` those that were not tried.

    `proxies` and `routers`, which are addresses, are by process name; `rank_pairs` of a handoff.
    `outages` is to be empty. `etcds`: members of its etcd, of which the leader is hit. `changes`:
    None where one version is served.
    """

    cluster: LocalCluster
    proxies: Mapping[str, Proxy]
    kv_control: Path
    routers: Mapping[str, str]
    log: Callable[[str], None]
    outages: Outages
    etcds: Sequence[EmbeddedEtcd]
    changes: Changes | None = None
    rank_pairs: int = 1
    done: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    _busy: set[str] = field(default_factory=set)

    async def run(self, faults: Iterable[Fault]) -> None:
        """Does each fault at its time, counted from now; returns when the last one is over."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        async with asyncio.TaskGroup() as running:
            for fault in faults:
                await asyncio.sleep(max(0.0, began_s + fault.at_s - clock()))
                running.create_task(self._do(fault), name=str(fault))

    async def _do(self, fault: Fault) -> None:
        key = "kv" if fault.kind == "kv" else fault.target
        if key in self._busy or self._spares(fault):
            self.skipped += 1
            self.log(f"{fault}  (skipped)")
            return
        self.log(str(fault))
        self._busy.add(key)
        clock = asyncio.get_running_loop().time
        outage = Outage(fault.target, fault.kind, clock())
        self.outages.all.append(outage)
        try:
            hit = await self._inject(fault)
        finally:
            outage.until_s = clock()
            self._busy.discard(key)
        (self.done if hit else self.missed)[fault.kind] += 1

    async def _inject(self, fault: Fault) -> bool:
        """Does it, takes it back, and returns when others should have seen that: whether it hit."""
        target, other, duration_s = fault.target, fault.other, fault.duration_s
        hit = True
        if fault.kind in ("cut", "hole", "slow"):
            hit = bool(self.proxies[target].of(other))
        match fault.kind:
            case "kill" | "pair" | "drain":
                starts = self.cluster.processes[target].starts
                if fault.kind in KILLS:
                    self._rank(fault).send_signal(signal.SIGKILL)
                else:
                    self.cluster.kill(target, signal.SIGTERM)
                await self._back(target, starts)
                if target in self.routers:
                    return hit
            case "stop" | "freeze":
                rank = self._rank(fault)
                rank.send_signal(signal.SIGSTOP)
                await asyncio.sleep(duration_s)
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGCONT)
            case "sluggish":
                duty = ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, RUNNING_S))
                for signum, pause_s in duty * round(duration_s / (STOPPED_S + RUNNING_S)):
                    self.cluster.kill(target, signum)
                    await asyncio.sleep(pause_s)
            case "cut":
                self.proxies[target].cut(other)
            case "hole":
                self.proxies[target].hold(other)
                await asyncio.sleep(duration_s)
                self.proxies[target].release(other)
            case "slow":
                self.proxies[target].slow(SLOW_BYTES_PER_S, other)
                await asyncio.sleep(duration_s)
                self.proxies[target].slow(0.0, other)
            case "role":
                hit = await self._change_role(fault)
            case "kv":
                share = 1 - (1 - KV_SHARE) ** (1 / self.rank_pairs)
                before = kv_done(self.kv_control)
                self.kv_control.write_text(json.dumps({"fault": target, "share": share}))
                await asyncio.sleep(duration_s)
                self.kv_control.unlink()
                hit = kv_done(self.kv_control) != before
            case "adapter" | "route" | "canary" | "planner":
                hit = await self._change_versions(fault)
            case "etcd":
                leader = await leader_of(self.etcds)
                await leader.kill()
                await asyncio.sleep(duration_s)
                await leader.start()
            case "etcd_stop":
                etcd = psutil.Process((await leader_of(self.etcds)).pid)
                etcd.suspend()
                try:
                    await asyncio.sleep(duration_s)
                finally:
                    etcd.resume()
        if fault.kind not in HARMLESS:
            await asyncio.sleep(RECOVERED_S)
        return hit

    async def _change_versions(self, fault: Fault) -> bool:
        changes, hit = self.changes, True
        assert changes is not None
        match fault.kind:
            case "adapter":
                hit = await changes.unload()
                await asyncio.sleep(fault.duration_s)
                await changes.load()
            case "route":
                hit = await changes.set_route(fault.share)
            case "canary":
                hit = await changes.start_canary()
                await asyncio.sleep(fault.duration_s)
            case "planner":
                await changes.kill_planner()
        return hit

    async def _change_role(self, fault: Fault) -> bool:
        """Has the worker take a role; False if it is its own already, or it does not answer."""
        pid = self.cluster.processes[fault.target].pid
        role = list(ROLES.values())[int(fault.share * len(ROLES))]
        records = self.cluster.membership.records.values()
        changed = [one for one in records if one.pid == pid and ROLES[one.role] != role]
        return any([await set_role(record, role) for record in changed])

    def _rank(self, fault: Fault) -> psutil.Process:
        """The target's process, or one of the ranks that it started."""
        pid = self.cluster.processes[fault.target].pid
        ranks = [psutil.Process(pid), *ranks_of(pid)]
        return ranks[int(fault.share * len(ranks))]

    async def _back(self, name: str, starts: int) -> None:
        """Returns when the process has been started more often than that and serves."""
        process = self.cluster.processes[name]
        async with asyncio.timeout(WAIT_S):
            while process.starts == starts:  # noqa: ASYNC110 - its supervisor sends no event
                await asyncio.sleep(0.05)
            if name in self.routers:
                assert isinstance(process, RouterProcess)
                await router_says(serves, process)
            else:
                await workers_ready(self.cluster.membership, lambda: {process.pid})

    def _spares(self, fault: Fault) -> bool:
        """Whether the target is what is left of a role, and the fault is not meant for the last."""
        role = self.outages.roles.get(fault.target)
        if role is None or fault.may_hit_last:
            return False
        others = [name for name in self.outages.names(role) if name != fault.target]
        now = asyncio.get_running_loop().time()
        down = [name for name in others if self.outages.any_down((name,), now, now)]
        return len(others) == len(down) > 0  # where there never is another one, it is hit
