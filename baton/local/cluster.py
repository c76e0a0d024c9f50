"""A cluster on this machine: etcd, routers, prefill and decode workers, each a process.

`async with LocalCluster(config)` enters when the cluster serves, and leaves nothing behind. Used by
`baton up`, `baton demo` and the cluster tests. It handles processes, not requests.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from baton.config import ClusterConfig, ModelSource, host_id, join_address
from baton.errors import ConfigError, DeadlineExceeded, Unavailable
from baton.local import certs, commands, ports, resources
from baton.local.etcd_process import EmbeddedEtcd
from baton.local.model_check import check_model
from baton.local.process import ChildProcess
from baton.local.router_processes import RouterProcess, SharedPorts
from baton.local.supervisor import Supervisor
from baton.net import tls
from baton.net.backoff import Backoff
from baton.net.tasks import cancelled
from baton.registry import EtcdRegistry, Membership
from baton.v1 import fleet_pb2
from baton.v1.common_pb2 import WORKER_STATE_READY, WorkerRecord

log = logging.getLogger(__name__)

_GPU_START_S = 900.0  # a large model's weights come from a disk, and kernels are compiled
_LOOK_S = 0.05  # longest time between two polls of a router

Condition = Callable[[fleet_pb2.GetStatusResponse], bool]


class LocalCluster(Supervisor):
    """Starts, supervises, restarts and stops the processes of `config`.

    say: called with a line for each event.
    on_line: called with a process's name and each line of its output.
    programs: commands to run instead of `python -m baton`, with the same arguments, by process name
        ("decode-0") or role ("prefill", "decode", "mixed", "router").
    extra_args: arguments to append, by the same keys.
    env: variables to add to every process's environment.
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
        super().__init__(
            say=say,
            shows_output=on_line is not None,
            restart=config.restart,
            drain_s=config.drain_s,
            start_timeout_s=start_timeout_s,
        )
        self.config = config
        self.addresses: tuple[str, ...] = ()  # host:port of each router
        self.http_addresses: tuple[str, ...] = ()  # host:port of the HTTP APIs; empty if off
        self.metrics: dict[str, str] = {}  # host:port by process name, where metrics are served
        self.certs: Path | None = None  # folder of certificates, with `--tls`
        self.etcd: EmbeddedEtcd | None = None  # the cluster's own; None when it uses another
        self.etcd_address = ""  # host:port
        self.membership: Membership  # the workers that etcd lists
        self._on_line = on_line
        self._programs = programs
        self._extra_args = extra_args
        self._env = env
        self._on_gpus: set[str] = set()  # names of workers

    @property
    def address(self) -> str:
        """host:port of the first router."""
        return self.addresses[0]

    @property
    def targets(self) -> str:
        """Addresses of all routers, separated by commas, as the SDK takes them."""
        return ",".join(self.addresses)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Returns once every router can use every worker; raises DeadlineExceeded.

        Processes that ended and will not be restarted are ignored; while the cluster starts, their
        end raises Unavailable.
        """
        timeout_s = self._start_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: all(p.is_ready for p in self._wanted()))
                await workers_ready(self.membership, self._worker_pids)
                for router in self._routers:
                    await router_says(sees(self._worker_pids()), router)
        except TimeoutError:
            waiting = [process.name for process in self._wanted() if not process.is_ready]
            missing = ", ".join(waiting) or "a worker's record in etcd"
            raise DeadlineExceeded(
                f"the cluster was not ready after {timeout_s:g} s; missing: {missing}"
            ) from None

    async def add_worker(
        self, role: str, share: resources.Share | None = None, source: ModelSource | None = None
    ) -> str:
        """Starts one more worker with this role, by default unpinned and of the first model;
        returns its name."""
        source = source or self.config.sources[0]
        name = f"{role}-{sum(process.role == role for process in self.processes.values())}"
        share = share or resources.Share((), 1)
        if share.device:
            self._on_gpus.add(name)
        metrics_port = self._metrics_port(name, "127.0.0.1")
        args = commands.worker(
            self.config, self.etcd_address, role, share, metrics_port, self.certs, source
        )
        metrics = ports.metrics_listener("127.0.0.1", metrics_port)
        argv, surroundings = self._command(name, role, args), self._surroundings(name)
        listeners = [metrics] if metrics else []
        await self._launch(ChildProcess(name, role, argv, *surroundings, listeners))
        self._say(f"{name} loading model {source.path}…")
        return name

    async def _start(self) -> None:
        config = self.config
        if not (config.tls or config.insecure or tls.is_loopback(config.host)):
            raise ConfigError(
                f"--host {config.host} can be reached from other machines: give --tls, which makes "
                "certificates, or --insecure where the network is private"
            )
        for source in config.sources:
            for tp in {config.ranks[role] for role, number in config.workers.items() if number}:
                engine = replace(config.engine, model=source.path, tp=tp)
                await asyncio.to_thread(check_model, engine)
        found = ports.consecutive(config.host, config.port, config.routers)
        self.addresses = tuple(join_address(config.host, port) for port in found)
        http_ports = [0] * config.routers
        if first := config.first_http_port:
            http_ports = ports.consecutive(config.host, first, config.routers, "--http-port")
            self.http_addresses = tuple(join_address(config.host, port) for port in http_ports)
        if config.tls:
            self._use_tls()
        await self._start_etcd()
        models = config.sources
        of_role = {role: number * len(models) for role, number in config.workers.items()}
        names = [f"{role}-{n}" for role, number in of_role.items() for n in range(number)]
        sources = [
            one for number in config.workers.values() for one in models for _ in range(number)
        ]
        may_use_gpus = config.engine.device in ("auto", "cuda") and not config.engine.simulate
        gpus = await asyncio.to_thread(resources.count_gpus) if may_use_gpus else 0
        ranks = [config.ranks[name.partition("-")[0]] for name in names]
        number = of_role["prefill"]
        shares = resources.shares(config.engine, names, number, gpus, self._say, ranks)
        if any(share.device for share in shares):
            self._start_timeout_s = max(self._start_timeout_s, _GPU_START_S)
        for number, (port, http_port) in enumerate(zip(found, http_ports, strict=True)):
            name = "router" if config.routers == 1 else f"router-{number}"
            await self._start_router(name, port, http_port)
        for name, share, source in zip(names, shares, sources, strict=True):
            await self.add_worker(name.partition("-")[0], share, source)
        await self.wait_ready()

    async def _start_router(self, name: str, port: int, http_port: int) -> None:
        """Starts one router with its `router_processes` processes."""
        config, processes = self.config, self.config.router_processes
        shared = SharedPorts(config.host, port, http_port, processes)
        self._stack.callback(shared.close)
        for number in range(processes):
            each = f"{name}-{number}" if processes > 1 else name
            metrics_port = self._metrics_port(each, config.host)
            args = commands.router(
                config, self.etcd_address, port, http_port, metrics_port, self.certs
            )
            argv, surroundings = self._command(each, "router", args), self._surroundings(each)
            metrics = ports.metrics_listener(config.host, metrics_port)
            await self._launch(shared.process(number, each, argv, *surroundings, metrics))
            self._say(f"{each} starting…")

    def _use_tls(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="baton-tls-")
        self._stack.callback(folder.cleanup)
        self.certs = Path(folder.name)
        certs.write(self.certs, [self.config.host])

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

    def _command(self, name: str, role: str, args: Sequence[str]) -> list[str]:
        program = self._programs.get(name) or self._programs.get(role) or commands.PROGRAM
        extra = [*self._extra_args.get(role, ()), *self._extra_args.get(name, ())]
        return [*program, *args, "--name", name, *extra]

    def _surroundings(self, name: str) -> tuple[Mapping[str, str], Callable[[str], None]]:
        """A process's additional environment, and the consumer of its output."""
        on_line = partial(self._on_line, name) if self._on_line else lambda line: None
        return self._env, on_line

    async def _serves(self, process: ChildProcess) -> str:
        if isinstance(process, RouterProcess):
            await router_says(serves, process)
            return f"serving after {process.age_s:.1f} s ({process.address}, pid {process.pid})"
        ready = await workers_ready(self.membership, lambda: {process.pid})
        record = ready[process.pid]
        where = f"{record.address}, pid {record.pid}, {record.blocks_total} KV blocks"
        return f"ready in {process.age_s:.1f} s as {record.incarnation} ({where})"

    async def _is_back(self, process: ChildProcess) -> None:
        if process.role != "router":
            for router in self._routers:
                await router_says(sees({process.pid}), router)

    def _has_room_for_two(self, process: ChildProcess) -> bool:
        return process.name not in self._on_gpus  # the GPU's memory is fully assigned

    def _leave_s(self, process: ChildProcess) -> float:
        return self.config.limits.default_timeout_s if process.role == "router" else 0.0

    def _groups(self) -> Sequence[Sequence[ChildProcess]]:
        """Routers before workers."""
        return [[p for p in self._all if (p.role == "router") == first] for first in (True, False)]

    def _metrics_port(self, name: str, host: str) -> int | None:
        """The metrics port of a new process: the one after the last process's."""
        if (first := self.config.metrics_port) is None:
            return None
        wanted = first + len(self.metrics) if first else 0
        (port,) = ports.consecutive(host, wanted, 1, "--metrics-port")
        self.metrics[name] = join_address(host, port)
        return port

    @property
    def _routers(self) -> list[RouterProcess]:
        """Routers that run or will be restarted."""
        return [process for process in self._wanted() if isinstance(process, RouterProcess)]

    def _worker_pids(self) -> set[int]:
        """Process ids of the workers that should be READY; 0 for one that will be restarted."""
        workers = [process for process in self._wanted() if process.role != "router"]
        return {process.pid if process.running else 0 for process in workers}


async def workers_ready(
    membership: Membership, pids: Callable[[], Collection[int]]
) -> dict[int, WorkerRecord]:
    """Waits until each process in `pids()` (evaluated after each change) is READY.

    Returns the records of this host's READY workers by pid; the etcd may have workers of other
    hosts and containers, whose pids mean nothing here. Raises Unavailable if the watch ends before.
    """
    here = host_id()
    async for records in membership.changes():
        ready = {
            r.pid: r
            for r in records.values()
            if r.state == WORKER_STATE_READY and r.host_id == here
        }
        if set(pids()) <= ready.keys():
            return ready
    raise Unavailable("the registry is no longer watched")


def serves(status: fleet_pb2.GetStatusResponse) -> bool:
    """Whether a router reports that it accepts requests."""
    return status.router.state == "SERVING"


def sees(pids: Set[int]) -> Condition:
    """Condition that a router can place requests on this host's workers with these pids."""
    here = host_id()
    return lambda status: (
        pids
        <= {w.record.pid for w in status.workers if w.state == "READY" and w.record.host_id == here}
    )


async def router_says(condition: Condition, router: RouterProcess) -> None:
    """Waits until a router's status meets `condition`, also for one that is being started."""
    backoff = Backoff(most_s=_LOOK_S)
    while (status := router.status()) is None or not condition(status):
        await backoff.wait()
