"""A whole cluster on this machine: etcd, a router, prefill and decode workers, each a process.

`async with LocalCluster(config)` returns when the cluster serves and leaves nothing behind. Used by
`baton up`, `baton demo` and the cluster tests. It knows processes, not requests.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Self

from baton.config import ClusterConfig
from baton.errors import DeadlineExceeded, Unavailable
from baton.local import commands, cpus, ports
from baton.local.etcd import EmbeddedEtcd
from baton.local.model_check import check_model
from baton.local.process import ChildProcess
from baton.local.readiness import router_serving, workers_ready
from baton.registry.etcd import EtcdRegistry
from baton.registry.membership import Membership
from baton.v1.common_pb2 import WORKER_STATE_READY

log = logging.getLogger(__name__)

_ERROR = "baton: error: "  # how our commands begin their last line
_STOP_GRACE_S = 3.0  # beyond the drain time, before SIGKILL
_FIRST_RESTART_S = 0.5
_LAST_RESTART_S = 10.0
_HEALTHY_S = 60.0  # a process that ran this long starts again without the earlier failures' delay


def restart_delay_s(failures: int) -> float:
    """Seconds before a process that failed for the nth time in a row is started again."""
    return min(_FIRST_RESTART_S * 2.0 ** min(failures - 1, 30), _LAST_RESTART_S)


class LocalCluster:
    """Starts, watches, restarts and stops the processes of `config`.

    `say` gets a line whenever something happens; `on_line` each output line of a process, with its
    name. `extra_args` are appended to a command line, by process name ("decode-0") or role
    ("prefill", "decode", "router"); `env` is added to every process's environment.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        say: Callable[[str], None] = log.info,
        on_line: Callable[[str, str], None] | None = None,
        extra_args: Mapping[str, Sequence[str]] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),
        start_timeout_s: float = 120.0,
    ) -> None:
        self.config = config
        self.processes: dict[str, ChildProcess] = {}
        self.etcd: EmbeddedEtcd | None = None
        self.etcd_address = ""
        self._port = 0
        self._say = say
        self._on_line = on_line
        self._extra_args = extra_args
        self._env = env
        self._start_timeout_s = start_timeout_s
        self._services = AsyncExitStack()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._membership: Membership | None = None
        self._failed_start: asyncio.Future[None] | None = None
        self._stop: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of the router."""
        return f"{self.config.host}:{self._port}"

    @property
    def membership(self) -> Membership:
        """The members as etcd tells of them."""
        assert self._membership is not None, "the cluster is not started"
        return self._membership

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Returns once every worker is READY and the router SERVING; raises DeadlineExceeded.

        A worker that ended and is not going to be restarted is not waited for.
        """
        timeout_s = self._start_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await workers_ready(self.membership, self._worker_pids)
                await router_serving(self.address)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the cluster was not ready after {timeout_s:g} s; missing: {self._missing()}"
            ) from None

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to one process, as an accident or an operator would."""
        self.processes[name].signal(signum)

    async def add_worker(self, role: str, share: cpus.Share | None = None) -> str:
        """Starts one more "prefill" or "decode" worker, unpinned if not told; returns its name."""
        number = sum(process.role == role for process in self.processes.values())
        name = f"{role}-{number}"
        share = share or cpus.Share((), 1)
        argv = commands.worker(self.config, role, share, self.etcd_address, self.config.otlp)
        await self._launch(name, role, argv)
        return name

    async def start_again(self, name: str) -> None:
        """Starts a process that ended and is not restarted by itself (`restart=False`)."""
        await self.processes[name].start()
        self._watch_over(self.processes[name])

    async def stop(self) -> None:
        """Stops router, workers and etcd, in this order; every wait is bounded. Safe to repeat.

        A caller that is cancelled leaves at once, after the processes have been killed.
        """
        if self._stop is None:
            self._stop = asyncio.create_task(self._stop_all())
        try:
            await asyncio.shield(self._stop)
        except asyncio.CancelledError:
            self.kill_all()
            await self._stop
            raise

    def kill_all(self) -> None:
        """SIGKILL to every process that still runs; a `stop` in progress then ends at once."""
        for process in self.processes.values():
            process.kill()

    async def _start(self) -> None:
        self._failed_start = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(check_model, self.config.engine)
        if self.config.port:
            ports.check_free(self.config.host, self.config.port)
        self._port = self.config.port or ports.free(self.config.host)
        await self._start_registry()
        shares = self._shares()
        argv = commands.router(self.config, self._port, self.etcd_address, self.config.otlp)
        await self._launch("router", "router", argv)
        roles = ["prefill"] * self.config.prefill + ["decode"] * self.config.decode
        for role, share in zip(roles, shares, strict=True):
            await self.add_worker(role, share)
        self._tasks["announce"] = asyncio.create_task(self._announce_ready())
        await self._ready_or_failed()

    async def _start_registry(self) -> None:
        if self.config.etcd is None:
            begin = time.monotonic()
            self.etcd = await self._services.enter_async_context(EmbeddedEtcd())
            self.etcd_address = self.etcd.address
            self._say(f"etcd ready in {time.monotonic() - begin:.1f} s ({self.etcd_address})")
            if self.config.restart:
                keeper = self.etcd.keep_running(self._say)
                self._tasks["etcd"] = asyncio.create_task(keeper, name="keeper of etcd")
        else:
            self.etcd_address = self.config.etcd
        registry = EtcdRegistry(self.config.registry(self.etcd_address))
        self._services.push_async_callback(registry.close)
        self._membership = await self._services.enter_async_context(registry.watch())

    def _shares(self) -> list[cpus.Share]:
        cores = cpus.available()
        workers = self.config.prefill + self.config.decode
        shares = cpus.divide(cores, workers, self.config.engine.threads)
        if warning := cpus.oversubscription(cores, shares):
            self._say(f"warning: {warning}")
        return shares

    async def _launch(self, name: str, role: str, argv: Sequence[str]) -> None:
        extra = [*self._extra_args.get(role, ()), *self._extra_args.get(name, ())]
        process = ChildProcess(
            name, role, [*argv, *extra], self._env, partial(self._on_line or _ignore, name)
        )
        self.processes[name] = process
        await process.start()
        what = "starting…" if role == "router" else f"loading model {self.config.engine.model}…"
        self._say(f"{name} {what}")
        self._watch_over(process)

    def _watch_over(self, process: ChildProcess) -> None:
        task = asyncio.create_task(self._keep_running(process), name=f"keeper of {process.name}")
        self._tasks[process.name] = task

    async def _keep_running(self, process: ChildProcess) -> None:
        """Waits for the process to end, then starts it again, as long as that is wanted."""
        failures = 0
        while True:
            status = await process.wait()
            ending = _ending(process, status)
            if self._failed_start is not None and not self._failed_start.done():
                why = f"{ending} while the cluster was starting{self._last_words(process)}"
                self._failed_start.set_exception(Unavailable(why))
                return
            if not self.config.restart:
                self._say(ending)
                return
            lived_s = time.monotonic() - process.started_at
            failures = 1 if lived_s >= _HEALTHY_S else failures + 1
            self._say(f"{ending}; starting it again in {restart_delay_s(failures):g} s")
            await asyncio.sleep(restart_delay_s(failures))
            await process.start()

    def _last_words(self, process: ChildProcess) -> str:
        """Why a process ended: our own error, else its last lines, if nobody has seen them yet."""
        last = process.log[-1] if process.log else ""
        if last.startswith(_ERROR):
            return f": {last.removeprefix(_ERROR)}"
        if self._on_line is not None:
            return "; what it wrote is above" if last else " and wrote nothing"
        return f". Its last lines:\n{process.log_tail() or '(it wrote nothing)'}"

    async def _ready_or_failed(self) -> None:
        """Returns when the cluster is ready; raises as soon as one of its processes has ended."""
        assert self._failed_start is not None
        ready = asyncio.create_task(self.wait_ready())
        try:
            await asyncio.wait([ready, self._failed_start], return_when=asyncio.FIRST_COMPLETED)
            if self._failed_start.done():
                self._failed_start.result()
            await ready
            self._failed_start.cancel()  # from now on an exit is an accident, not a failed start
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _announce_ready(self) -> None:
        """Says when a process of ours has become READY, the first time and after restarts."""
        told: set[str] = set()
        async for records in self.membership.changes():
            by_pid = {p.pid: p for p in self.processes.values()}
            for incarnation in records.keys() - told:
                record = records[incarnation]
                process = by_pid.get(record.pid)
                if record.state == WORKER_STATE_READY and process is not None:
                    told.add(incarnation)
                    took_s = time.monotonic() - process.started_at
                    self._say(
                        f"{process.name} ready in {took_s:.1f} s "
                        f"({record.address}, pid {record.pid}, {record.blocks_total} KV blocks)"
                    )

    def _worker_pids(self) -> set[int]:
        """Process ids of the workers that should be READY; 0 for one about to be restarted."""
        workers = [p for p in self.processes.values() if p.role != "router"]
        return {p.pid if p.running else 0 for p in workers if p.running or self.config.restart}

    def _missing(self) -> str:
        ready = {r.pid for r in self.membership.records.values() if r.state == WORKER_STATE_READY}
        pids = self._worker_pids() - ready
        names = [p.name for p in self.processes.values() if (p.pid if p.running else 0) in pids]
        return ", ".join(names) or "the router's SERVING"

    async def _stop_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._failed_start is not None and self._failed_start.done():
            self._failed_start.cancelled() or self._failed_start.exception()  # seen
        timeout_s = self.config.drain_s + _STOP_GRACE_S
        try:
            for is_router in (True, False):
                group = [p for p in self.processes.values() if (p.role == "router") == is_router]
                await asyncio.gather(*(p.stop(timeout_s) for p in group if p.starts))
        finally:
            self.kill_all()
            await self._services.aclose()


def _ignore(name: str, line: str) -> None:
    """Nobody wants the output."""


def _ending(process: ChildProcess, status: int) -> str:
    if status < 0:
        return f"{process.name} was killed by {signal.Signals(-status).name}"
    return f"{process.name} exited with status {status}"
