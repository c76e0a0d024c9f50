"""When is a local cluster ready: its workers stand READY in the registry, its router says SERVING.

Both are watched, not asked for again and again. The caller sets the deadline (`asyncio.timeout`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import rpc
from baton.errors import Unavailable
from baton.registry.backoff import Backoff
from baton.registry.membership import Membership
from baton.v1.common_pb2 import WORKER_STATE_READY


async def workers_ready(membership: Membership, pids: Callable[[], Collection[int]]) -> None:
    """Returns once each process in `pids()` (asked again after each change) is READY.

    Raises Unavailable when the watch ends before.
    """
    async for records in membership.changes():
        ready = {record.pid for record in records.values() if record.state == WORKER_STATE_READY}
        if set(pids()) <= ready:
            return
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
