"""The router's RPCs for operators: what it sees, and where it would place a request."""

from __future__ import annotations

import time
from typing import Any

from baton import rpc
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from router.admission import Admission
from router.explain import explain
from router.fleet import Fleet
from router.line import Line
from router.service import InferenceServicer


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """The cluster as this router sees it."""

    def __init__(
        self,
        fleet: Fleet,
        line: Line,
        admission: Admission,
        inference: InferenceServicer,
        router: fleet_pb2.RouterStatus,
        local_prefill_max_tokens: int,
    ) -> None:
        self._fleet = fleet
        self._line = line
        self._admission = admission
        self._inference = inference
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
        serving = snapshot.ready and not self._inference.draining
        router.state = "SERVING" if serving else "NOT_SERVING"
        router.queued = self._line.depth
        router.running = self._inference.running
        router.registry_connected = self._fleet.registry_connected
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
        tenant = self._admission.tenants.of(context.invocation_metadata())
        snapshot = self._fleet.snapshot()
        ask = await self._admission.admit(
            request.request, context.time_remaining(), snapshot.max_context, "explained", tenant
        )
        ask = self._admission.as_if_entered(ask, tenant, request.request.priority)
        return explain(snapshot, ask, self._line, self._local_prefill_max_tokens, time.monotonic())
