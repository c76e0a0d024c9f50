"""Routers' answers made by hand, of real messages, and a server that gives them."""

from typing import Any

from baton.local.top_view import PolledRouter
from baton.net import rpc
from baton.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


def worker(name, role=PREFILL, state="READY", reason="", **load):
    """A worker with a pool of 100 blocks, 70 of them free."""
    blocks = {"blocks_total": 100, "blocks_free": 70, "blocks_cached": 20, "blocks_held": 10}
    return fleet_pb2.WorkerStatus(
        record=common_pb2.WorkerRecord(incarnation=name, role=role, max_batch=64, blocks_total=100),
        load=worker_pb2.Load(**{**blocks, **load}),
        state=state,
        reason=reason,
    )


def pair(prefill="p0", decode="d0", **fields):
    """An open link."""
    known = {"state": "OPEN", "epoch": 1, "transport": common_pb2.TRANSPORT_SHM}
    return worker_pb2.PairStatus(prefill=prefill, decode=decode, **{**known, **fields})


def status(*parts, **router):
    """A router's answer of these workers and pairs; `router` are fields of RouterStatus."""
    known: dict[str, Any] = {
        "incarnation": "r0", "state": "SERVING", "model": "demo", "models": ["demo"],
        "cluster": "default", "registry_connected": True,
    }  # fmt: skip
    return fleet_pb2.GetStatusResponse(
        router=fleet_pb2.RouterStatus(**{**known, **router}),
        workers=[part for part in parts if isinstance(part, fleet_pb2.WorkerStatus)],
        pairs=[part for part in parts if isinstance(part, worker_pb2.PairStatus)],
    )


def polled(*statuses, address="h:1", failure=""):
    """A router that gave these answers, two seconds apart, the last one at 12 s."""
    router = PolledRouter(address)
    for number, one in enumerate(statuses):
        router.take(one, 12.0 - 2.0 * (len(statuses) - 1 - number))
    router.failure = failure
    return router


class Router(fleet_pb2_grpc.FleetServiceServicer):
    """Answers with `status` between `async with` and its end; on one port, however often."""

    def __init__(self, answer):
        self.status = answer
        self.port = 0

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self):
        self._server = rpc.server()
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def __aexit__(self, *_):
        await self._server.stop(0)

    async def GetStatus(self, request, context):
        return self.status
