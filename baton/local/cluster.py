"""A whole cluster on this machine: etcd, routers, prefill and decode workers, each a process.

`async with LocalCluster(config)` returns when the cluster serves and leaves nothing behind. Used by
`baton up`, `baton demo` and the cluster tests. It knows processes, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

import grpc

from baton import rpc, tls
from baton.config import ClusterConfig
from baton.errors import DeadlineExceeded, Unavailable
from baton.local import certs, commands, ports, resources
from baton.local.etcd import EmbeddedEtcd
from baton.local.model_check import check_model
from baton.local.process import ChildProcess, cancelled
from baton.registry import EtcdRegistry, Membership
from baton.registry.backoff import Backoff
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from baton.v1.common_pb2 import WORKER_STATE_READY, WorkerRecord

log = logging.getLogger(__name__)

_GPU_START_S = 900.0  # a large model's weights come from a disk, and kernels are compiled
_STOP_GRACE_S = 3.0  # beyond the drain time, before SIGKILL
_RESTART_GRACE_S = 15.0  # the same where no user waits at a terminal
_STATUS_S = 5.0
_LOOK_S = 0.2  # at most between two looks at a router
_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 10.0
_HEALTHY_S = 10.0  # a process that was ready for this long starts again as if for the first time


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
        # With which this process asks routers: those with a tenants file answer operators alone.
        self._api_key = secrets.token_urlsafe()
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
        self._supervisors: dict[str, asyncio.Task[None]] = {}  # what keeps each process running
        self._changed = asyncio.Event()  # a process became ready, or ended
        self._starting = True  # the cluster: a process that ends now is a failed start
        self._stack = AsyncExitStack()  # etcd, and the connection to it
        self._stop: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of the first router."""
        return self.addresses[0]

    @property
    def _access(self) -> tuple[grpc.ChannelCredentials | None, str]:
        return self._credentials, self._api_key

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
        """Returns once every router can use every worker; raises DeadlineExceeded.

        A process that ended and is not going to be restarted is not waited for, but while the
        cluster starts its end raises Unavailable.
        """
        timeout_s = self._start_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: all(p.is_ready for p in self._wanted()))
                await workers_ready(self.membership, self._worker_pids)
                for address in self._routers.values():
                    await router_sees(address, self._worker_pids(), *self._access)
        except TimeoutError:
            waiting = [process.name for process in self._wanted() if not process.is_ready]
            missing = ", ".join(waiting) or "a worker's record in etcd"
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
        await self._launch(name, role, args)
        return name

    async def start_again(self, name: str) -> None:
        """Starts a process that does not run, and keeps it running from now on."""
        process = self.processes[name]
        await cancelled(self._supervisors.get(name))
        process.wanted = True
        await process.start()
        self._supervisors[name] = asyncio.create_task(
            self._supervise(process), name=f"supervisor of {name}"
        )

    async def restart(self, name: str) -> int:
        """Drains a process and starts it again; returns how the old run ended: 0 after a drain.

        When it returns the process serves, and every router has found a restarted worker. Raises
        DeadlineExceeded or Unavailable when it does not come back.
        """
        process = self.processes[name]
        ran = process.running
        self._say(f"{name} restarting…" if ran else f"{name} starting again…")
        await cancelled(self._supervisors[name])  # this end is requested
        status = await process.stop(self.config.drain_s + _RESTART_GRACE_S)
        await self.start_again(name)
        if ran and status:
            self._say(f"warning: {name} did not drain: it ended with status {status}")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until(lambda: process.is_ready or not process.wanted)
                if not process.wanted:
                    raise Unavailable(process.failure)
                if process.role != "router":
                    for address in self._routers.values():
                        await router_sees(address, {process.pid}, *self._access)
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
                config,
                self.etcd_address,
                port,
                http_port,
                metrics_port,
                self.certs,
                self._api_key,
            )
            await self._launch(name, "router", args)
        for name, share in zip(names, shares, strict=True):
            await self.add_worker(name.partition("-")[0], share)
        await self.wait_ready()
        self._starting = False

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

    async def _launch(self, name: str, role: str, args: Sequence[str]) -> None:
        program = self._programs.get(name) or self._programs.get(role) or commands.PROGRAM
        extra = [*self._extra_args.get(role, ()), *self._extra_args.get(name, ())]
        argv = [*program, *args, "--name", name, *extra]
        on_line = partial(self._on_line, name) if self._on_line else lambda line: None
        self.processes[name] = ChildProcess(name, role, argv, self._env, on_line)
        await self.start_again(name)
        what = "starting…" if role == "router" else f"loading model {self.config.engine.model}…"
        self._say(f"{name} {what}")

    async def _supervise(self, process: ChildProcess) -> None:
        """Starts it again whenever it ends, after a delay that doubles until it served a while."""
        failures = 0
        while True:
            noting = asyncio.create_task(self._note_ready(process))
            try:
                await process.wait()
            finally:
                await cancelled(noting)
            # Counted from ready, not from the start: a large model may take minutes to load.
            healthy = process.ready_at and time.monotonic() - process.ready_at >= _HEALTHY_S
            failures = 1 if healthy else failures + 1
            process.wanted = self.config.restart and not self._starting
            self._changed.set()
            if self._starting:
                return
            if not process.wanted:
                self._say(process.failure)
                return
            delay_s = restart_delay_s(failures)
            self._say(f"{process.failure}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await process.start()

    async def _note_ready(self, process: ChildProcess) -> None:
        if process.role == "router":
            address = self._routers[process.name]
            await router_serving(address, *self._access)
            what = f"serving after {process.age_s:.1f} s ({address}, pid {process.pid})"
        else:
            ready = await workers_ready(self.membership, lambda: {process.pid})
            record = ready[process.pid]
            where = f"{record.address}, pid {record.pid}, {record.blocks_total} KV blocks"
            what = f"ready in {process.age_s:.1f} s as {record.incarnation} ({where})"
        process.ready_at = time.monotonic()
        self._changed.set()
        self._say(f"{process.name} {what}")

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Returns when it is so; raises Unavailable if a process ends while the cluster starts."""
        while True:
            failed = next((p for p in self.processes.values() if not p.wanted), None)
            if failed and self._starting:
                # What it wrote is not repeated where it was shown.
                log = "" if self._on_line else f"; its last lines:\n{failed.log_tail()}"
                raise Unavailable(failed.failure + log)
            if is_so():
                return
            self._changed.clear()
            await self._changed.wait()

    def _wanted(self) -> list[ChildProcess]:
        return [process for process in self.processes.values() if process.wanted]

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
        routers = [process for process in self.processes.values() if process.role == "router"]
        addresses = zip(routers, self.addresses, strict=False)  # at the start some are missing
        return {router.name: address for router, address in addresses if router.wanted}

    def _worker_pids(self) -> set[int]:
        """Process ids of the workers that should be READY; 0 for one about to be restarted."""
        workers = [process for process in self._wanted() if process.role != "router"]
        return {process.pid if process.running else 0 for process in workers}

    async def _stop_all(self) -> None:
        await asyncio.gather(*map(cancelled, self._supervisors.values()))
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


def restart_delay_s(failures: int) -> float:
    """Seconds before a process that failed for the nth time in a row is started again."""
    return min(_FIRST_DELAY_S * 2.0 ** min(failures - 1, 30), _LAST_DELAY_S)


async def router_serving(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    api_key: str | None = None,
) -> None:
    """Returns once the router at `address` reports SERVING, however late it starts to listen."""
    access = credentials, api_key
    await _router_says(address, *access, lambda status: status.router.state == "SERVING")


async def router_sees(
    address: str,
    pids: Set[int],
    credentials: grpc.ChannelCredentials | None = None,
    api_key: str | None = None,
) -> None:
    """Returns once the router at `address` can place requests on the workers with these pids."""
    await _router_says(
        address,
        credentials,
        api_key,
        lambda status: pids <= {w.record.pid for w in status.workers if w.state == "READY"},
    )


async def _router_says(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    api_key: str | None,
    is_so: Callable[[fleet_pb2.GetStatusResponse], bool],
) -> None:
    backoff = Backoff(most_s=_LOOK_S)
    async with rpc.channel(address, credentials, role="router") as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        while True:
            with contextlib.suppress(Unavailable, DeadlineExceeded), rpc.translated():
                request, key = fleet_pb2.GetStatusRequest(), rpc.bearer(api_key)
                if is_so(await fleet.GetStatus(request, timeout=_STATUS_S, metadata=key)):
                    return
            await backoff.wait()
