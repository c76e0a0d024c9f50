"""Does to a running cluster what a plan says, from outside of its processes, and remembers to whom.

Signals to processes, connections through proxies, KV bytes through the control file of
`tests.chaos.kv`, etcd through its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.local.cluster import LocalCluster, router_serving, workers_ready
from tests.chaos.plan import Fault
from tests.chaos.proxy import Proxy

BACK_S = 60.0  # at most, until a process that was killed serves again
RECOVERED_S = 1.5  # after a fault was taken back, until others are expected to have seen it
SLOW_BYTES_PER_S = 200_000.0
DUTY_S = (0.15, 0.05)  # a sluggish process is stopped, then runs, for so long
KV_SHARE = 0.5
KV_DELAY_S = 0.4


@dataclass
class Hurt:
    """One process that does not serve as it should; `until_s` None: still. The loop's clock."""

    name: str
    kind: str
    from_s: float
    until_s: float | None = None

    def overlaps(self, from_s: float, until_s: float) -> bool:
        """Whether it was hurt at some time between the two."""
        return self.from_s <= until_s and (self.until_s is None or self.until_s >= from_s)


class Injector:
    """`done` counts faults by kind, `skipped` those whose target was not there to be hit.

    `router_address` gives the address of a router by name.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        proxies: Mapping[str, Proxy],
        kv_control: Path,
        router_address: Callable[[str], str],
        say: Callable[[str], None],
    ) -> None:
        self.done: Counter[str] = Counter()
        self.skipped = 0
        self.hurts: list[Hurt] = []
        self._cluster = cluster
        self._proxies = proxies
        self._kv_control = kv_control
        self._router_address = router_address
        self._say = say
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
        """Whether at some moment between the two all workers of a role were hurt at once."""
        return any(self._whole_role_hurt(role, from_s, until_s) for role in ("prefill", "decode"))

    def routers_hurt(self, from_s: float, until_s: float, every: bool = False) -> bool:
        """Whether a router, or `every` one at once, was killed, stopped or drained between."""
        if every:
            return self._whole_role_hurt("router", from_s, until_s)
        return any(
            one.overlaps(from_s, until_s) and self._role(one.name) == "router" for one in self.hurts
        )

    def router_hurt(self, name: str, from_s: float, until_s: float, killed: bool = False) -> bool:
        """Whether this router was hurt between the two, or was `killed` then."""
        return any(
            one.name == name
            and one.overlaps(from_s, until_s)
            and (not killed or one.kind == "kill")
            for one in self.hurts
        )

    def killed(self, from_s: float, until_s: float) -> bool:
        """Whether a process lost its memory, with the spans in it, between the two."""
        return any(one.kind == "kill" and from_s <= one.from_s <= until_s for one in self.hurts)

    async def _do(self, fault: Fault) -> None:
        key = fault.kind if fault.kind in ("kv", "etcd") else fault.target
        if key in self._busy or self._spared(fault):
            self.skipped += 1
            self._say(f"{fault}  (skipped)")
            return
        self._say(str(fault))
        self.done[fault.kind] += 1
        self._busy.add(key)
        try:
            await getattr(self, f"_{fault.kind}")(fault)
        finally:
            self._busy.discard(key)

    async def _kill(self, fault: Fault) -> None:
        with self._hurting(fault):
            self._cluster.kill(fault.target)
            await self._back(fault.target)

    async def _drain(self, fault: Fault) -> None:
        with self._hurting(fault):
            self._cluster.kill(fault.target, signal.SIGTERM)
            await self._back(fault.target)

    async def _stop(self, fault: Fault) -> None:
        with self._hurting(fault):
            self._cluster.kill(fault.target, signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            self._cluster.kill(fault.target, signal.SIGCONT)
            await asyncio.sleep(RECOVERED_S)

    async def _sluggish(self, fault: Fault) -> None:
        clock = asyncio.get_running_loop().time
        end_s = clock() + fault.duration_s
        with self._hurting(fault):
            while clock() < end_s:
                for signum, pause_s in zip((signal.SIGSTOP, signal.SIGCONT), DUTY_S, strict=True):
                    self._cluster.kill(fault.target, signum)
                    await asyncio.sleep(pause_s)
            await asyncio.sleep(RECOVERED_S)

    async def _cut(self, fault: Fault) -> None:
        with self._hurting(fault):
            self._proxies[fault.target].cut(fault.other)
            await asyncio.sleep(RECOVERED_S)

    async def _hole(self, fault: Fault) -> None:
        proxy = self._proxies[fault.target]
        with self._hurting(fault):
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
        assert etcd is not None, "an etcd of somebody else cannot be killed"
        await etcd.kill()
        await asyncio.sleep(fault.duration_s)
        await etcd.start()

    async def _back(self, name: str) -> None:
        """Returns when the process has been started again and serves."""
        process = self._cluster.processes[name]
        starts = process.starts
        async with asyncio.timeout(BACK_S):
            while process.starts == starts:  # noqa: ASYNC110 - its keeper tells nobody
                await asyncio.sleep(0.05)
            if process.role == "router":
                await router_serving(self._router_address(name))
            else:
                await workers_ready(self._cluster.membership, lambda: {process.pid})
                await asyncio.sleep(RECOVERED_S)

    @contextlib.contextmanager
    def _hurting(self, fault: Fault) -> Iterator[None]:
        """The target is hurt from the beginning of the block to its end."""
        clock = asyncio.get_running_loop().time
        hurt = Hurt(fault.target, fault.kind, clock())
        self.hurts.append(hurt)
        try:
            yield
        finally:
            hurt.until_s = clock()

    def _spared(self, fault: Fault) -> bool:
        """Whether the target is what is left of a role, and the fault is not meant for the last."""
        if fault.target not in self._cluster.processes or fault.even_the_last:
            return False
        now = asyncio.get_running_loop().time()
        role = self._role(fault.target)
        if sum(p.role == role for p in self._cluster.processes.values()) == 1:
            return False  # there never is another one
        imagined = Hurt(fault.target, fault.kind, now)
        hurt = [one for one in self.hurts if one.until_s is None]
        return self._all_hurt([*hurt, imagined], role, now)

    def _whole_role_hurt(self, role: str, from_s: float, until_s: float) -> bool:
        hurt = [one for one in self.hurts if one.overlaps(from_s, until_s)]
        moments = [from_s, *(max(one.from_s, from_s) for one in hurt)]
        return any(self._all_hurt(hurt, role, moment_s) for moment_s in moments)

    def _all_hurt(self, hurts: list[Hurt], role: str, moment_s: float) -> bool:
        names = {one.name for one in hurts if one.overlaps(moment_s, moment_s)}
        return {p.name for p in self._cluster.processes.values() if p.role == role} <= names

    def _role(self, name: str) -> str:
        return self._cluster.processes[name].role
