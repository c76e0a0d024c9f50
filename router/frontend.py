"""The door that every caller comes through, whatever it speaks: refuse or admit, run, report.

gRPC (`service`) and HTTP are thin over this.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from opentelemetry.trace import Span, SpanKind, Tracer

from baton import telemetry
from baton.errors import BatonError, Cancelled, DeadlineExceeded, Unavailable
from baton.text import AnyTokenizer
from baton.v1 import common_pb2, inference_pb2
from router.admission import feasibility
from router.admission.admission import Admission, Choices
from router.admission.tenants import Visit
from router.admission.wait_queue import Line
from router.dispatch.attempt import MAX_UNREAD_BYTES, Output
from router.dispatch.dispatch import Dispatch
from router.dispatch.request_state import Ask, Story
from router.dispatch.text_stream import TextStream
from router.fleet.fleet import Fleet
from router.placement.placement import RETRY_AFTER_S
from router.telemetry.stats import Seen, Tally

T = TypeVar("T")

UNREAD_S = 10.0  # that one response may wait for a caller who does not read
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


# Takes a response on its way to the caller; waits while the caller reads too slowly.
Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class _Sending:
    """Sends one request's responses, until its deadline at the latest, whatever its caller does.

    A scope in the request's own task: a deadline around a generator's `yield` would cancel what
    the generator's consumer waits for, and end nothing (PEP 789).
    """

    def __init__(self, story: Story, send: Send, listed: set[_Sending]) -> None:
        """It is in `listed` while it may be ended."""
        self._story = story
        self._send = send
        self._listed = listed
        self._scope = asyncio.timeout(story.ask.time_left_s)
        self._error: BatonError | None = None
        self._since: float | None = None  # when the response was sent that waits to be read
        self._check: asyncio.TimerHandle | None = None
        story.on_unread = lambda: self.end(
            Cancelled(f"the caller left {MAX_UNREAD_BYTES >> 10} KiB of output unread")
        )

    async def __call__(self, response: inference_pb2.GenerateResponse) -> None:
        """Sends a response."""
        self._since = asyncio.get_running_loop().time()
        await self._send(response)
        self._since = None

    @property
    def after(self) -> str:
        """How far the request has come, in words."""
        return f"after {len(self._story.delivered)} tokens"

    def end(self, error: BatonError) -> None:
        """Ends the request with an error from outside its task, unless it has ended."""
        if self._error is None and not self._scope.expired():
            self._error = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._listed.add(self)
        self._look()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._check is not None
        self._check.cancel()
        self._listed.discard(self)
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            late = DeadlineExceeded(f"the deadline passed {self.after}")
            raise self._error or late from None

    def _look(self) -> None:
        """Ends the request if its caller has not read for too long; else looks again."""
        loop = asyncio.get_running_loop()
        due = (loop.time() if self._since is None else self._since) + UNREAD_S
        if due <= loop.time():
            self.end(Cancelled(f"the caller did not read its output for {UNREAD_S:.0f} s"))
        self._check = loop.call_at(max(due, loop.time() + 1.0), self._look)


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
        self._sending: set[_Sending] = set()  # of requests that run
        self.running = 0
        self.draining = False
        # Of an HTTP Accept header: (content type, body). For whoever serves /metrics beside us.
        self.metrics_page: Callable[[str], tuple[str, bytes]] = lambda accept: ("text/plain", b"")

    @property
    def tokenizer(self) -> AnyTokenizer:
        """The served model's."""
        return self._admission.tokenizer

    @property
    def default_timeout_s(self) -> float:
        """The deadline of requests that bring none."""
        return self._admission.default_timeout_s

    @property
    def tally(self) -> Tally:
        """What has happened here so far."""
        return self._dispatch.tally

    @property
    def why_not_ready(self) -> str:
        """Why new requests are not taken; empty when they are."""
        return "the router is draining" if self.draining else self._fleet.snapshot().why_not_ready

    def check_key(self, caller: Caller) -> None:
        """Raises Unauthenticated unless the caller may ask for anything."""
        self._admission.tenants.of(caller.metadata)

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs what takes long on one of the few threads that texts are tokenized on."""
        return await self._admission.in_thread(work, *args)

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        send: Send,
        choices: Choices | None = None,
        number: int = 0,
    ) -> None:
        """Sends one completion: started, deltas, finish. Cancelling it cancels it everywhere.

        Of several choices it is the one with that number; number 0 must have its first token before
        the others of its prompt begin. Raises Cancelled where the caller leaves its output unread
        for too long.
        """
        parent = telemetry.extract(caller.metadata)
        with (
            self._counted(),
            self._dispatch.tally.request() as seen,
            telemetry.span(self._tracer, "router.generate", parent, kind=SpanKind.SERVER) as span,
        ):
            seen.span, seen.trace_id = span, telemetry.trace_id_of(span)
            seen.held, seen.operation = telemetry.is_held(span), _operation(request)
            await self._generate(request, caller, span, seen, send, choices, number)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, caller: Caller
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        tenant = self._admission.tenants.of(caller.metadata)
        self._admission.check_model(request.model)
        tenant.tokenized()
        token_ids = await self._admission.tokenize(request, self._fleet.snapshot().max_context)
        tenant.use(len(token_ids))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_context=self.max_context)

    def models(self, caller: Caller) -> list[inference_pb2.Model]:
        """The one model this router serves."""
        self._admission.tenants.of(caller.metadata)
        model = inference_pb2.Model(
            name=self._admission.model,
            max_context=self.max_context,
            vocab_size=self.tokenizer.vocab_size,
            chat=self.tokenizer.has_chat_template,
        )
        return [model]

    async def idle(self) -> None:
        """Returns when no request runs."""
        await self._idle.wait()

    def give_up(self) -> None:
        """Ends what still runs with UNAVAILABLE, so that callers go on at another router."""
        for sending in self._sending:
            left = f"the router left {sending.after}: go on at another one"
            sending.end(Unavailable(left))

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        span: Span,
        seen: Seen,
        send: Send,
        choices: Choices | None,
        number: int,
    ) -> None:
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
                choices,
                number,
            )
            self._check_ready()
            ask, visit = self._admission.enter(ask, tenant, request.priority, choices, number)
        _describe(span, ask, self._admission.model)
        with visit:
            story = Story(ask, seen.arrived, seen.arrived_ns)
            self._dispatch.tally.let_in(seen, story)
            with telemetry.span(self._tracer, "router.check", telemetry.context_of(span)):
                story.predicted_ttft_s = feasibility.check(
                    ask,
                    self._fleet.snapshot(),
                    self._line,
                    time.monotonic(),
                    self._dispatch.wants(story),
                )
            async with _Sending(story, send, self._sending) as sending:
                with telemetry.span(self._tracer, "router.begin", telemetry.context_of(span)):
                    await sending(
                        inference_pb2.GenerateResponse(
                            started=inference_pb2.Started(
                                request_id=request_id,
                                trace_id=telemetry.trace_id_of(span),
                                prompt_tokens=len(ask.prompt),
                                resumed_tokens=len(ask.resumed),
                            )
                        )
                    )
                await self._deliver(story, visit, seen, sending)

    async def _deliver(self, story: Story, visit: Visit, seen: Seen, sending: _Sending) -> None:
        """Deltas, then the finish."""
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
                await sending(inference_pb2.GenerateResponse(delta=_delta(said, output, reason)))
                if first:
                    self._record_first_token(story, span)
                    self.tally.first_token(seen)
                if text.stop is not None:
                    break  # the workers do not know of stop strings
        span.set_attribute("gen_ai.usage.output_tokens", len(story.delivered))
        with telemetry.span(self._tracer, "router.finish", telemetry.context_of(span)):
            seen.finished = True
            await sending(
                inference_pb2.GenerateResponse(
                    finish=inference_pb2.Finish(
                        reason=reason,
                        stop=text.stop or "",
                        usage=story.usage(),
                        timing=story.timing(),
                        route=story.final_route(),
                    )
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

    @property
    def max_context(self) -> int:
        """Longest sequence, tokens; 0 while no limit is known."""
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
