"""The door that every caller comes through, whatever it speaks: refuse or admit, run, report.

gRPC (`service`) and HTTP are thin over this.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind, Tracer

from baton import telemetry
from baton.errors import DeadlineExceeded, Unavailable
from baton.text import AnyTokenizer
from baton.v1 import common_pb2, inference_pb2
from router import feasibility
from router.admission import Admission
from router.attempt import Output
from router.dispatch import Dispatch
from router.fleet import Fleet
from router.line import Line
from router.placement import RETRY_AFTER_S
from router.story import Ask, Story
from router.tally import Seen, Tally
from router.tenants import Visit
from router.text_stream import TextStream

_STOP = common_pb2.FINISH_REASON_STOP
_ENDS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Caller:
    """What a request's transport says of it: headers (lower-case names) and its deadline."""

    metadata: tuple[tuple[str, str | bytes], ...] = ()
    time_left_s: float | None = None  # None: no deadline of its own


class Door:
    """Generation for callers. All methods raise BatonError. Event-loop thread only."""

    def __init__(
        self,
        admission: Admission,
        line: Line,
        dispatch: Dispatch,
        fleet: Fleet,
        tracer: Tracer,
    ) -> None:
        self._admission = admission
        self._line = line
        self._dispatch = dispatch
        self._fleet = fleet
        self._tracer = tracer
        self._idle = asyncio.Event()
        self._idle.set()
        self._limits: set[asyncio.Timeout] = set()  # of requests that run
        self._giving_up = False
        self.running = 0
        self.draining = False
        # Of an HTTP Accept header: (content type, body). For whoever serves /metrics beside us.
        self.metrics_page: Callable[[str], tuple[str, bytes]] = lambda accept: ("text/plain", b"")

    @property
    def tokenizer(self) -> AnyTokenizer:
        """The served model's."""
        return self._admission.tokenizer

    @property
    def tally(self) -> Tally:
        """What has happened here so far."""
        return self._dispatch.tally

    @property
    def why_not_ready(self) -> str:
        """Why new requests are not taken; empty when they are."""
        return "the router is draining" if self.draining else self._fleet.snapshot().why_not_ready

    async def generate(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """One completion: started, deltas, finish. Closing it cancels the request everywhere."""
        parent = telemetry.extract(caller.metadata)
        with (
            self._counted(),
            self._dispatch.tally.request() as seen,
            telemetry.span(self._tracer, "router.generate", parent, kind=SpanKind.SERVER) as span,
        ):
            seen.span, seen.trace_id = span, telemetry.trace_id_of(span)
            seen.held, seen.operation = telemetry.is_held(span), _operation(request)
            generating = self._generate(request, caller, span, seen)
            async with contextlib.aclosing(generating) as responses:
                async for response in responses:
                    seen.finished = response.HasField("finish")
                    yield response

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, caller: Caller
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        self._admission.tenants.of(caller.metadata)
        self._admission.check_model(request.model)
        return inference_pb2.TokenizeResponse(
            token_ids=await self._admission.tokenize(request),
            max_context=self._max_context(),
        )

    def models(self, caller: Caller) -> list[inference_pb2.Model]:
        """The one model this router serves."""
        self._admission.tenants.of(caller.metadata)
        model = inference_pb2.Model(
            name=self._admission.model,
            max_context=self._max_context(),
            vocab_size=self.tokenizer.vocab_size,
            chat=self.tokenizer.has_chat_template,
        )
        return [model]

    async def idle(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()

    def give_up(self) -> None:
        """Ends what still runs with UNAVAILABLE, so that callers go on at another router."""
        self._giving_up = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, caller: Caller, span: Span, seen: Seen
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        self._check_open(bool(request.resumed_token_ids))
        tenant = self._admission.tenants.of(caller.metadata)
        seen.tenant = tenant.name
        request_id = uuid.uuid4().hex[:16]
        with telemetry.span(self._tracer, "router.admit", telemetry.context_of(span)):
            ask = await self._admission.admit(
                request,
                caller.time_left_s,
                self._fleet.snapshot().max_context,
                request_id,
                tenant,
            )
            self._check_ready()
            ask, visit = self._admission.enter(ask, tenant, request.priority)
        _describe(span, ask, self._admission.model)
        with visit:
            story = Story(ask, seen.arrived, seen.arrived_ns)
            self._dispatch.tally.let_in(seen, story)
            with telemetry.span(self._tracer, "router.check", telemetry.context_of(span)):
                feasibility.check(
                    ask,
                    self._fleet.snapshot(),
                    self._line,
                    time.monotonic(),
                    self._dispatch.wants(story),
                )
            with telemetry.span(self._tracer, "router.begin", telemetry.context_of(span)):
                yield inference_pb2.GenerateResponse(
                    started=inference_pb2.Started(
                        request_id=request_id,
                        trace_id=telemetry.trace_id_of(span),
                        prompt_tokens=len(ask.prompt),
                        resumed_tokens=len(ask.resumed),
                    )
                )
            async with contextlib.aclosing(self._in_time(story, visit, seen)) as responses:
                async for response in responses:
                    yield response

    async def _in_time(
        self, story: Story, visit: Visit, seen: Seen
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Deltas, then the finish, unless the deadline passes or this router leaves before."""
        limit = asyncio.timeout(story.ask.time_left_s)
        self._limits.add(limit)
        try:
            async with limit, contextlib.aclosing(self._stream(story, visit, seen)) as responses:
                async for response in responses:
                    yield response
        except TimeoutError:
            after = f"after {len(story.delivered)} tokens"
            if self._giving_up:
                raise Unavailable(f"the router left {after}: go on at another one") from None
            raise DeadlineExceeded(f"the deadline passed {after}") from None
        finally:
            self._limits.discard(limit)

    async def _stream(
        self, story: Story, visit: Visit, seen: Seen
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        assert seen.span is not None
        span = seen.span
        text = TextStream(self._admission.tokenizer, story.ask)
        run = self._dispatch.run(story, telemetry.context_of(span))
        reason = common_pb2.FINISH_REASON_UNSPECIFIED
        async with contextlib.aclosing(run) as outputs:
            async for output in outputs:
                visit.delivered(len(output.token_ids))
                said = text.advance(output.token_ids, _ENDS[output.finish_reason])
                reason = _STOP if text.stop is not None else output.finish_reason
                first = len(story.delivered) == len(output.token_ids)
                yield inference_pb2.GenerateResponse(delta=_delta(said, output, reason))
                if first:
                    self._record_first_token(story, span)
                    self.tally.first_token(seen)
                if text.stop is not None:
                    break  # the workers do not know of stop strings
        span.set_attribute("gen_ai.usage.output_tokens", len(story.delivered))
        with telemetry.span(self._tracer, "router.finish", telemetry.context_of(span)):
            yield inference_pb2.GenerateResponse(
                finish=inference_pb2.Finish(
                    reason=reason,
                    stop=text.stop or "",
                    usage=story.usage(),
                    timing=story.timing(),
                    route=story.final_route(),
                )
            )

    def _record_first_token(self, story: Story, span: Span) -> None:
        """A span as long as the time to first token, ending when that token was on its way."""
        parent = telemetry.context_of(span)
        telemetry.record(self._tracer, "router.first_token", parent, story.started_ns)

    def _check_open(self, resumed: bool) -> None:
        if self.draining:
            raise Unavailable("the router is draining: try another one", RETRY_AFTER_S)
        if not resumed:  # that one was let in before
            self._line.check_room()

    def _check_ready(self) -> None:
        """Lets nobody in while nobody could serve; who is in waits for workers to come back."""
        if why_not := self._fleet.snapshot().why_not_ready:
            raise Unavailable(why_not, RETRY_AFTER_S)

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


def _operation(request: inference_pb2.GenerateRequest) -> str:
    """What GenAI conventions call it."""
    return "chat" if request.HasField("chat") else "text_completion"


def _describe(span: Span, ask: Ask, model: str) -> None:
    span.set_attribute("gen_ai.request.model", model)
    span.set_attribute("baton.request_id", ask.request_id)
    span.set_attribute("baton.tenant", ask.tenant)
    span.set_attribute("gen_ai.usage.input_tokens", len(ask.prompt))


def _delta(text: str, output: Output, reason: common_pb2.FinishReason) -> inference_pb2.Delta:
    return inference_pb2.Delta(
        text=text, token_ids=output.token_ids, logprobs=output.logprobs, finish_reason=reason
    )
