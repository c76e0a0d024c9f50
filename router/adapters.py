"""Loads and unloads LoRA adapters on all workers, for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    quoted,
)
from baton.net import rpc
from baton.v1 import fleet_pb2, worker_pb2, worker_pb2_grpc
from router.fleet.snapshot import WorkerView
from router.models import Models, ModelVersion

TIMEOUT_S = 120.0  # for callers without a deadline

_Call = Callable[[Any, float], Awaitable[Any]]


async def load(
    models: Models, request: fleet_pb2.LoadFleetAdapterRequest, timeout_s: float | None
) -> list[fleet_pb2.AdapterResult]:
    """Loads an adapter on every READY worker of a model.

    Raises ModelNotFound, InvalidRequest for a model's name, Unavailable when no worker is READY.
    """
    model = request.model or models.default
    if request.name in models.names:
        raise InvalidRequest(f"{request.name} is the name of a model", "name")
    versions = models.of_model(model) if model in models.names else []
    versions = versions or [models.resolve(model, "").version]
    workers = [one for one in _workers(versions) if one.ready]
    if not workers:
        raise Unavailable(versions[0].why_not_ready)
    call = worker_pb2.LoadAdapterRequest(name=request.name, directory=request.directory)
    return await _on_all(
        workers, timeout_s, lambda stub, left_s: stub.LoadAdapter(call, timeout=left_s)
    )


async def unload(
    models: Models, request: fleet_pb2.UnloadFleetAdapterRequest, timeout_s: float | None
) -> list[fleet_pb2.AdapterResult]:
    """Unloads an adapter from every worker that has it. Raises ModelNotFound when none has."""
    workers = [
        view
        for view in _workers(models.versions.values())
        if any(one.name == request.name for one in view.record.adapters)
    ]
    if not workers:
        raise ModelNotFound(f"no worker has an adapter {quoted(request.name)}")
    call = worker_pb2.UnloadAdapterRequest(name=request.name, wait_ms=request.wait_ms)
    return await _on_all(
        workers, timeout_s, lambda stub, left_s: stub.UnloadAdapter(call, timeout=left_s)
    )


def _workers(versions: Iterable[ModelVersion]) -> list[WorkerView]:
    return [view for version in versions for view in version.fleet.snapshot().workers]


async def _on_all(
    workers: Iterable[WorkerView], timeout_s: float | None, call: _Call
) -> list[fleet_pb2.AdapterResult]:
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    return await asyncio.gather(*(_on_one(worker, limit_s, call) for worker in workers))


async def _on_one(worker: WorkerView, timeout_s: float, call: _Call) -> fleet_pb2.AdapterResult:
    name = worker.record.incarnation
    try:
        async with (
            asyncio.timeout(timeout_s),
            rpc.channel(worker.record.address, role="worker") as channel,
        ):
            with rpc.translated():
                await call(worker_pb2_grpc.WorkerServiceStub(channel), timeout_s)
    except TimeoutError:  # DeadlineExceeded, too
        late = DeadlineExceeded(f"no answer within {timeout_s:.3g} s")
        return _refused(name, late)
    except BatonError as error:
        return _refused(name, error)
    return fleet_pb2.AdapterResult(worker=name)


def _refused(worker: str, error: BatonError) -> fleet_pb2.AdapterResult:
    code: int = rpc.code_of(error).value[0]
    field = error.field if isinstance(error, InvalidRequest) else ""
    return fleet_pb2.AdapterResult(worker=worker, error=str(error), code=code, field=field)
