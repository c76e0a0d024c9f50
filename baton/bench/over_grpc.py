"""Asks a Baton router over gRPC: one attempt a request, no retries, no SDK between."""

from __future__ import annotations

import time
from typing import Any

import grpc

from baton import rpc
from baton.bench.demand import Demand, text_of
from baton.bench.outcome import Outcome, Phases
from baton.bench.server import Asking
from baton.errors import DeadlineExceeded, Unavailable
from baton.v1 import inference_pb2, inference_pb2_grpc

_GENERATE = "/baton.v1.InferenceService/Generate"
_ANSWER_S = 10.0  # to name its models


class GrpcServer:
    """A Baton router. Must be made where an event loop runs."""

    protocol = "grpc"

    def __init__(self, address: str, asking: Asking) -> None:
        self.url = f"grpc://{address}"
        self._asking = asking
        self._channel = rpc.channel(address)
        self._metadata = (
            (("authorization", f"Bearer {asking.api_key}"),) if asking.api_key else None
        )
        self._generate: Any = self._channel.unary_stream(
            _GENERATE,
            request_serializer=None,  # bodies are bytes already
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )

    async def connect(self) -> str:
        """See `Server`."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        try:
            with rpc.translated():
                answer = await stub.ListModels(
                    inference_pb2.ListModelsRequest(), timeout=_ANSWER_S, metadata=self._metadata
                )
        except (Unavailable, DeadlineExceeded) as error:
            raise Unavailable(
                f"no Baton router answers at {self.url} (`baton up` starts one): {error}"
            ) from error
        return self._asking.model or answer.models[0].name

    def body(self, demand: Demand) -> bytes:
        """See `Server`."""
        request = inference_pb2.GenerateRequest(model=self._asking.model)
        ids = demand.prompt(self._asking.ids)
        if self._asking.prompt_form == "ids":
            request.token_ids.ids.extend(ids)
        elif self._asking.prompt_form == "text":
            request.text = text_of(ids)
        else:
            request.chat.messages.add(role="user", content=text_of(ids))
        request.sampling.max_tokens = demand.new_tokens
        request.sampling.ignore_eos = self._asking.ignore_eos
        return request.SerializeToString()

    async def send(self, body: bytes, outcome: Outcome) -> None:
        """See `Server`."""
        began = time.monotonic()
        call = self._generate(body, timeout=self._asking.timeout_s, metadata=self._metadata)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                if response.HasField("delta"):
                    if tokens := len(response.delta.token_ids):
                        outcome.got(tokens, time.monotonic() - began)
                elif response.HasField("finish"):
                    _finish(response.finish, outcome)
            if (code := await call.code()) is not grpc.StatusCode.OK:
                outcome.failed(code.name, await call.details() or "")
            elif outcome.phases is None:
                outcome.failed("INCOMPLETE", "the stream ended without its last message")
        except grpc.RpcError as error:
            outcome.failed(error.code().name, error.details() or "")
        finally:
            outcome.ended_s = time.monotonic() - began
            call.cancel()

    async def close(self) -> None:
        """See `Server`."""
        await self._channel.close(None)


def _finish(finish: inference_pb2.Finish, outcome: Outcome) -> None:
    usage, timing, route = finish.usage, finish.timing, finish.route
    outcome.prompt_tokens = usage.prompt_tokens
    outcome.output_tokens = usage.completion_tokens
    outcome.cached_tokens = usage.cached_tokens
    outcome.attempts = route.attempts
    outcome.prefilled_by_decode = not route.prefill
    outcome.phases = Phases(
        queue_s=timing.queue_ms / 1e3,
        ttft_s=timing.ttft_ms / 1e3,
        e2e_s=timing.e2e_ms / 1e3,
        transfer_s=timing.transfer_ms / 1e3,
        transfer_bytes=timing.transfer_bytes,
    )
