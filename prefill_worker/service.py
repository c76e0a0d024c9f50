"""PrefillService, thin: the prompt's story is told in `prefills`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from opentelemetry.context import Context

from baton import rpc, telemetry
from baton.v1 import prefill_pb2, prefill_pb2_grpc


class RunsPrompts(Protocol):
    """What the service needs."""

    async def run(
        self,
        request: prefill_pb2.PrefillRequest,
        trace: Context,
        send: Callable[[prefill_pb2.PrefillResponse], Awaitable[None]],
    ) -> None:
        """Sends the prompt's messages."""
        ...


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs prompts for routers."""

    def __init__(self, prefills: RunsPrompts) -> None:
        self._prefills = prefills

    @rpc.unary
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> None:
        """Runs one prompt."""
        trace = telemetry.extract(context.invocation_metadata())
        await self._prefills.run(request, trace, context.write)
