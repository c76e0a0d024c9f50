"""The generation service behind every protocol: refuse or admit, run, report.

gRPC (`service`) and HTTP are thin over this.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.trace import SpanKind, Tracer

from baton.errors import (
    ENDINGS,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    KvMismatch,
    Overloaded,
    RetryableError,
    Stale,
    TransferFailed,
    Unavailable,
    as_exception,
)
from baton.telemetry import propagation, tracing
from baton.text import Tokenizer
from baton.v1 import common_pb2, fleet_pb2, inference_pb2
from router.admission import feasibility
from router.admission.admission import Admission, Choices
from router.admission.tenants import AdmissionLease, LimitReached, Tenant
from router.admission.wait_queue import WaitQueue
from router.dispatch.dispatch import Dispatch
from router.dispatch.request_state import (
    ParsedOutput,
    RequestState,
    TextStream,
    TokenizedRequest,
)
from router.fleet.fleet import Fleet
from router.placement.placement import RETRY_AFTER_S
from router.telemetry.request_span import RequestSpan, first_attributes, operation_of
from router.telemetry.stats import RequestRecord, RouterStats

# Output of one request may wait for a caller that reads slowly: so much of it, and so long.
MAX_UNREAD_BYTES = 1 << 20
UNREAD_S = 10.0
# What a tenant is told instead of what failed within the cluster.
_FOR_TENANTS = (
    (Overloaded, "there is no room for this request now: try again later"),
    (Unavailable, "the request cannot be served now: try again"),
    ((TransferFailed, Stale, KvMismatch), "the request failed within the cluster: try again"),
)
_STOP = common_pb2.FINISH_REASON_STOP
_REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


# What a caller may call its request by, in its headers or metadata: for logs and traces.
CALLERS_ID = "x-request-id"
CALLERS_ID_PATTERN = r"^[A-Za-z0-9._:/+=@-]{1,128}$"


def is_callers_id(text: str) -> bool:
    """Whether that can be an id; others are taken for none."""
    return re.fullmatch(CALLERS_ID_PATTERN, text) is not None


@dataclass(frozen=True)
class Caller:
    """What a request's transport knows of it: headers (lower-case names) and its deadline."""

    metadata: tuple[tuple[str, str | bytes], ...] = ()
    time_left_s: float | None = None  # None: no deadline of its own
    tenant: str = ""  # of a caller within this process, which has no key
    resumes: bool = False  # whether it can go on with a broken stream at another router

    @property
    def request_id(self) -> str:
        """What the caller calls its request, or nothing."""
        given = (value for name, value in self.metadata if name == CALLERS_ID)
        return next(
            (value for value in given if isinstance(value, str) and is_callers_id(value)), ""
        )


class Sink(Protocol):
    """Where the output of one request goes. Event-loop thread only."""

    def start(self, started: inference_pb2.Started) -> None:
        """The request is admitted."""

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        """Takes the prompt's log-probabilities, if asked for, before any output."""

    def put(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        reason: common_pb2.FinishReason,
        stop: str,
        parsed: ParsedOutput | None = None,
    ) -> None:
        """Takes new output, without waiting. Raises Cancelled where too much of it is unread.

        `stop` is the stop string that ended it, if one did; `parsed`, what it has beside text, for
        a chat with tools or of a model that reasons.
        """

    async def finish(self, finish: inference_pb2.Finish) -> None:
        """Returns once the caller has taken all, so far as that can be known.

        Raises Cancelled where it does not read for too long.
        """


class Unread:
    """Watches how much output a caller leaves unread, and for how long."""

    def __init__(self) -> None:
        self._waiting = 0
        self._most = MAX_UNREAD_BYTES
        self._read_at = 0.0  # when the caller was last seen to read

    def allow(self, num_bytes: int) -> None:
        """So much more may wait: what came at once, however fast the caller reads."""
        self._most += num_bytes

    def add(self, waiting: int, new: int) -> None:
        """`waiting` bytes wait for the caller, and `new` ones come behind them.

        Raises Cancelled where that is too much, or where nothing was read for too long.
        """
        now = time.monotonic()
        if not waiting or waiting < self._waiting or not self._waiting:  # or it is the first
            self._read_at = now
        self._waiting = waiting + new
        if self._waiting > self._most:
            raise Cancelled(f"the caller left {self._most >> 10} KiB of output unread")
        if now - self._read_at > UNREAD_S:
            raise unread_for_long()


def unread_for_long() -> Cancelled:
    """What ends a request whose caller reads nothing."""
    return Cancelled(f"the caller did not read its output for {UNREAD_S:.0f} s")


class _Delivery:
    """Brings one request's tokens to its caller, until the deadline at the latest."""

    def __init__(
        self,
        state: RequestState,
        text: TextStream,
        sink: Sink,
        lease: AdmissionLease,
        stats: RouterStats,
        on_first: Callable[[], None],
    ) -> None:
        """`on_first` is called once, behind the first output; what is resumed has had it."""
        self._state = state
        self._text = text
        self._sink = sink
        self._lease = lease
        self._stats = stats
        self._on_first = None if state.request.resumed else on_first
        self.scope = asyncio.timeout(state.request.time_left_s)  # around all that the request does
        self._error: Exception | None = None
        self.reason = common_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def after(self) -> str:
        """How far the request has come, in words."""
        return f"after {len(self._state.delivered)} tokens"

    @property
    def stop(self) -> str:
        """The stop string that was met, or nothing."""
        return self._text.stop or ""

    def usage(self) -> common_pb2.Usage:
        usage = self._state.usage()
        usage.reasoning_tokens = self._text.reasoning_tokens
        return usage

    def put(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        reason: common_pb2.FinishReason,
    ) -> bool:
        """From a worker's event to the caller's connection; see `router.dispatch.attempt.Deliver`.

        A stop string may end among the tokens of a step: those behind it are not delivered.
        """
        try:
            text, count = self._text.advance(token_ids, _REASONS[reason])
            if stopped := self._text.stop is not None:
                token_ids, logprobs, reason = token_ids[:count], logprobs[:count], _STOP
            if reason == _STOP and self._text.calls_tools:
                reason = common_pb2.FINISH_REASON_TOOL_CALLS
            self.reason = reason
            if not self._state.delivered and self._state.request.params.prompt_logprobs is not None:
                self._tell_prompt()
            gap_s = self._state.deliver(token_ids)
            self._sink.put(text, token_ids, logprobs, reason, self.stop, self._text.parsed)
            self._lease.delivered(len(token_ids))
            # Tokens that are kept until there are some have no time of their own.
            streams = self._state.request.stream_interval <= 1
            self._stats.delivered(len(token_ids), gap_s if streams else None)
            if on_first := self._on_first:
                self._on_first = None
                on_first()
            return stopped
        except ENDINGS:
            raise
        except BaseException as error:
            self._error = as_exception(error)
            return True

    def _tell_prompt(self) -> None:
        logprobs, prompt = self._state.prompt_logprobs, self._state.request.prompt
        assert logprobs is not None and len(logprobs.logprobs) == len(prompt) - 1
        logprobs.token_ids.extend(prompt)
        self._sink.prompt(logprobs)

    def end(self, error: BatonError) -> None:
        """Ends the request with an error from outside its task, unless it has ended."""
        if self._error is None and not self.scope.expired():
            self._error = error
            self.scope.reschedule(asyncio.get_running_loop().time())

    @property
    def timed_out(self) -> Exception:
        """What the scope's TimeoutError stands for: an end from elsewhere, or the deadline."""
        return self._error or DeadlineExceeded(f"the deadline passed {self.after}")

    async def finish(self, finish: inference_pb2.Finish) -> None:
        """Sends the end, unless output could not be delivered."""
        if self._error is not None:
            raise self._error
        await self._sink.finish(finish)


class GenerationService:
    """Generation for callers. All methods raise BatonError. Event-loop thread only."""

    def __init__(
        self,
        admission: Admission,
        wait_queue: WaitQueue,
        dispatch: Dispatch,
        fleet: Fleet,
        tracer: Tracer,
        trace_content_chars: int = 0,
        trust_traceparent: bool = False,
    ) -> None:
        self.admission = admission
        self.wait_queue = wait_queue
        self._dispatch = dispatch
        self.fleet = fleet
        self._tracer = tracer
        self._trace_content_chars = trace_content_chars
        self._trust_traceparent = trust_traceparent  # of tenants' callers
        self._idle = asyncio.Event()
        self._idle.set()
        self._deliveries: set[_Delivery] = set()  # of requests that run
        self.running = 0
        self.batches: Counter[str] = Counter()  # of the HTTP API that run here, by status
        self.batch_lines: Counter[str] = Counter()  # their requests that ended here, by result
        self.draining = False
        # Leave a port to a sibling; each returns once its last connection is closed.
        self.on_leave: list[Callable[[], Coroutine[Any, Any, None]]] = []
        # Of an HTTP Accept header: (content type, body). For servers of /metrics beside us.
        self.metrics_page: Callable[[str], tuple[str, bytes]] = lambda accept: ("text/plain", b"")

    @property
    def tokenizer(self) -> Tokenizer:
        return self.admission.tokenizer

    @property
    def stats(self) -> RouterStats:
        return self._dispatch.stats

    @property
    def why_not_ready(self) -> str:
        """Why new requests are not taken; empty when they are."""
        return "the router is draining" if self.draining else self.fleet.snapshot().why_not_ready

    @property
    def joins_traces(self) -> bool:
        """Whether requests belong to the traces of their callers, who decide on their sampling."""
        return self._trust_traceparent or self.admission.tenants.is_open

    @property
    def max_context(self) -> int:
        """Longest sequence, tokens; 0 while no limit is known."""
        own, workers = self.admission.tokenizer.max_context, self.fleet.snapshot().max_context
        return min(own, workers) if own and workers else own or workers

    def check_key(self, caller: Caller) -> None:
        """Raises Unauthenticated unless the caller has a tenant."""
        self.tenant_of(caller)

    def tenant_of(self, caller: Caller) -> Tenant:
        """Whose requests these are. Raises Unauthenticated."""
        tenants = self.admission.tenants
        return tenants.named(caller.tenant) if caller.tenant else tenants.of(caller.metadata)

    def check_operator(self, caller: Caller) -> None:
        """Raises Unauthenticated unless the caller has an operator's key, or none is needed."""
        self.admission.tenants.check_admin(caller.metadata)

    def shown(self, error: BatonError, caller: Caller) -> BatonError:
        """An error as its caller may see it: names of workers, their addresses and sizes of queues
        are for operators, and are in the router's log.
        """
        text = next((text for kind, text in _FOR_TENANTS if isinstance(error, kind)), None)
        if text is None or isinstance(error, LimitReached):
            return error
        if self.admission.tenants.is_operator(caller.metadata):
            return error
        if isinstance(error, RetryableError):
            return type(error)(text, error.retry_after_s)
        return type(error)(text)

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        sink: Sink,
        choices: Choices | None = None,
        number: int = 0,
    ) -> None:
        """Gives one completion to `sink`. Cancelling it cancels it everywhere.

        Of several choices it is the one with that number; number 0 must have its first token before
        the others of its prompt begin. Raises Cancelled where the caller leaves its output unread
        for too long.
        """
        self.running += 1
        self._idle.clear()
        try:
            await self._generate(request, caller, sink, choices or Choices(), number)
        except BatonError as error:
            if (shown := self.shown(error, caller)) is error:
                raise
            raise shown from error
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        sink: Sink,
        choices: Choices,
        number: int,
    ) -> None:
        parent = propagation.extract(caller.metadata if self.joins_traces else ())
        operation, model = operation_of(request), self.admission.model
        known = first_attributes(operation, model)
        with (
            self.stats.request() as record,
            tracing.span(
                self._tracer, f"{operation} {model}", parent, known, SpanKind.SERVER
            ) as span,
            contextlib.ExitStack() as held,
        ):
            record.span, record.trace_id = span, tracing.trace_id_of(span)
            record.held = tracing.is_held(span)
            record.in_batch = bool(caller.tenant)
            record.operation = operation
            if callers_id := caller.request_id:
                record.callers_id = callers_id
                span.set_attribute("baton.callers_request_id", callers_id)
            trace = tracing.context_of(span)
            with tracing.span(self._tracer, "router.admit", trace):
                state, lease = await self._admit(request, caller, record, choices, number, held)
            span.set_attribute("baton.request_id", record.request_id)
            span.set_attribute("baton.tenant", record.tenant)
            told = RequestSpan(span, self.admission.tokenizer, self._trace_content_chars)
            told.admitted(request, state.request)
            held.enter_context(lease)
            with tracing.span(self._tracer, "router.check", trace):
                self._check(state)
            await self._deliver(state, lease, record, sink, told, caller, request.resume_ticket)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, caller: Caller
    ) -> inference_pb2.TokenizeResponse:
        tenant = self.tenant_of(caller)
        self.admission.check_model(request.model)
        tenant.charge_request()
        most = self.fleet.snapshot().max_context
        token_ids = await self.admission.tokenize(request, most, tenant=tenant)
        tenant.charge_tokens(len(token_ids))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_context=self.max_context)

    async def detokenize(self, model: str, token_ids: Sequence[int], caller: Caller) -> str:
        """The text of token ids; special tokens are shown by their names."""
        tenant = self.admission.tenants.of(caller.metadata)
        self.admission.check_model(model)
        tenant.charge_request()
        text = await self.admission.detokenize(token_ids)
        tenant.charge_tokens(len(token_ids))
        return text

    def models(self, caller: Caller) -> list[inference_pb2.Model]:
        self.check_key(caller)
        return [
            inference_pb2.Model(
                name=name,
                max_context=self.max_context,
                vocab_size=self.tokenizer.vocab_size,
                chat=self.tokenizer.has_chat_template,
            )
            for name in dict.fromkeys((self.admission.model, *self.admission.aliases))
        ]

    async def explain(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> fleet_pb2.ExplainResponse:
        """Where a request would run now; nothing is charged and nothing is run."""
        snapshot = self.fleet.snapshot()
        tenant = self.admission.tenants.of_operator(caller.metadata)
        admitted = await self.admission.admit(
            request, caller.time_left_s, snapshot.max_context, "explained", tenant, Choices()
        )
        admitted = self.admission.preview(admitted, tenant, request.priority)
        needs = self._dispatch.placement_request(RequestState(admitted))
        return feasibility.explain(admitted, needs, snapshot, self.wait_queue, time.monotonic())

    async def idle(self) -> None:
        await self._idle.wait()

    def give_up(self) -> None:
        """Ends what still runs with UNAVAILABLE, so that callers go on at another router."""
        for delivery in self._deliveries:
            left = f"the router left {delivery.after}: go on at another one"
            delivery.end(Unavailable(left))

    async def _admit(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        record: RequestRecord,
        choices: Choices,
        number: int,
        held: contextlib.ExitStack,
    ) -> tuple[RequestState, AdmissionLease]:
        """`held` is left at the request's end."""
        # A further choice was accepted with the first one, wherever that could be.
        if self.draining and not number:
            raise Unavailable("the router is draining: try another one", RETRY_AFTER_S)
        tenant = self.tenant_of(caller)
        record.tenant = tenant.name
        if request.workers:
            self.check_operator(caller)
        ticket, tickets = request.resume_ticket, self.admission.tickets
        resumes = bool(request.resumed_token_ids and ticket)
        resumes = resumes and held.enter_context(tickets.taken(ticket, tenant.name))
        if not (number or resumes):
            self.wait_queue.check_room(tenant.flow)
        admitted = await self.admission.admit(
            request,
            caller.time_left_s,
            self.fleet.snapshot().max_context,
            secrets.token_hex(8),
            tenant,
            choices,
            number,
        )
        if resumes and tickets.is_for(ticket, admitted.prompt, admitted.cache_salt):
            admitted.has_ticket = True
        lease = self.admission.enter(admitted, tenant, request.priority, choices, number)
        state = RequestState(admitted, record.arrived, record.arrived_ns)
        self.stats.admitted(record, state)
        return state, lease

    def _ticket(self, request: TokenizedRequest, caller: Caller, shown: bytes) -> bytes:
        """For the request that resumes this one, if it could: the one that it has shown itself."""
        if not caller.resumes or request.has_ticket:
            return shown if request.has_ticket else b""
        left_s = request.time_left_s
        return self.admission.tickets.give(
            request.tenant, request.prompt, request.cache_salt, left_s
        )

    def _check(self, state: RequestState) -> None:
        """Predicts its first token. Raises Overloaded where that would be too late."""
        began, needs = time.perf_counter(), self._dispatch.placement_request(state)
        try:
            state.predicted_ttft_s = feasibility.check(
                state.request, needs, self.fleet.snapshot(), self.wait_queue, time.monotonic()
            )
        finally:
            self.stats.on_placed(time.perf_counter() - began)

    async def _deliver(
        self,
        state: RequestState,
        lease: AdmissionLease,
        record: RequestRecord,
        sink: Sink,
        told: RequestSpan,
        caller: Caller,
        ticket: bytes,
    ) -> None:
        """`ticket` is the one that the request has shown."""
        span = record.span
        assert span is not None
        trace = tracing.context_of(span)

        def on_first() -> None:  # records a span as long as the time to first token
            tracing.record(self._tracer, "router.first_token", trace, state.started_ns)
            self.stats.first_token(record)

        text = TextStream(self.admission.tokenizer, state.request)
        delivery = _Delivery(state, text, sink, lease, self.stats, on_first)
        self._deliveries.add(delivery)
        try:
            async with delivery.scope:
                started = inference_pb2.Started(
                    request_id=record.request_id,
                    trace_id=record.trace_id,
                    prompt_tokens=len(state.request.prompt),
                    resumed_tokens=len(state.request.resumed),
                    resume_ticket=self._ticket(state.request, caller, ticket),
                )
                sink.start(started)
                await self._dispatch.run(state, trace, delivery.put)
                with tracing.span(self._tracer, "router.finish", trace):
                    route = state.final_route()
                    if not self.admission.tenants.is_operator(caller.metadata):
                        route.prefill = route.decode = ""
                    finish = inference_pb2.Finish(
                        reason=delivery.reason,
                        stop=delivery.stop,
                        usage=delivery.usage(),
                        timing=state.timing(),
                        route=route,
                        embedding=state.embedding,
                    )
                    record.finished = True
                    await delivery.finish(finish)
        except TimeoutError:
            raise delivery.timed_out from None
        finally:
            self._deliveries.discard(delivery)
            told.ended(self.admission.model, state, delivery.reason)
