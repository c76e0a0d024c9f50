"""When is a local cluster ready: its workers stand READY in the registry, its routers say SERVING.

Both are watched, not asked for again and again; only whether a router has connected to a worker
must be asked. The caller sets the deadline (`asyncio.timeout`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import rpc
from baton.errors import DeadlineExceeded, Unavailable
from baton.registry.backoff import Backoff
from baton.registry.interface import Membership
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from baton.v1.common_pb2 import WORKER_STATE_READY, WorkerRecord

_STATUS_S = 5.0


async def workers_ready(membership: Membership, pids: Callable[[], Collection[int]]) -> None:
    """Returns once each process in `pids()` (asked again after each change) is READY.

    Raises Unavailable when the watch ends before.
    """
    async for records in membership.changes():
        if set(pids()) <= {record.pid for record in _ready(records.values())}:
            return
    raise Unavailable("the registry is no longer watched")


async def worker_ready(membership: Membership, pid: int) -> WorkerRecord:
    """The record of the process `pid` once it is READY; raises Unavailable when the watch ends."""
    async for records in membership.changes():
        for record in _ready(records.values()):
            if record.pid == pid:
                return record
    raise Unavailable("the registry is no longer watched")


async def router_serving(address: str) -> None:
    """Returns once the router at `address` reports SERVING, however late it starts to listen."""
    backoff = Backoff()
    async with rpc.channel(address) as channel:
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


async def router_sees(address: str, pid: int) -> None:
    """Returns once the router at `address` can place requests on the worker with this pid."""
    backoff = Backoff()
    async with rpc.channel(address) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        while True:
            with contextlib.suppress(Unavailable, DeadlineExceeded), rpc.translated():
                status = await fleet.GetStatus(fleet_pb2.GetStatusRequest(), timeout=_STATUS_S)
                if any(w.record.pid == pid and w.state == "READY" for w in status.workers):
                    return
            await backoff.wait()


def _ready(records: Iterable[WorkerRecord]) -> Iterator[WorkerRecord]:
    return (record for record in records if record.state == WORKER_STATE_READY)
