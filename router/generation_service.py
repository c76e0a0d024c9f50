"""The generation service behind every protocol: admits or refuses a request, runs it, reports.

gRPC (`grpc_service`) and HTTP (`baton.gateway`) translate to and from it.
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
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer

from baton.errors import (
    BatonError,
    KvMismatch,
    Overloaded,
    RetryableError,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.telemetry import propagation, tracing
from baton.text import Tokenizer
from baton.v1 import fleet_pb2, inference_pb2
from router.admission import feasibility
from router.admission.admission import Admission, PromptChoices
from router.admission.tenants import AdmissionLease, Tenant
from router.dispatch.dispatch import Dispatch
from router.fleet.fleet import Fleet
from router.output.delivery import Delivery
from router.output.sink import Sink
from router.output.text_stream import TextStream
from router.placement.explain import explain
from router.placement.scoring import RETRY_AFTER_S
from router.queueing.wait_queue import WaitQueue
from router.request import LimitReached, RequestState, TokenizedRequest
from router.telemetry.request_span import RequestSpan, first_attributes, operation_of
from router.telemetry.stats import RequestRecord, RouterStats

# Texts for tenants instead of errors that describe the cluster.
_FOR_TENANTS = (
    (Overloaded, "there is no room for this request now: try again later"),
    (Unavailable, "the request cannot be served now: try again"),
    ((TransferFailed, Stale, KvMismatch), "the request failed within the cluster: try again"),
)
# Header or metadata with a caller's own id of its request, for logs and traces.
CALLERS_ID = "x-request-id"
CALLERS_ID_PATTERN = r"^[A-Za-z0-9._:/+=@-]{1,128}$"


def is_callers_id(text: str) -> bool:
    """Whether a text is a valid id; others are ignored."""
    return re.fullmatch(CALLERS_ID_PATTERN, text) is not None


@dataclass(frozen=True)
class Caller:
    """What a request's transport provides: headers (lower-case names) and the deadline."""

    metadata: tuple[tuple[str, str | bytes], ...] = ()
    time_left_s: float | None = None  # None: no deadline of its own
    tenant: str = ""  # name, for callers within this process, which have no key
    resumes: bool = False  # whether it can resume an interrupted stream at another router

    @property
    def request_id(self) -> str:
        """The caller's own id of its request, or empty."""
        given = (value for name, value in self.metadata if name == CALLERS_ID)
        return next(
            (value for value in given if isinstance(value, str) and is_callers_id(value)), ""
        )


class GenerationService:
    """Generation for callers. All methods raise BatonError. Event-loop thread only."""

    def __init__(
        self,
        admission: Admission,
        wait_queue: WaitQueue,
        dispatch: Dispatch,
        fleet: Fleet,
        tracer: Tracer,
    ) -> None:
        self.admission = admission
        self.wait_queue = wait_queue
        self._dispatch = dispatch
        self.fleet = fleet
        self._tracer = tracer
        self._limits = admission.limits
        self._idle = asyncio.Event()
        self._idle.set()
        self._deliveries: set[Delivery] = set()  # of running requests
        self.running = 0
        self.batches: Counter[str] = Counter()  # running batches of the HTTP API, by status
        self.batch_lines: Counter[str] = Counter()  # ended requests of batches, by result
        self.draining = False
        # Stop listening at a port that a sibling shares; return when the last connection is closed.
        self.on_leave: list[Callable[[], Coroutine[Any, Any, None]]] = []
        # Called with an HTTP Accept header; returns content type and body of /metrics.
        self.metrics_page: Callable[[str], tuple[str, bytes]] = lambda accept: ("text/plain", b"")

    @property
    def tokenizer(self) -> Tokenizer:
        return self.admission.tokenizer

    @property
    def stats(self) -> RouterStats:
        return self._dispatch.stats

    @property
    def queued(self) -> int:
        """Requests that wait for room on workers."""
        return self.wait_queue.depth

    @property
    def why_not_ready(self) -> str:
        """Why new requests are not accepted; empty when they are."""
        return "the router is draining" if self.draining else self.fleet.snapshot().why_not_ready

    @property
    def joins_traces(self) -> bool:
        """Whether requests join their callers' traces, which then decide on sampling."""
        return self._limits.trust_traceparent or self.admission.tenants.is_open

    @property
    def max_context(self) -> int:
        """Longest sequence in tokens; 0 while no limit is known."""
        return self.admission.prompts.context_limit(self.fleet.snapshot().max_context)

    def check_key(self, caller: Caller) -> None:
        """Raises Unauthenticated unless the caller has a tenant."""
        self.tenant_of(caller)

    def tenant_of(self, caller: Caller) -> Tenant:
        """The caller's tenant. Raises Unauthenticated."""
        tenants = self.admission.tenants
        if caller.tenant:
            return tenants.tenant_named(caller.tenant)
        return tenants.tenant_for(caller.metadata)

    def check_operator(self, caller: Caller) -> None:
        """Raises Unauthenticated unless the caller has an operator's key, or none is needed."""
        self.admission.tenants.check_admin(caller.metadata)

    def shown(self, error: BatonError, caller: Caller) -> BatonError:
        """An error as its caller may see it.

        Names and addresses of workers and sizes of queues are for operators and the router's log.
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
        choices: PromptChoices | None = None,
        number: int = 0,
    ) -> None:
        """Delivers one completion to `sink`; cancelling the task cancels it everywhere.

        `number`: index of the choice; choice 0 of a prompt must have its first token before the
        others begin. Raises Cancelled if the caller leaves its output unread for too long.
        """
        self.running += 1
        self._idle.clear()
        try:
            await self._generate(request, caller, sink, choices or PromptChoices(), number)
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
        choices: PromptChoices,
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
            contextlib.ExitStack() as stack,
        ):
            record.set_span(span, operation)
            record.in_batch = bool(caller.tenant)
            if callers_id := caller.request_id:
                record.callers_id = callers_id
                span.set_attribute("baton.callers_request_id", callers_id)
            trace = tracing.context_of(span)
            with tracing.span(self._tracer, "router.admit", trace):
                state, lease = await self._admit(request, caller, record, choices, number, stack)
            span.set_attribute("baton.request_id", record.request_id)
            span.set_attribute("baton.tenant", record.tenant)
            details = RequestSpan(span, self.admission.tokenizer, self._limits.trace_content)
            details.admitted(request, state.request)
            stack.enter_context(lease)
            with tracing.span(self._tracer, "router.check", trace):
                self._check(state)
            ticket = self._ticket(state.request, caller, request.resume_ticket)
            delivery = self._delivery(state, lease, record, sink, trace)
            try:
                await self._run(state, delivery, record, trace, caller, ticket)
            finally:
                details.ended(self.admission.model, state, delivery.finish_reason)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, caller: Caller
    ) -> inference_pb2.TokenizeResponse:
        tenant = self.tenant_of(caller)
        self.admission.resolve(request.model)
        tenant.charge_request()
        max_context = self.fleet.snapshot().max_context
        token_ids = await self.admission.prompts.tokenize(request, max_context, tenant=tenant)
        tenant.charge_tokens(len(token_ids))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_context=self.max_context)

    async def detokenize(self, model: str, token_ids: Sequence[int], caller: Caller) -> str:
        """The text of token ids; special tokens appear by their names."""
        tenant = self.admission.tenants.tenant_for(caller.metadata)
        self.admission.resolve(model)
        tenant.charge_request()
        text = await self.admission.prompts.detokenize(token_ids)
        tenant.charge_tokens(len(token_ids))
        return text

    def models(self, caller: Caller) -> list[inference_pb2.Model]:
        self.check_key(caller)
        own = (self.admission.model, *self.admission.config.api.model_aliases)
        names = dict.fromkeys(own, "") | dict.fromkeys(self.fleet.adapters(), self.admission.model)
        return [
            inference_pb2.Model(
                name=name,
                max_context=self.max_context,
                vocab_size=self.tokenizer.vocab_size,
                chat=self.tokenizer.has_chat_template,
                parent="" if name in own else parent,
            )
            for name, parent in names.items()
        ]

    async def explain(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> fleet_pb2.ExplainResponse:
        """Where a request would run now; nothing is charged and nothing is run."""
        snapshot = self.fleet.snapshot()
        tenant = self.admission.tenants.tenant_for_operator(caller.metadata)
        admitted = await self.admission.admit(
            request, caller.time_left_s, snapshot.max_context, "explained", tenant, PromptChoices()
        )
        admitted = self.admission.preview(admitted, tenant, request.priority)
        demand = self._dispatch.demand(RequestState(admitted))
        snapshot = snapshot.holding(admitted.adapter)
        queue, now = self.wait_queue, time.monotonic()
        refused = feasibility.why_refused(admitted, demand, snapshot, queue, now)
        response = explain(snapshot, demand, refused)
        response.tenant, response.queued = tenant.name, queue.depth
        return response

    async def idle(self) -> None:
        await self._idle.wait()

    def give_up(self) -> None:
        """Ends what still runs with UNAVAILABLE, so that callers go on at another router."""
        for delivery in self._deliveries:
            text = f"the router left {delivery.progress}: go on at another one"
            delivery.end(Unavailable(text))

    async def _admit(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        record: RequestRecord,
        choices: PromptChoices,
        number: int,
        stack: contextlib.ExitStack,
    ) -> tuple[RequestState, AdmissionLease]:
        """`stack` is closed at the request's end."""
        # A further choice was accepted with the first one.
        if self.draining and not number:
            raise Unavailable("the router is draining: try another one", RETRY_AFTER_S)
        tenant = self.tenant_of(caller)
        record.tenant = tenant.name
        if request.workers:
            self.check_operator(caller)
        ticket, tickets = request.resume_ticket, self.admission.tickets
        resumes = bool(request.resumed_token_ids and ticket)
        resumes = resumes and stack.enter_context(tickets.use(ticket, tenant.name))
        if not (number or resumes):
            self.wait_queue.check_room(tenant.share)
        admitted = await self.admission.admit(
            request,
            caller.time_left_s,
            self.fleet.snapshot().max_context,
            secrets.token_hex(8),
            tenant,
            choices,
            number,
        )
        if resumes and tickets.is_for(ticket, admitted.prompt, admitted.kv_salt):
            admitted.has_ticket = True
        lease = self.admission.enter(admitted, tenant, request.priority, choices, number)
        state = RequestState(admitted, record.arrived, record.arrived_ns)
        self.stats.admitted(record, state)
        return state, lease

    def _ticket(self, request: TokenizedRequest, caller: Caller, shown: bytes) -> bytes:
        """The ticket with which the request may be resumed: the one it has shown, or a new one."""
        if not caller.resumes or request.has_ticket:
            return shown if request.has_ticket else b""
        left_s = request.time_left_s
        return self.admission.tickets.issue(request.tenant, request.prompt, request.kv_salt, left_s)

    def _check(self, state: RequestState) -> None:
        """Predicts the time to first token. Raises Overloaded if that would be too late."""
        began, demand = time.perf_counter(), self._dispatch.demand(state)
        try:
            state.predicted_ttft_s = feasibility.check(
                state.request,
                demand,
                self.fleet.snapshot().holding(state.request.adapter),
                self.wait_queue,
                time.monotonic(),
            )
        finally:
            self.stats.on_placed(time.perf_counter() - began)

    def _delivery(
        self,
        state: RequestState,
        lease: AdmissionLease,
        record: RequestRecord,
        sink: Sink,
        trace: Context,
    ) -> Delivery:
        def on_tokens(num_tokens: int, gap_s: float | None) -> None:
            lease.delivered(num_tokens)
            self.stats.delivered(num_tokens, gap_s)

        def on_first() -> None:  # records a span as long as the time to first token
            tracing.record(self._tracer, "router.first_token", trace, state.started_ns)
            self.stats.first_token(record)

        text = TextStream(self.admission.tokenizer, state.request)
        return Delivery(state, text, sink, on_tokens, on_first)

    async def _run(
        self,
        state: RequestState,
        delivery: Delivery,
        record: RequestRecord,
        trace: Context,
        caller: Caller,
        ticket: bytes,
    ) -> None:
        """Runs an admitted request; `ticket` is the one with which it may be resumed."""
        self._deliveries.add(delivery)
        try:
            async with delivery.scope:
                started = inference_pb2.Started(
                    request_id=record.request_id,
                    trace_id=record.trace_id,
                    prompt_tokens=len(state.request.prompt),
                    resumed_tokens=len(state.request.resumed),
                    resume_ticket=ticket,
                )
                delivery.start(started)
                await self._dispatch.run(state, trace, delivery.put)
                with tracing.span(self._tracer, "router.finish", trace):
                    route = state.final_route()
                    if not self.admission.tenants.is_operator(caller.metadata):
                        route.prefill = route.decode = ""
                    record.finished = True
                    await delivery.finish(route)
        except TimeoutError:
            raise delivery.timeout_error from None
        finally:
            self._deliveries.discard(delivery)
