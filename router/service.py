"""The router's RPCs, thin: validate, run, translate."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from opentelemetry.trace import Span, SpanKind, Tracer

from baton import rpc, telemetry
from baton.errors import DeadlineExceeded, Overloaded, Unavailable
from baton.v1 import (
    common_pb2,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from router.admission import Admission
from router.attempt import Output
from router.dispatch import Dispatch
from router.fleet import Fleet
from router.placement import RETRY_AFTER_S
from router.story import Story
from router.text_stream import TextStream

_STOP = common_pb2.FINISH_REASON_STOP
_ENDS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation for callers."""

    def __init__(
        self,
        admission: Admission,
        dispatch: Dispatch,
        fleet: Fleet,
        tracer: Tracer,
        max_queue: int,
    ) -> None:
        self._admission = admission
        self._dispatch = dispatch
        self._fleet = fleet
        self._tracer = tracer
        self._max_queue = max_queue
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.draining = False

    @rpc.streaming
    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams one completion."""
        parent = telemetry.extract(context.invocation_metadata())
        with (
            self._counted(),
            telemetry.span(self._tracer, "router.generate", parent, kind=SpanKind.SERVER) as span,
        ):
            async with contextlib.aclosing(self._generate(request, context, span)) as responses:
                async for response in responses:
                    yield response

    @rpc.unary
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        self._admission.check_model(request.model)
        return inference_pb2.TokenizeResponse(
            token_ids=await self._admission.tokenize(request),
            max_context=self._max_context(),
        )

    @rpc.unary
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """The one model this router serves."""
        tokenizer = self._admission.tokenizer
        model = inference_pb2.Model(
            name=self._admission.model,
            max_context=self._max_context(),
            vocab_size=tokenizer.vocab_size,
            chat=tokenizer.has_chat_template,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def idle(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: Any, span: Span
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        self._check_open()
        request_id = uuid.uuid4().hex[:16]
        with telemetry.span(self._tracer, "router.admit", telemetry.context_of(span)):
            ask = await self._admission.admit(
                request,
                context.time_remaining(),
                self._fleet.snapshot().max_context,
                request_id,
            )
        span.set_attribute("gen_ai.request.model", self._admission.model)
        span.set_attribute("baton.request_id", request_id)
        span.set_attribute("gen_ai.usage.input_tokens", len(ask.prompt))
        yield inference_pb2.GenerateResponse(
            started=inference_pb2.Started(
                request_id=request_id,
                trace_id=telemetry.trace_id_of(span),
                prompt_tokens=len(ask.prompt),
            )
        )
        story = Story(ask)
        try:
            async with (
                asyncio.timeout(ask.time_left_s),
                contextlib.aclosing(self._stream(story, span)) as responses,
            ):
                async for response in responses:
                    yield response
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed after {len(story.delivered)} tokens"
            ) from None

    async def _stream(
        self, story: Story, span: Span
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Deltas, then the finish."""
        text = TextStream(self._admission.tokenizer, story.ask)
        run = self._dispatch.run(story, telemetry.context_of(span))
        reason = common_pb2.FINISH_REASON_UNSPECIFIED
        async with contextlib.aclosing(run) as outputs:
            async for output in outputs:
                delta = self._delta(text, output)
                reason = _STOP if text.stop is not None else output.finish_reason
                first = len(story.delivered) == len(output.token_ids)
                yield inference_pb2.GenerateResponse(delta=delta)
                if first:
                    self._record_first_token(story, span)
                if text.stop is not None:
                    break  # the workers do not know of stop strings
        span.set_attribute("gen_ai.usage.output_tokens", len(story.delivered))
        yield inference_pb2.GenerateResponse(
            finish=inference_pb2.Finish(
                reason=reason,
                stop=text.stop or "",
                usage=story.usage(),
                timing=story.timing(),
                route=story.final_route(),
            )
        )

    def _delta(self, text: TextStream, output: Output) -> inference_pb2.Delta:
        said = text.advance(output.token_ids, _ENDS[output.finish_reason])
        return inference_pb2.Delta(text=said, token_ids=output.token_ids, logprobs=output.logprobs)

    def _record_first_token(self, story: Story, span: Span) -> None:
        """A span as long as the time to first token, ending when that token was on its way."""
        parent = telemetry.context_of(span)
        telemetry.record(self._tracer, "router.first_token", parent, story.started_ns)

    def _check_open(self) -> None:
        if self.draining:
            raise Unavailable("the router is draining: try another one", RETRY_AFTER_S)
        if self._dispatch.queued >= self._max_queue:
            raise Overloaded(f"{self._max_queue} requests are waiting already", RETRY_AFTER_S)

    def _max_context(self) -> int:
        own, workers = self._admission.tokenizer.max_context, self._fleet.snapshot().max_context
        return min(own, workers) if own and workers else own or workers

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()


class FleetServicer(fleet_pb2_grpc.FleetServiceServicer):
    """The cluster for operators."""

    def __init__(
        self,
        fleet: Fleet,
        inference: InferenceServicer,
        dispatch: Dispatch,
        router: fleet_pb2.RouterStatus,
    ) -> None:
        self._fleet = fleet
        self._inference = inference
        self._dispatch = dispatch
        self._router = router

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
        router.queued = self._dispatch.queued
        router.running = self._inference.running
        router.registry_connected = self._fleet.registry_connected
        workers = [
            fleet_pb2.WorkerStatus(record=w.record, load=w.load, state=w.state, reason=w.reason)
            for w in (*snapshot.prefill, *snapshot.decode)
        ]
        return fleet_pb2.GetStatusResponse(router=router, workers=workers, pairs=self._fleet.pairs)
