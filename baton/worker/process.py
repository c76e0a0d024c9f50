"""Runs a worker as a process: event loop, registry, tracing, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import uvloop

from baton import telemetry
from baton.config import WorkerConfig
from baton.engine import build
from baton.engine.backends import cpu
from baton.engine.kv_cache import Allocate
from baton.errors import ConfigError
from baton.metrics.server import serving
from baton.registry import EtcdRegistry
from baton.server import EventLoop
from baton.worker.node import Node, Role
from kvtransfer import copier
from kvtransfer.pool import KvPool
from kvtransfer.transports.cuda import CudaArea
from kvtransfer.transports.shm import SharedMemoryArea

log = logging.getLogger(__name__)

MakeRole = Callable[[Node, build.Loaded, KvPool], Role]


def run(config: WorkerConfig, make_role: MakeRole) -> int:
    """Runs one worker until it has drained; 0. Raises ConfigError when it cannot begin."""
    return uvloop.run(_run(config, make_role), loop_factory=EventLoop)


async def _run(config: WorkerConfig, make_role: MakeRole) -> int:
    memory = PoolMemory(config.transport)

    def load() -> build.Loaded:
        return _load(config, memory)

    def role(node: Node, loaded: build.Loaded) -> Role:
        return make_role(node, loaded, KvPool(loaded.runner.pool, memory.area))

    service = f"baton-{config.role}"
    instance = {"service.instance.id": config.incarnation}
    trace = telemetry.setup(service, config.otlp, instance, config.trace_sample)
    registry = EtcdRegistry(config.registry)
    try:
        async with contextlib.AsyncExitStack() as stack:
            node = Node(config, registry, trace)
            stack.callback(node.metrics.close)
            if config.metrics_port is not None:
                page = serving(node.metrics.render, config.host, config.metrics_port)
                await stack.enter_async_context(page)
            await node.run(load, role)
    finally:
        await registry.close()
        await asyncio.to_thread(trace.close)
        memory.close()
    return 0


def _load(config: WorkerConfig, memory: PoolMemory) -> build.Loaded:
    """Everything slow, on a thread: the event loop keeps the worker's lease meanwhile."""
    settings = config.engine
    if config.role == "prefill":
        # Its steps are chunks: what only decode steps use would take memory and be idle.
        settings = replace(settings, graphs=False, overlap=False)
    device = build.device_of(settings)
    with cpu.pinned_to(settings.cpus):
        loaded = build.load(settings, memory.on(device))
        if not settings.simulate:
            memory.touch()  # KV of simulated models is small; leave the memory free
        copier.prepare(KvPool(loaded.runner.pool, memory.area))
        build.warm_up(loaded)
    return loaded


class PoolMemory:
    """Allocates a worker's KV pool: where workers of its machine can write, if possible."""

    def __init__(self, transport: str) -> None:
        self.area: SharedMemoryArea | CudaArea | None = None
        self._transport = transport

    def on(self, device: torch.device) -> Allocate:
        """A function that allocates zeroed memory of a device, to be called once."""
        return self._shared if device.type == "cpu" else partial(self._on_gpu, device=device)

    def touch(self) -> None:
        """Allocates a CPU pool's pages now, near the calling thread."""
        if isinstance(self.area, SharedMemoryArea):
            self.area.touch()

    def close(self) -> None:
        """Frees memory that outlives the process. A GPU's does not, and must not be freed earlier:
        what another process has open may be written until then."""
        if isinstance(self.area, SharedMemoryArea):
            self.area.close()

    def _shared(self, num_bytes: int) -> torch.Tensor:
        self.area = SharedMemoryArea(num_bytes)
        return self.area.tensor

    def _on_gpu(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        if self._transport in ("auto", "cuda_ipc"):
            try:
                self.area = CudaArea(num_bytes, device)
            except OSError as error:
                if self._transport == "cuda_ipc":
                    raise ConfigError(f"--transport cuda_ipc: {error}") from error
                log.warning("other processes cannot write into this GPU's KV: %s", error)
            else:
                return self.area.tensor
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
