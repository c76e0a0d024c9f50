"""The router's RPCs for operators: what it sees, and where it would place a request."""

from __future__ import annotations

import time
from typing import Any

from baton import rpc
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from router.admission.admission import Admission
from router.admission.wait_queue import Line
from router.fleet.fleet import Fleet
from router.frontend import Door
from router.placement.explain import explain
from router.service import caller_of


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """The cluster as this router sees it."""

    def __init__(
        self,
        fleet: Fleet,
        line: Line,
        admission: Admission,
        door: Door,
        router: fleet_pb2.RouterStatus,
        local_prefill_max_tokens: int,
    ) -> None:
        self._fleet = fleet
        self._line = line
        self._admission = admission
        self._door = door
        self._router = router
        self._local_prefill_max_tokens = local_prefill_max_tokens

    @rpc.unary
    async def GetStatus(
        self, request: fleet_pb2.GetStatusRequest, context: Any
    ) -> fleet_pb2.GetStatusResponse:
        """Workers, load and pairs as seen now."""
        snapshot = self._fleet.snapshot()
        router = fleet_pb2.RouterStatus()
        router.CopyFrom(self._router)
        router.state = "NOT_SERVING" if self._door.why_not_ready else "SERVING"
        router.queued = self._line.depth
        router.running = self._door.running
        router.registry_connected = self._fleet.registry_connected
        router.counts.CopyFrom(self._door.tally.counts())
        router.latency.CopyFrom(self._door.tally.latency())
        router.events.extend(self._door.tally.recent_events())
        workers = [
            fleet_pb2.WorkerStatus(record=w.record, load=w.load, state=w.state, reason=w.reason)
            for w in (*snapshot.prefill, *snapshot.decode)
        ]
        return fleet_pb2.GetStatusResponse(router=router, workers=workers, pairs=self._fleet.pairs)

    @rpc.unary
    async def Explain(
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """Where a request would run now; nothing is charged and nothing is run."""
        caller, snapshot = caller_of(context), self._fleet.snapshot()
        tenant = self._admission.tenants.of(caller.metadata)
        ask = await self._admission.admit(
            request.request, caller.time_left_s, snapshot.max_context, "explained", tenant
        )
        ask = self._admission.as_if_entered(ask, tenant, request.request.priority)
        return explain(snapshot, ask, self._line, self._local_prefill_max_tokens, time.monotonic())
