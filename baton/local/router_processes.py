"""A router that runs as several processes at the same ports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from baton.config import RouterConfig, join_address
from baton.config.options import MAX_PORT
from baton.errors import ConfigError
from baton.local import commands, ports, supervisor
from baton.local.ports import Listener
from baton.local.process import ChildProcess
from baton.local.supervisor import Supervisor, echo
from baton.net import http_server, tls
from baton.net.backoff import Backoff
from baton.v1 import fleet_pb2
from router.shared_state import SharedState

log = logging.getLogger(__name__)

_LOOK_S = 0.05  # longest time between two reads of a process's status
_RESTART_TIMEOUT_S = 120.0


@dataclass(eq=False, kw_only=True)
class RouterProcess(ChildProcess):
    """One of a router's processes, possibly the only one."""

    address: str  # of the router
    shared: SharedState
    number: int

    @property
    def command(self) -> list[str]:
        """The command line with the options of a process that shares its ports."""
        shared = ["--process-of", self.shared.path, "--process", str(self.number)]
        return [*self.argv, *shared]

    def successor(self) -> Self:
        """A new process, which uses another row of the shared memory."""
        new = super().successor()
        new.number = self.shared.successor(self.number)
        return new

    def status(self) -> fleet_pb2.GetStatusResponse | None:
        """Its status, with workers' pids, hosts and states only; None before it serves."""
        return self.shared.status(self.number)

    def on_end(self) -> None:
        """Releases what its requests had counted against tenants' limits."""
        self.shared.forget(self.number)


class SharedPorts:
    """Ports and shared memory of a router's processes, until `close`."""

    def __init__(self, host: str, port: int, http_port: int, processes: int) -> None:
        """Port 0 takes a free one; HTTP port 0 is none. Raises ConfigError if one is in use."""
        with ExitStack() as stack:
            self.port, self.http_port = port, http_port
            # Reserved, because another server of the same user could share a port unnoticed.
            held = stack.enter_context(ports.hold(host, port))
            self.port = held.getsockname()[1]
            if http_port:
                stack.enter_context(ports.hold(host, http_port, "--http-port"))
            self._shared = SharedState("", processes)
            stack.callback(self._shared.close)
            self._stack = stack.pop_all()
        self.address = join_address(host, self.port)
        self._listen = partial(http_server.listen, host, http_port, "HTTP", "--http-port")

    def process(
        self,
        number: int,
        name: str,
        argv: list[str],
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        metrics: Listener | None,
    ) -> RouterProcess:
        """The process of this number, from 0; it serves metrics if it has a port for them."""
        listeners = [metrics] if metrics else []
        if self.http_port:
            # Each has its own accept queue: the kernel spreads connections evenly.
            listeners.append(Listener(partial(self._listen, shared=True)))
        return RouterProcess(
            name, "router", argv, env, on_line, listeners,
            address=self.address, shared=self._shared, number=number,
        )  # fmt: skip

    def close(self) -> None:
        """Frees them; the processes must have ended."""
        self._stack.close()


async def run(config: RouterConfig) -> int:
    """Runs a router's processes until SIGINT or SIGTERM, then drains them; see `supervisor.run`.

    Raises ConfigError if their metrics ports and the router's other ports overlap.
    """
    tls.current().check_exposed(config.host)
    _check_ports(config)

    async def start(stack: AsyncExitStack) -> Supervisor:
        router = await stack.enter_async_context(_RouterProcesses(config))
        log.info("%d processes serve at %s", config.router_processes, router.address)
        return router

    return await supervisor.run(start, log.info)


def _check_ports(config: RouterConfig) -> None:
    """Raises ConfigError if the ports of metrics are none, or those of something else."""
    first, count = config.metrics_port, config.router_processes
    if not first:
        return
    last = first + count - 1
    if last > MAX_PORT:
        raise ConfigError(f"--metrics-port {first} leaves no ports for {count} processes")
    others = {"port": config.port, "http-port": config.http_port, "health-port": config.health_port}
    for name, port in others.items():
        if port and first <= port <= last:
            raise ConfigError(
                f"--metrics-port {first} and --{name} {port}: {count} processes serve metrics at "
                f"{first} to {last}, one each; choose a --{name} or a --metrics-port outside"
            )


class _RouterProcesses(Supervisor):
    def __init__(self, config: RouterConfig) -> None:
        super().__init__(
            say=log.info,
            shows_output=True,
            restart=True,
            drain_s=config.drain_s,
            start_timeout_s=_RESTART_TIMEOUT_S,
        )
        self._config = config

    async def _start(self) -> None:
        config, count = self._config, self._config.router_processes
        shared = SharedPorts(config.host, config.port, config.http_port, count)
        self._stack.callback(shared.close)
        self.address = shared.address
        pages: list[int | None] = [None] * count
        if config.metrics_port is not None:
            pages[:] = ports.consecutive(config.host, config.metrics_port, count, "--metrics-port")
        for number, page in enumerate(pages):
            name = f"{config.name or 'router'}-{number}"
            own = replace(config, name=name, port=shared.port, metrics_port=page)
            argv = [*commands.PROGRAM, *commands.arguments("router", own)]
            on_line = partial(echo, name if config.log_format == "text" else "")
            metrics = ports.metrics_listener(config.host, page)
            await self._launch(shared.process(number, name, argv, {}, on_line, metrics))
        await self._until(lambda: all(process.is_ready for process in self.processes.values()))

    async def _serves(self, process: ChildProcess) -> str:
        """Waits until it listens: when one process can place requests, the others can, too."""
        assert isinstance(process, RouterProcess)
        backoff = Backoff(most_s=_LOOK_S)
        while True:
            every = [one for one in {process, *self._all} if isinstance(one, RouterProcess)]
            states = {one: status.router.state for one in every if (status := one.status())}
            mine = states.get(process)
            if mine and (mine == "SERVING" or "SERVING" not in states.values()):
                return f"takes calls at {process.address} (pid {process.pid})"
            await backoff.wait()

    async def _is_back(self, process: ChildProcess) -> None:
        """Returns at once: other processes do not depend on it."""

    def _leave_s(self, process: ChildProcess) -> float:
        return self._config.limits.default_timeout_s
