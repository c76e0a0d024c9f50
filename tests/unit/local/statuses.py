"""Routers' answers made by hand, of real messages, for tests of `baton top`."""

from typing import Any

from baton.local.top_view import PolledRouter, Sample
from baton.v1 import common_pb2, fleet_pb2, worker_pb2

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


def worker(
    name: str, role: common_pb2.WorkerRole = PREFILL, state: str = "READY", reason: str = "",
    **load: Any,
) -> fleet_pb2.WorkerStatus:  # fmt: skip
    """A worker with a pool of 100 blocks, 70 of them free."""
    blocks = {"blocks_total": 100, "blocks_free": 70, "blocks_cached": 20, "blocks_held": 10}
    return fleet_pb2.WorkerStatus(
        record=common_pb2.WorkerRecord(incarnation=name, role=role, max_batch=64, blocks_total=100),
        load=worker_pb2.Load(**{**blocks, **load}),
        state=state,
        reason=reason,
    )


def pair(prefill: str = "p0", decode: str = "d0", **fields: Any) -> worker_pb2.PairStatus:
    """An open link."""
    known = {"state": "OPEN", "epoch": 1, "transport": common_pb2.TRANSPORT_SHM}
    return worker_pb2.PairStatus(prefill=prefill, decode=decode, **{**known, **fields})


def status(
    workers: list[fleet_pb2.WorkerStatus] | None = None,
    pairs: list[worker_pb2.PairStatus] | None = None,
    **router: Any,
) -> fleet_pb2.GetStatusResponse:
    """A router's answer; `router` are fields of RouterStatus."""
    known: dict[str, Any] = {
        "incarnation": "r0", "state": "SERVING", "model": "demo", "cluster": "default",
        "registry_connected": True,
    }  # fmt: skip
    return fleet_pb2.GetStatusResponse(
        router=fleet_pb2.RouterStatus(**{**known, **router}), workers=workers, pairs=pairs
    )


def polled(
    last: fleet_pb2.GetStatusResponse | None = None,
    first: fleet_pb2.GetStatusResponse | None = None,
    address: str = "h:1",
    failure: str = "",
) -> PolledRouter:
    """A router that answered `first` at 10 s and `last` at 12 s."""
    router = PolledRouter(address)
    for at, status in ((10.0, first), (12.0, last)):
        if status is not None:
            router.take(Sample(at, status))
    router.failure = failure
    return router
