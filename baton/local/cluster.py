"""A whole cluster on this machine: etcd, routers, prefill and decode workers, each a process.

`async with LocalCluster(config)` returns when the cluster serves and leaves nothing behind. Used by
`baton up`, `baton demo` and the cluster tests. It knows processes, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import rpc, tls
from baton.config import ClusterConfig
from baton.errors import DeadlineExceeded, Unavailable
from baton.local import certs, commands, ports, resources
from baton.local.etcd import EmbeddedEtcd
from baton.local.model_check import check_model
from baton.local.supervisor import ERROR, ChildProcess, Supervisor, cancelled
from baton.registry.backoff import Backoff
from baton.registry.etcd import EtcdRegistry
from baton.registry.interface import Membership
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from baton.v1.common_pb2 import WORKER_STATE_READY, WorkerRecord

log = logging.getLogger(__name__)

_GPU_START_S = 900.0  # a large model's weights come from a disk, and kernels are compiled
_STOP_GRACE_S = 3.0  # beyond the drain time, before SIGKILL
_RESTART_GRACE_S = 15.0  # the same where no user waits at a terminal
_STATUS_S = 5.0


class LocalCluster:
    """Starts, supervises, restarts and stops the processes of `config`.

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
        self.certs: Path | None = None  # folder of certificates, with `--tls`
        self._credentials: grpc.ChannelCredentials | None = None
        self.etcd: EmbeddedEtcd | None = None  # the cluster's own; None when it uses another
        self.etcd_address = ""  # host:port
        self.membership: Membership  # the workers that etcd lists
        self._say = say
        self._on_line = on_line
        self._programs = programs
        self._extra_args = extra_args
        self._env = env
        self._start_timeout_s = start_timeout_s
        self._supervisors: dict[str, Supervisor] = {}
        self._stack = AsyncExitStack()  # etcd, and the connection to it
        self._failed_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of the first router."""
        return self.addresses[0]

    @property
    def targets(self) -> str:
        """All routers, as the SDK takes them."""
        return ",".join(self.addresses)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Returns once every worker is READY and every router SERVING; raises DeadlineExceeded.

        A process that ended and is not going to be restarted is not waited for.
        """
        timeout_s = self._start_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await workers_ready(self.membership, self._worker_pids)
                for supervisor in [s for s in self._supervisors.values() if s.wanted]:
                    with contextlib.suppress(Unavailable):
                        await supervisor.ready()
        except TimeoutError:
            waiting = [s for s in self._supervisors.values() if s.wanted and not s.is_ready]
            missing = ", ".join(s.process.name for s in waiting) or "a worker's record in etcd"
            raise DeadlineExceeded(
                f"the cluster was not ready after {timeout_s:g} s; missing: {missing}"
            ) from None

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        self.processes[name].signal(signum)

    async def add_worker(self, role: str, share: resources.Share | None = None) -> str:
        """Starts one more "prefill" or "decode" worker, by default unpinned; returns its name."""
        name = f"{role}-{sum(process.role == role for process in self.processes.values())}"
        share = share or resources.Share((), 1)
        metrics_port = self._metrics_port(name, "127.0.0.1")
        args = commands.worker(
            self.config, self.etcd_address, role, share, metrics_port, self.certs
        )
        await self._launch(name, role, args, self._worker_ready)
        return name

    async def start_again(self, name: str) -> None:
        """Starts a process that ended and is not restarted by itself (`restart=False`)."""
        await self._supervisors[name].start()

    async def restart(self, name: str) -> int:
        """Drains a process and starts it again; returns how the old run ended: 0 after a drain.

        When it returns the process serves, and every router has found a restarted worker. Raises
        DeadlineExceeded or Unavailable when it does not come back.
        """
        process = self.processes[name]
        ran = process.running
        self._say(f"{name} restarting…" if ran else f"{name} starting again…")
        status = await self._supervisors[name].restart(self.config.drain_s + _RESTART_GRACE_S)
        if ran and status:
            self._say(f"warning: {name} did not drain: it ended with status {status}")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._supervisors[name].ready()
                if process.role != "router":
                    for address in self._routers.values():
                        await router_sees(address, process.pid, self._credentials)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name} is not back after {self._start_timeout_s:g} s"
            ) from None
        return status

    async def rolling_restart(self) -> dict[str, int]:
        """Restarts routers and workers, each when the one before serves again; see `restart`."""
        return {name: await self.restart(name) for name in list(self.processes)}

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
        config = self.config
        await asyncio.to_thread(check_model, config.engine)
        found = ports.consecutive(config.host, config.port, config.routers)
        self.addresses = tuple(f"{config.host}:{port}" for port in found)
        http_ports = [0] * config.routers
        if first := config.first_http_port:
            http_ports = ports.consecutive(config.host, first, config.routers, "--http-port")
            self.http_addresses = tuple(f"{config.host}:{port}" for port in http_ports)
        if config.tls:
            self._use_tls()
        await self._start_etcd()
        names = [f"prefill-{number}" for number in range(config.prefill)]
        names += [f"decode-{number}" for number in range(config.decode)]
        may_use_gpus = config.engine.device in ("auto", "cuda") and not config.engine.simulate
        gpus = await asyncio.to_thread(resources.count_gpus) if may_use_gpus else 0
        shares = resources.shares(config.engine, names, config.prefill, gpus, self._say)
        if any(share.device for share in shares):
            self._start_timeout_s = max(self._start_timeout_s, _GPU_START_S)
        for number, (port, http_port) in enumerate(zip(found, http_ports, strict=True)):
            name = "router" if config.routers == 1 else f"router-{number}"
            metrics_port = self._metrics_port(name, config.host)
            args = commands.router(
                config, self.etcd_address, port, http_port, metrics_port, self.certs
            )
            await self._launch(name, "router", args, self._router_ready)
        for name, share in zip(names, shares, strict=True):
            await self.add_worker(name.partition("-")[0], share)
        await self._ready_or_failed()

    def _use_tls(self) -> None:
        """Makes certificates; this process calls the others as the cluster's administrator."""
        folder = tempfile.TemporaryDirectory(prefix="baton-tls-")
        self._stack.callback(folder.cleanup)
        self.certs = Path(folder.name)
        certs.write(self.certs, [self.config.host])
        admin, key = self.certs / "admin.pem", self.certs / "admin-key.pem"
        self._credentials = tls.Credentials(admin, key, self.certs / "ca.pem").of_client()

    async def _start_etcd(self) -> None:
        if self.config.etcd is None:
            began = time.monotonic()
            self.etcd = await self._stack.enter_async_context(EmbeddedEtcd())
            self.etcd_address = self.etcd.address
            self._say(f"etcd ready in {time.monotonic() - began:.1f} s ({self.etcd_address})")
            if self.config.restart:
                keeping = asyncio.create_task(self.etcd.keep_running(self._say))
                self._stack.push_async_callback(cancelled, keeping)
        else:
            self.etcd_address = self.config.etcd
        registry = EtcdRegistry(self.config.registry(self.etcd_address))
        self._stack.push_async_callback(registry.close)
        self.membership = await self._stack.enter_async_context(registry.watch())

    async def _launch(
        self,
        name: str,
        role: str,
        args: Sequence[str],
        until_ready: Callable[[ChildProcess], Awaitable[str]],
    ) -> None:
        program = self._programs.get(name) or self._programs.get(role) or commands.PROGRAM
        extra = [*self._extra_args.get(role, ()), *self._extra_args.get(name, ())]
        argv = [*program, *args, "--name", name, *extra]
        on_line = partial(self._on_line, name) if self._on_line else lambda line: None
        process = self.processes[name] = ChildProcess(name, role, argv, self._env, on_line)
        supervisor = Supervisor(process, until_ready, self._process_ended, self._say)
        self._supervisors[name] = supervisor
        await supervisor.start()
        what = "starting…" if role == "router" else f"loading model {self.config.engine.model}…"
        self._say(f"{name} {what}")

    async def _worker_ready(self, process: ChildProcess) -> str:
        record = await worker_ready(self.membership, process.pid)
        what = f"{record.address}, pid {record.pid}, {record.blocks_total} KV blocks"
        return f"ready in {process.age_s:.1f} s as {record.incarnation} ({what})"

    async def _router_ready(self, process: ChildProcess) -> str:
        address = self._routers[process.name]
        await router_serving(address, self._credentials)
        return f"serving after {process.age_s:.1f} s ({address}, pid {process.pid})"

    def _metrics_port(self, name: str, host: str) -> int | None:
        """Where a new process serves its metrics: the port after the last one's."""
        if (first := self.config.metrics_port) is None:
            return None
        wanted = first + len(self.metrics) if first else 0
        (port,) = ports.consecutive(host, wanted, 1, "--metrics-port")
        self.metrics[name] = f"{host}:{port}"
        return port

    @property
    def _routers(self) -> dict[str, str]:
        """Addresses of the routers that run or are going to, by name."""
        names = [process.name for process in self.processes.values() if process.role == "router"]
        addresses = zip(names, self.addresses, strict=False)  # at the start some are missing
        return {name: address for name, address in addresses if self._supervisors[name].wanted}

    def _process_ended(self, process: ChildProcess) -> bool:
        """A process ended though that was not requested; whether it is started again."""
        if not self._failed_start.done():
            why = f"{process.ending} while the cluster was starting{self._last_output(process)}"
            self._failed_start.set_exception(Unavailable(why))
            return False
        if not self.config.restart:
            self._say(process.failure)
        return self.config.restart

    def _last_output(self, process: ChildProcess) -> str:
        """Why a process ended: our own error, else its last lines, unless they were shown."""
        last = process.log[-1] if process.log else ""
        if last.startswith(ERROR):
            return f": {last.removeprefix(ERROR)}"
        if self._on_line:
            return "; what it wrote is above" if last else " and wrote nothing"
        return f". Its last lines:\n{process.log_tail() or '(it wrote nothing)'}"

    async def _ready_or_failed(self) -> None:
        """Returns when the cluster is ready; raises as soon as one of its processes has ended."""
        ready = asyncio.create_task(self.wait_ready())
        try:
            await asyncio.wait([ready, self._failed_start], return_when=asyncio.FIRST_COMPLETED)
            if self._failed_start.done():
                self._failed_start.result()
            await ready
            self._failed_start.cancel()  # from now on an exit is no failed start
        finally:
            await cancelled(ready)

    def _worker_pids(self) -> set[int]:
        """Process ids of the workers that should be READY; 0 for one about to be restarted."""
        workers = [s for s in self._supervisors.values() if s.process.role != "router"]
        return {s.process.pid if s.process.running else 0 for s in workers if s.wanted}

    async def _stop_all(self) -> None:
        await asyncio.gather(*(supervisor.release() for supervisor in self._supervisors.values()))
        if self._failed_start.done():
            self._failed_start.cancelled() or self._failed_start.exception()  # seen
        timeout_s = self.config.drain_s + _STOP_GRACE_S
        try:
            for is_router in (True, False):
                group = [p for p in self.processes.values() if (p.role == "router") == is_router]
                await asyncio.gather(*(p.stop(timeout_s) for p in group if p.starts))
        finally:
            self.kill_all()
            await self._stack.aclose()


async def workers_ready(
    membership: Membership, pids: Callable[[], Collection[int]]
) -> dict[int, WorkerRecord]:
    """Returns once each process in `pids()` (evaluated after each change) is READY.

    The records of all READY workers, by pid. Raises Unavailable when the watch ends before.
    """
    async for records in membership.changes():
        ready = {r.pid: r for r in records.values() if r.state == WORKER_STATE_READY}
        if set(pids()) <= ready.keys():
            return ready
    raise Unavailable("the registry is no longer watched")


async def worker_ready(membership: Membership, pid: int) -> WorkerRecord:
    """The record of the process `pid` once it is READY; raises like `workers_ready`."""
    return (await workers_ready(membership, lambda: {pid}))[pid]


async def router_serving(address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
    """Returns once the router at `address` reports SERVING, however late it starts to listen."""
    backoff = Backoff()
    async with rpc.channel(address, credentials, role="router") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            call = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for response in call:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise rpc.error_of(error) from error
            finally:
                call.cancel()
            await backoff.wait()  # the stream broke: the router is starting again


async def router_sees(
    address: str, pid: int, credentials: grpc.ChannelCredentials | None = None
) -> None:
    """Returns once the router at `address` can place requests on the worker with this pid."""
    backoff = Backoff()
    async with rpc.channel(address, credentials, role="router") as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        while True:
            with contextlib.suppress(Unavailable, DeadlineExceeded), rpc.translated():
                status = await fleet.GetStatus(fleet_pb2.GetStatusRequest(), timeout=_STATUS_S)
                if any(w.record.pid == pid and w.state == "READY" for w in status.workers):
                    return
            await backoff.wait()
