"""Runs a worker as a process: event loop, registry, tracing, exit status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import torch
import uvloop

from baton import telemetry
from baton.config import WorkerConfig
from baton.engine import build, cores
from baton.metrics.server import serving
from baton.registry import EtcdRegistry
from baton.worker.node import Node, Role
from baton.worker.service import WorkerServicer
from kvtransfer import shm
from kvtransfer.pool import KvPool
from kvtransfer.shm import SharedMemoryArea

MakeRole = Callable[[Node, build.Loaded, KvPool], Role]


def run(config: WorkerConfig, make_role: MakeRole) -> int:
    """Runs one worker until it has drained; 0. Raises ConfigError when it cannot begin."""
    return uvloop.run(_run(config, make_role))


async def _run(config: WorkerConfig, make_role: MakeRole) -> int:
    area: SharedMemoryArea | None = None

    def allocate(num_bytes: int) -> torch.Tensor:
        nonlocal area
        area = shm.allocate(num_bytes)
        return area.tensor

    def load() -> build.Loaded:
        on_cpu = build.device_of(config.engine).type == "cpu"
        with cores.confined(config.engine.cpus):
            loaded = build.load(config.engine, allocate if on_cpu else None)
            if area is not None and not config.engine.simulate:
                area.touch()  # KV of models that pretend is small; let others have the memory
            build.warm_up(loaded)
        return loaded

    def role(node: Node, loaded: build.Loaded) -> Role:
        return make_role(node, loaded, KvPool(loaded.runner.pool, area))

    service = f"baton-{config.role}"
    instance = {"service.instance.id": config.incarnation}
    trace = telemetry.setup(service, config.otlp, instance, config.trace_sample)
    registry = EtcdRegistry(config.registry)
    try:
        async with contextlib.AsyncExitStack() as stack:
            node = Node(config, registry, trace)
            stack.callback(node.figures.close)
            if config.metrics_port is not None:
                page = serving(node.figures.render, config.host, config.metrics_port)
                await stack.enter_async_context(page)
            await node.run(load, role, WorkerServicer)
    finally:
        await registry.close()
        await asyncio.to_thread(trace.close)
        if area is not None:
            area.close()
    return 0
