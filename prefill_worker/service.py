"""PrefillService, thin: the prompt's story is told in `prefills`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from opentelemetry.context import Context

from baton import rpc, telemetry
from baton.v1 import prefill_pb2, prefill_pb2_grpc


class RunsPrompts(Protocol):
    """What the service needs."""

    def run(
        self, request: prefill_pb2.PrefillRequest, trace: Context
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """The prompt's messages."""
        ...


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs prompts for routers."""

    def __init__(self, prefills: RunsPrompts) -> None:
        self._prefills = prefills

    @rpc.streaming
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Runs one prompt."""
        trace = telemetry.extract(context.invocation_metadata())
        async with contextlib.aclosing(self._prefills.run(request, trace)) as responses:
            async for response in responses:
                yield response
