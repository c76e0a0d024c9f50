"""A whole cluster on this machine: etcd, routers, prefill and decode workers, each a process.

`async with LocalCluster(config)` returns when the cluster serves and leaves nothing behind. Used by
`baton up`, `baton demo` and the cluster tests. It knows processes, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Self

from baton.config import ClusterConfig
from baton.errors import DeadlineExceeded, Unavailable
from baton.local import commands, cpus, gpus, ports
from baton.local.etcd import EmbeddedEtcd
from baton.local.model_check import check_model
from baton.local.process import ChildProcess
from baton.local.readiness import router_sees, router_serving, worker_ready, workers_ready
from baton.local.registry import LocalRegistry
from baton.local.supervisor import Keeper, ending, last_words, what_happened
from baton.registry.interface import Membership

log = logging.getLogger(__name__)

_GPU_START_S = 900.0  # a large model's weights come from a disk, and kernels are compiled
_STOP_GRACE_S = 3.0  # beyond the drain time, before SIGKILL
_RESTART_GRACE_S = 15.0  # the same when nobody waits at a terminal


class LocalCluster:
    """Starts, watches, restarts and stops the processes of `config`.

    `say` gets a line whenever something happens; `on_line` each output line of a process, with its
    name. By process name ("decode-0") or role ("prefill", "decode", "router"), `programs` are run
    instead of `python -m baton`, with the same arguments, and `extra_args` are appended to them.
    `env` is added to every process's environment.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        say: Callable[[str], None] = log.info,
        on_line: Callable[[str, str], None] | None = None,
        programs: Mapping[str, Sequence[str]] = MappingProxyType({}),
        extra_args: Mapping[str, Sequence[str]] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),
        start_timeout_s: float = 120.0,
    ) -> None:
        self.config = config
        self.processes: dict[str, ChildProcess] = {}
        self.addresses: tuple[str, ...] = ()  # host:port of each router
        self.http_addresses: tuple[str, ...] = ()  # the same for HTTP; empty where it is off
        self.metrics: dict[str, str] = {}  # host:port by process name, where metrics are served
        self._say = say
        self._on_line = on_line or (lambda name, line: None)
        self._output_is_seen = on_line is not None
        self._programs = programs
        self._extra_args = extra_args
        self._env = env
        self._start_timeout_s = start_timeout_s
        self._registry = LocalRegistry(config, say)
        self._keepers: dict[str, Keeper] = {}
        self._failed_start: asyncio.Future[None] | None = None
        self._stop: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of the first router."""
        return self.addresses[0]

    @property
    def targets(self) -> str:
        """All routers, as the SDK takes them."""
        return ",".join(self.addresses)

    @property
    def etcd(self) -> EmbeddedEtcd | None:
        """The cluster's own etcd; None when it uses another."""
        return self._registry.etcd

    @property
    def etcd_address(self) -> str:
        """host:port of etcd."""
        return self._registry.address

    @property
    def membership(self) -> Membership:
        """The members as etcd tells of them."""
        return self._registry.membership

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
        """Returns once every worker is READY and every router SERVING; raises DeadlineExceeded.

        A process that ended and is not going to be restarted is not waited for.
        """
        timeout_s = self._start_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await workers_ready(self.membership, self._worker_pids)
                for keeper in [keeper for keeper in self._keepers.values() if keeper.wanted]:
                    with contextlib.suppress(Unavailable):
                        await keeper.ready()
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
        metrics_port = self._metrics_port(name, "127.0.0.1")
        args = commands.worker(
            self.config, role, share, self.etcd_address, self.config.otlp, metrics_port
        )
        await self._launch(name, role, args, self._worker_ready)
        return name

    async def start_again(self, name: str) -> None:
        """Starts a process that ended and is not restarted by itself (`restart=False`)."""
        await self._keepers[name].start()

    async def restart(self, name: str) -> int:
        """Drains a process and starts it again; returns how the old run ended: 0 after a drain.

        When it returns the process serves, a worker in the eyes of every router. Raises
        DeadlineExceeded or Unavailable when it does not come back.
        """
        ran = self.processes[name].running
        self._say(f"{name} restarting…" if ran else f"{name} starting again…")
        status = await self._keepers[name].restart(self.config.drain_s + _RESTART_GRACE_S)
        if ran and status:
            self._say(f"warning: {name} did not drain: it ended with status {status}")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._in_service(name)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name} is not back after {self._start_timeout_s:g} s"
            ) from None
        return status

    async def rolling_restart(self) -> dict[str, int]:
        """Restarts routers and workers, each when the one before serves again; see `restart`.

        Stops at the first that does not come back. Returns how each old run ended, by name.
        """
        return {name: await self.restart(name) for name in list(self.processes)}

    async def restart_etcd(self) -> None:
        """Restarts the embedded etcd with its data; the cluster serves on meanwhile."""
        await self._registry.restart_etcd()

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
        config = self.config
        await asyncio.to_thread(check_model, config.engine)
        found = ports.consecutive(config.host, config.port, config.routers)
        self.addresses = tuple(f"{config.host}:{port}" for port in found)
        http_ports = self._http_ports()
        self.http_addresses = tuple(f"{config.host}:{port}" for port in http_ports)
        await self._registry.start()
        shares = await self._shares()
        if any(share.device for share in shares):
            self._start_timeout_s = max(self._start_timeout_s, _GPU_START_S)
        for number, port in enumerate(found):
            name = "router" if config.routers == 1 else f"router-{number}"
            metrics_port = self._metrics_port(name, config.host)
            http_port = http_ports[number] if http_ports else 0
            args = commands.router(
                config, port, self.etcd_address, config.otlp, metrics_port, http_port
            )
            await self._launch(name, "router", args, self._router_ready)
        roles = ["prefill"] * config.prefill + ["decode"] * config.decode
        for role, share in zip(roles, shares, strict=True):
            await self.add_worker(role, share)
        await self._ready_or_failed()

    async def _shares(self) -> list[cpus.Share]:
        """What each worker gets of this machine, prefill workers' first."""
        config = self.config
        counted = config.engine.device in ("auto", "cuda") and not config.engine.simulate
        found = await asyncio.to_thread(gpus.count) if counted else 0
        names = [f"prefill-{number}" for number in range(config.prefill)]
        names += [f"decode-{number}" for number in range(config.decode)]
        return gpus.share_out(config.engine, names, config.prefill, found, self._say)

    async def _launch(
        self,
        name: str,
        role: str,
        args: Sequence[str],
        until_ready: Callable[[ChildProcess], Awaitable[str]],
    ) -> None:
        program = self._programs.get(name) or self._programs.get(role) or commands.PROGRAM
        extra = [*self._extra_args.get(role, ()), *self._extra_args.get(name, ())]
        argv = [*program, *args, *extra]
        process = ChildProcess(name, role, argv, self._env, partial(self._on_line, name))
        self.processes[name] = process
        self._keepers[name] = Keeper(process, until_ready, self._accident, self._say)
        await self._keepers[name].start()
        what = "starting…" if role == "router" else f"loading model {self.config.engine.model}…"
        self._say(f"{name} {what}")

    async def _worker_ready(self, process: ChildProcess) -> str:
        record = await worker_ready(self.membership, process.pid)
        where = f"{record.address}, pid {record.pid}, {record.blocks_total} KV blocks"
        return f"ready in {process.age_s:.1f} s ({where})"

    async def _router_ready(self, process: ChildProcess) -> str:
        address = self._routers[process.name]
        await router_serving(address)
        return f"serving after {process.age_s:.1f} s ({address}, pid {process.pid})"

    async def _in_service(self, name: str) -> None:
        """Returns once a process is ready and, if it is a worker, every router has found it."""
        await self._keepers[name].ready()
        process = self.processes[name]
        if process.role != "router":
            for address in self._routers.values():
                await router_sees(address, process.pid)

    def _http_ports(self) -> list[int]:
        """Where the routers serve HTTP. Raises ConfigError when a port is in use."""
        first = self.config.first_http_port
        if not first:
            return []
        return ports.consecutive(self.config.host, first, self.config.routers, "--http-port")

    def _metrics_port(self, name: str, host: str) -> int | None:
        """Where a new process serves its metrics: the port after the last one's."""
        first = self.config.metrics_port
        if first is None:
            return None
        wanted = first + len(self.metrics) if first else 0
        (port,) = ports.consecutive(host, wanted, 1, "--metrics-port")
        self.metrics[name] = f"{host}:{port}"
        return port

    @property
    def _routers(self) -> dict[str, str]:
        """Addresses of the routers that run or are going to, by name."""
        names = [process.name for process in self.processes.values() if process.role == "router"]
        addresses = zip(names, self.addresses, strict=False)  # at the start not all are there
        return {name: address for name, address in addresses if self._keepers[name].wanted}

    def _accident(self, process: ChildProcess) -> bool:
        """A process ended though nobody asked it to; whether it is started again."""
        if self._failed_start is not None and not self._failed_start.done():
            words = last_words(process, self._output_is_seen)
            why = f"{ending(process)} while the cluster was starting{words}"
            self._failed_start.set_exception(Unavailable(why))
            return False
        if not self.config.restart:
            self._say(what_happened(process))
        return self.config.restart

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

    def _worker_pids(self) -> set[int]:
        """Process ids of the workers that should be READY; 0 for one about to be restarted."""
        workers = [k for k in self._keepers.values() if k.process.role != "router"]
        return {k.process.pid if k.process.running else 0 for k in workers if k.wanted}

    def _missing(self) -> str:
        missing = [k.process.name for k in self._keepers.values() if k.wanted and not k.is_ready]
        return ", ".join(missing) or "a worker's record in etcd"

    async def _stop_all(self) -> None:
        await asyncio.gather(*(keeper.let_go() for keeper in self._keepers.values()))
        if self._failed_start is not None and self._failed_start.done():
            self._failed_start.cancelled() or self._failed_start.exception()  # seen
        timeout_s = self.config.drain_s + _STOP_GRACE_S
        try:
            for is_router in (True, False):
                group = [p for p in self.processes.values() if (p.role == "router") == is_router]
                await asyncio.gather(*(p.stop(timeout_s) for p in group if p.starts))
        finally:
            self.kill_all()
            await self._registry.close()
