"""One router as several processes at the same ports: what they have in common, and their parent."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from baton import tls
from baton.config import RouterConfig
from baton.local import commands, ports, supervisor
from baton.local.process import ChildProcess
from baton.local.supervisor import Supervisor, echo
from baton.registry.backoff import Backoff
from baton.v1 import fleet_pb2
from router.shared_state import SharedState

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # at most between two looks at a process's status
_RESTART_TIMEOUT_S = 120.0


class RouterProcess(NamedTuple):
    """One of a router's processes, as their parent sees it."""

    address: str  # of all of them
    shared: SharedState
    number: int

    @property
    def args(self) -> list[str]:
        """What tells the process that it is one of several."""
        return ["--process-of", self.shared.path, "--process", str(self.number)]

    def status(self) -> fleet_pb2.GetStatusResponse | None:
        """What it says of itself; None before it serves. Of workers there are pids and states."""
        return self.shared.status(self.number)

    def forget(self) -> None:
        """It has ended: what it ran is given back to tenants."""
        self.shared.forget(self.number)


class SharedPorts:
    """Ports and memory that a router's processes have in common, until `close`."""

    def __init__(self, host: str, port: int, http_port: int, processes: int) -> None:
        """Port 0 takes a free one; HTTP's is none then. Raises ConfigError when one is in use."""
        with ExitStack() as stack:
            self.port, self.http_port = port, http_port
            # Held, because another server of the same user could share a port without a word.
            held = stack.enter_context(ports.hold(host, port))
            self.port = held.getsockname()[1]
            if http_port:
                stack.enter_context(ports.hold(host, http_port, "--http-port"))
            self._shared = SharedState("", processes)
            stack.callback(self._shared.close)
            self._stack = stack.pop_all()
        self.address = f"{host}:{self.port}"

    def process(self, number: int) -> RouterProcess:
        return RouterProcess(self.address, self._shared, number)

    def close(self) -> None:
        """After the processes have ended."""
        self._stack.close()


async def run(config: RouterConfig) -> int:
    """Runs a router's processes until SIGINT or SIGTERM, then drains them; see `supervisor.run`."""
    tls.use_config(config, config.insecure)
    tls.current().check_exposed(config.host)

    async def start(stack: AsyncExitStack) -> Supervisor:
        router = await stack.enter_async_context(_RouterProcesses(config))
        log.info("%d processes serve at %s", config.router_processes, router.address)
        return router

    return await supervisor.run(start, log.info)


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
        self._all: dict[str, RouterProcess] = {}

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
            one = self._all[name] = shared.process(number)
            own = replace(config, name=name, port=shared.port, metrics_port=page)
            argv = [*commands.PROGRAM, *commands.arguments("router", own), *one.args]
            on_line = partial(echo, name if config.log_format == "text" else "")
            await self._launch(ChildProcess(name, "router", argv, {}, on_line, one.forget))
        await self._until(lambda: all(process.is_ready for process in self.processes.values()))

    async def _serves(self, process: ChildProcess) -> str:
        """It listens; and once any of them can place requests, it can, too."""
        one, backoff = self._all[process.name], Backoff(most_s=_LOOK_S)
        while True:
            states = {n: status.router.state for n, other in self._all.items()
                      if (status := other.status())}  # fmt: skip
            mine = states.get(process.name)
            if mine and (mine == "SERVING" or "SERVING" not in states.values()):
                return f"takes calls at {one.address} (pid {process.pid})"
            await backoff.wait()

    async def _is_back(self, process: ChildProcess) -> None:
        """Others do not look for it."""
