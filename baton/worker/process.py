"""Runs a worker as a process: event loop, registry, tracing, memory of the KV pool, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial

import torch
import uvloop

from baton import telemetry
from baton.config import WorkerConfig
from baton.engine import build
from baton.engine.backends import cpu
from baton.engine.settings import device_of
from baton.errors import ConfigError
from baton.metrics.server import serving
from baton.registry import EtcdRegistry
from baton.server import EventLoop
from baton.worker.node import Node
from kvtransfer import copier
from kvtransfer.pool import KvPool
from kvtransfer.transports.cuda import CudaArea
from kvtransfer.transports.shm import SharedMemoryArea

log = logging.getLogger(__name__)


def run(config: WorkerConfig, role: type[Node]) -> int:
    """Runs one worker until it has drained; 0. Raises ConfigError when it cannot begin."""
    return uvloop.run(_run(config, role), loop_factory=EventLoop)


async def _run(config: WorkerConfig, role: type[Node]) -> int:
    memory = PoolMemory(config.transport)
    service = f"baton-{config.role}"
    instance = {"service.instance.id": config.incarnation}
    trace = telemetry.setup(service, config.otlp, instance, config.trace_sample)
    registry = EtcdRegistry(config.registry)
    try:
        async with contextlib.AsyncExitStack() as stack:
            node = role(config, registry, trace)
            stack.callback(node.metrics.close)
            if config.metrics_port is not None:
                page = serving(node.metrics.render, config.host, config.metrics_port)
                await stack.enter_async_context(page)
            await node.run(partial(_load, config, memory))
    finally:
        await registry.close()
        await asyncio.to_thread(trace.close)
        memory.close()
    return 0


def _load(config: WorkerConfig, memory: PoolMemory) -> tuple[build.Loaded, KvPool]:
    """Everything slow, on a thread: the event loop keeps the worker's lease meanwhile."""
    settings = config.engine
    if config.role == "prefill":
        # Its steps are chunks: what only decode steps use would take memory and be idle.
        settings = replace(settings, graphs=False, overlap=False)
    with cpu.pinned_to(settings.cpus):
        loaded = build.load(settings, partial(memory.allocate, device_of(settings)))
        if isinstance(memory.area, SharedMemoryArea) and not settings.simulate:
            memory.area.touch()  # KV of simulated models is small; leave the memory free
        pool = KvPool(loaded.runner.pool, memory.area)
        copier.prepare(pool)
        build.warm_up(loaded)
    return loaded, pool


class PoolMemory:
    """Allocates a worker's KV pool: where workers of its machine can write, if possible."""

    def __init__(self, transport: str) -> None:
        self.area: SharedMemoryArea | CudaArea | None = None
        self._transport = transport

    def allocate(self, device: torch.device, num_bytes: int) -> torch.Tensor:
        """Zeroed memory of a device; to be called once."""
        if device.type == "cpu":
            self.area = SharedMemoryArea(num_bytes)
        elif self._transport in ("auto", "cuda_ipc"):
            try:
                self.area = CudaArea(num_bytes, device)
            except OSError as error:
                if self._transport == "cuda_ipc":
                    raise ConfigError(f"--transport cuda_ipc: {error}") from error
                log.warning("other processes cannot write into this GPU's KV: %s", error)
        if self.area is None:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self.area.tensor

    def close(self) -> None:
        """Frees memory that outlives the process. A GPU's does not, and must not be freed earlier:
        what another process has open may be written until then."""
        if isinstance(self.area, SharedMemoryArea):
            self.area.close()
