"""Loads and unloads LoRA adapters on all workers, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from baton.errors import BatonError, DeadlineExceeded, ModelNotFound, Unavailable, quoted
from baton.net import rpc
from baton.v1 import fleet_pb2, worker_pb2, worker_pb2_grpc
from router.fleet.fleet import Fleet
from router.fleet.snapshot import WorkerView

TIMEOUT_S = 120.0  # for callers without a deadline

_Call = Callable[[Any, float], Awaitable[Any]]


async def load(
    fleet: Fleet, name: str, directory: str, timeout_s: float | None
) -> list[fleet_pb2.AdapterResult]:
    """Loads an adapter on every READY worker. Raises Unavailable when there is none."""
    request = worker_pb2.LoadAdapterRequest(name=name, directory=directory)
    snapshot = fleet.snapshot()
    workers = [one for one in (*snapshot.prefill, *snapshot.decode) if one.ready]
    if not workers:
        raise Unavailable(f"no worker is ready: {snapshot.why_not_ready}")
    return await _on_all(
        workers, timeout_s, lambda stub, left_s: stub.LoadAdapter(request, timeout=left_s)
    )


async def unload(
    fleet: Fleet, name: str, wait_ms: int, timeout_s: float | None
) -> list[fleet_pb2.AdapterResult]:
    """Unloads an adapter from every worker that has it. Raises ModelNotFound when none has."""
    request = worker_pb2.UnloadAdapterRequest(name=name, wait_ms=wait_ms)
    snapshot = fleet.snapshot()
    workers = [
        view
        for view in (*snapshot.prefill, *snapshot.decode)
        if any(one.name == name for one in view.record.adapters)
    ]
    if not workers:
        raise ModelNotFound(f"no worker has an adapter {quoted(name)}")
    return await _on_all(
        workers, timeout_s, lambda stub, left_s: stub.UnloadAdapter(request, timeout=left_s)
    )


async def _on_all(
    workers: Iterable[WorkerView], timeout_s: float | None, call: _Call
) -> list[fleet_pb2.AdapterResult]:
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    return await asyncio.gather(*(_on_one(worker, limit_s, call) for worker in workers))


async def _on_one(worker: WorkerView, timeout_s: float, call: _Call) -> fleet_pb2.AdapterResult:
    record, error = worker.record, ""
    try:
        async with (
            asyncio.timeout(timeout_s),
            rpc.channel(record.address, role="worker") as channel,
        ):
            with rpc.translated():
                await call(worker_pb2_grpc.WorkerServiceStub(channel), timeout_s)
    except (TimeoutError, DeadlineExceeded):
        error = f"no answer within {timeout_s:.0f} s"
    except BatonError as failure:
        error = str(failure)
    return fleet_pb2.AdapterResult(worker=record.incarnation, error=error)
