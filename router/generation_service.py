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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer

from baton.config import RouterLimits
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    KvMismatch,
    Overloaded,
    RetryableError,
    Stale,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from baton.telemetry import propagation, tracing
from baton.v1 import fleet_pb2, inference_pb2
from router.admission import early_rejection
from router.admission.admission import PromptChoices
from router.admission.resume_ticket import ResumeTickets
from router.admission.tenants import AdmissionLease, Tenant, Tenants
from router.models import Models, ModelVersion, Target, resumed_name
from router.output.delivery import Delivery
from router.output.sink import Sink
from router.output.text_stream import TextStream
from router.placement.explain import explain
from router.placement.room import RETRY_AFTER_S
from router.request import LimitReached, RequestState, TokenizedRequest
from router.telemetry.request_span import RequestSpan, admission_times, first_attributes
from router.telemetry.stats import RequestRecord, RouterStats

# In a turn of the event loop, so that streams wait no longer when many requests come together.
_MOST_ADMITTED_A_TURN = 8
T = TypeVar("T")

# Texts for tenants instead of errors that describe the cluster.
_FOR_TENANTS = (
    (early_rejection.Late, "there is no room before ttft_target_ms or the deadline: allow more"),
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


@dataclass(eq=False)
class RequestGroup:
    """Requests of one body, such as the choices of a prompt: they arrived together.

    trace: context of the span around all of them · arrived: `time.monotonic()`.
    """

    trace: Context
    arrived: float = field(default_factory=time.monotonic)
    input_tokens: int = 0  # of those that ended, a prompt once
    output_tokens: int = 0


@dataclass(frozen=True)
class Caller:
    """What a request's transport provides: headers (lower-case names) and the deadline."""

    metadata: tuple[tuple[str, str | bytes], ...] = ()
    deadline: float | None = None  # `time.monotonic()`; None: it has none of its own
    tenant: str = ""  # name, for callers within this process, which have no key
    own_id: str = ""  # the router's id of the request, if it has one; else it gets one
    resumes: bool = False  # whether it can resume an interrupted stream at another router
    group: RequestGroup | None = None  # where its body stands for several requests
    # Attributes of its span: milliseconds that were spent before it came here.
    times: dict[str, float] = field(default_factory=dict, compare=False)
    # Output that waits in this process until the caller reads on; None: not known.
    unread_bytes: Callable[[], int] | None = field(default=None, compare=False)

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
        models: Models,
        tenants: Tenants,
        limits: RouterLimits,
        stats: RouterStats,
        tracer: Tracer,
        tickets: ResumeTickets | None = None,
    ) -> None:
        self.models = models
        self.tenants = tenants
        self.limits = limits
        self.stats = stats
        self._tracer = tracer
        self._tickets = tickets or ResumeTickets()
        self._idle = asyncio.Event()
        self._idle.set()
        self._deliveries: set[Delivery] = set()  # of running requests
        self._entrance = asyncio.Semaphore(_MOST_ADMITTED_A_TURN)
        self.running = 0
        self.batches: Counter[str] = Counter()  # running batches of the HTTP API, by status
        self.batch_lines: Counter[str] = Counter()  # ended requests of batches, by result
        self.draining = False
        # Stop listening at a port that a sibling shares; return when the last connection is closed.
        self.on_leave: list[Callable[[], Coroutine[Any, Any, None]]] = []
        # Called with an HTTP Accept header; returns content type and body of /metrics.
        self.metrics_page: Callable[[str], tuple[str, bytes]] = lambda accept: ("text/plain", b"")

    @property
    def queued(self) -> int:
        """Requests that wait for room on workers."""
        return sum(version.wait_queue.depth for version in self.models.versions.values())

    @property
    def why_not_ready(self) -> str:
        """Why new requests are not accepted; empty when they are."""
        return "the router is draining" if self.draining else self.models.why_not_ready

    @property
    def joins_traces(self) -> bool:
        """Whether requests join their callers' traces, which then decide on sampling."""
        return self.limits.trust_traceparent or self.tenants.is_open

    @property
    def max_context(self) -> int:
        """Longest sequence of any model in tokens; 0 while no limit is known."""
        limits = [version.max_context for version in self.models.versions.values()]
        return max(limits) if all(limits) else 0

    def resolve(self, model: str, session: str, caller: Caller) -> Target:
        """The version of a model for a caller's request; see `Models.resolve`.

        Requests of one session get the same version, without one those of a tenant, if there are
        several. Raises Unauthenticated, ModelNotFound.
        """
        tenant = self.tenant_of(caller)
        key = tenant.name if self.tenants.are_several else secrets.token_hex(8)
        return self.models.resolve(model, f"{tenant.name}/{session}" if session else key)

    def check_key(self, caller: Caller) -> None:
        """Raises Unauthenticated unless the caller has a tenant."""
        self.tenant_of(caller)

    def tenant_of(self, caller: Caller) -> Tenant:
        """The caller's tenant. Raises Unauthenticated."""
        if caller.tenant:
            return self.tenants.tenant_named(caller.tenant)
        return self.tenants.tenant_for(caller.metadata)

    def check_operator(self, caller: Caller) -> None:
        """Raises Unauthenticated unless the caller has an operator's key, or none is needed."""
        self.tenants.check_admin(caller.metadata)

    def shown(self, error: BatonError, caller: Caller) -> BatonError:
        """An error as its caller may see it.

        Names and addresses of workers and sizes of queues are for operators and the router's log.
        """
        text = next((text for kind, text in _FOR_TENANTS if isinstance(error, kind)), None)
        if text is None or isinstance(error, LimitReached):
            return error
        if self.tenants.is_operator(caller.metadata):
            return error
        if isinstance(error, RetryableError):
            return type(error)(text, error.retry_after_s)
        return type(error)(text)

    @contextlib.contextmanager
    def group(self, caller: Caller, count: int) -> Iterator[Caller]:
        """Yields the caller of `count` requests, which have one trace and arrive now.

        Their times count from here, however late each of them begins. Conventional attributes of
        usage are those of their own spans, which are summed: sums have other names.
        """
        parent, known = self._trace_of(caller), {"baton.choices": count}
        with tracing.span(self._tracer, "router.choices", parent, known, SpanKind.SERVER) as span:
            group = RequestGroup(tracing.context_of(span))
            span.set_attributes(caller.times)
            try:
                yield replace(caller, group=group, times={}, unread_bytes=None)
            finally:
                _describe_reader(span, caller)
                span.set_attribute("baton.input_tokens", group.input_tokens)
                span.set_attribute("baton.output_tokens", group.output_tokens)

    def _trace_of(self, caller: Caller) -> Context:
        """The context in which a request's span begins."""
        if caller.group is not None:
            return caller.group.trace
        return propagation.extract(caller.metadata if self.joins_traces else ())

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        sink: Sink,
        choices: PromptChoices | None = None,
        number: int = 0,
        target: Target | None = None,
    ) -> None:
        """Delivers one completion to `sink`; cancelling the task cancels it everywhere.

        `number`: index of the choice; choice 0 of a prompt must have its first token before the
        others begin. `target`: what `resolve` returned for the request.
        Raises Cancelled if the caller leaves its output unread for too long.
        """
        self.running += 1
        self._idle.clear()
        try:
            choices = choices or PromptChoices()
            await self._generate(request, caller, sink, choices, number, target)
        except BatonError as error:
            if self.shown(error, caller) is error:
                raise
            # Not kept in a variable: the frame and the error would refer to each other.
            raise self.shown(error, caller) from error
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    def refused(self, error: Exception, caller: Caller | None = None) -> None:
        """Counts a request that `error` ended before `generate`; `caller`: None if not known."""
        record = RequestRecord()
        if caller is not None:
            record.request_id = caller.own_id or secrets.token_hex(8)
            record.callers_id = caller.request_id
            with contextlib.suppress(Unauthenticated):
                record.tenant = self.tenant_of(caller).name
        self.stats.refused(record, error)

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        sink: Sink,
        choices: PromptChoices,
        number: int,
        target: Target | None,
    ) -> None:
        parent, group = self._trace_of(caller), caller.group
        operation = tracing.operation_of(request)
        known = first_attributes(operation)
        with (
            self.stats.request() as record,
            tracing.span(self._tracer, operation, parent, known, SpanKind.SERVER) as span,
            contextlib.ExitStack() as stack,
        ):
            record.set_span(span, operation)
            record.request_id = caller.own_id or secrets.token_hex(8)
            if group is not None:
                record.arrived = group.arrived
            record.in_batch, record.asked_model = bool(caller.tenant), request.model
            if callers_id := caller.request_id:
                record.callers_id = callers_id
                span.set_attribute("baton.callers_request_id", callers_id)
            span.set_attributes(caller.times)
            stack.callback(_describe_reader, span, caller)
            trace = tracing.context_of(span)
            with tracing.span(self._tracer, "router.admit", trace) as admit:
                await self._entrance.acquire()
                asyncio.get_running_loop().call_soon(self._entrance.release)
                # A further choice was accepted with the first one.
                if self.draining and not number:
                    raise Unavailable("the router is draining: try another one", RETRY_AFTER_S)
                record.tenant = self.tenant_of(caller).name
                target = target or self.resolve(request.model, request.session, caller)
                stack.enter_context(_served(record, target))
                version = target.version
                state, lease = await self._admit(
                    target, request, caller, record, choices, number, stack
                )
                admit.set_attributes(admission_times(state.request))
            span.set_attribute("baton.request_id", record.request_id)
            details = RequestSpan(span, version.admission.tokenizer, self.limits.trace_content)
            details.admitted(request, state.request, choices.of_prompt)
            stack.enter_context(lease)
            with tracing.span(self._tracer, "router.check", trace):
                self._check(version, state)
            ticket = self._ticket(state.request, caller, request.resume_ticket)
            delivery = self._delivery(version, state, lease, record, sink, trace)
            try:
                await self._run(version, state, delivery, record, trace, caller, ticket)
            finally:
                details.ended(str(version), state, delivery.finish_reason)
                if group is not None:
                    group.input_tokens += 0 if number else len(state.request.prompt)
                    group.output_tokens += len(state.delivered)

    async def tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        caller: Caller,
        target: Target | None = None,
    ) -> inference_pb2.TokenizeResponse:
        """The tokens of a text or chat; `target` as for `generate`."""
        tenant = self.tenant_of(caller)
        version = (target or self.resolve(request.model, "", caller)).version
        tenant.charge_request()
        max_context = version.fleet.snapshot().max_context
        prompts = version.admission.prompts
        left_s = self.deadline_of(caller) - time.monotonic()
        token_ids = await prompts.tokenize(request, max_context, left_s, tenant)
        tenant.charge_tokens(len(token_ids))
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_context=version.max_context)

    def deadline_of(self, caller: Caller) -> float:
        """`time.monotonic()` at a caller's deadline: its own, or the default from now."""
        if caller.deadline is not None:
            return caller.deadline
        return time.monotonic() + self.limits.default_timeout_s

    @contextlib.asynccontextmanager
    async def within(self, caller: Caller) -> AsyncIterator[None]:
        """Ends what waits inside, and raises DeadlineExceeded, at the caller's deadline."""
        try:
            async with asyncio.timeout(self.deadline_of(caller) - time.monotonic()):
                yield
        except DeadlineExceeded:  # a TimeoutError, too
            raise
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request waited") from None

    async def detokenize(self, model: str, token_ids: Sequence[int], caller: Caller) -> str:
        """The text of token ids; special tokens appear by their names."""
        tenant = self.tenants.tenant_for(caller.metadata)
        version = self.resolve(model, "", caller).version
        tenant.charge_request()
        async with self.within(caller):
            text = await version.admission.prompts.detokenize(token_ids)
        tenant.charge_tokens(len(token_ids))
        return text

    def list_models(self, caller: Caller) -> list[inference_pb2.Model]:
        """The names that requests may use."""
        self.check_key(caller)
        models = []
        for name, root in self.models.listed():
            try:
                target = self.models.resolve(name, "")
            except BatonError:  # a route to a model that this router has no --model for
                continue
            version = target.version
            models.append(
                inference_pb2.Model(
                    name=name,
                    root=root,
                    max_context=version.max_context,
                    vocab_size=version.admission.tokenizer.vocab_size,
                    chat=version.admission.tokenizer.has_chat_template,
                    parent=str(version) if target.adapter else "",
                )
            )
        return models

    async def explain(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> fleet_pb2.ExplainResponse:
        """Where a request would run now; nothing is charged and nothing is run."""
        tenant = self.tenants.tenant_for_operator(caller.metadata)
        target = self.models.resolve(request.model, request.session or tenant.name)
        version, admission = target.version, target.version.admission
        snapshot = version.fleet.snapshot().holding(target.adapter)
        admitted = await admission.admit(
            request,
            self.deadline_of(caller),
            snapshot.max_context,
            "explained",
            tenant,
            PromptChoices(),
            model=version.full_name,
            adapter=target.adapter,
        )
        admitted = admission.preview(admitted, tenant, request.priority, snapshot.prefill_rate)
        demand = version.dispatch.demand(RequestState(admitted))
        queue, now = version.wait_queue, time.monotonic()
        refused = early_rejection.why_refused(admitted, demand, snapshot, queue, now)
        response = explain(snapshot, demand, refused)
        response.tenant, response.queued = tenant.name, queue.depth
        response.model = str(version)
        return response

    async def run_in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs long work of a protocol on the threads for texts of the first model."""
        return await self.models.texts[0][1].prompts.run_in_thread(work, *args)

    async def idle(self) -> None:
        await self._idle.wait()

    def give_up(self) -> None:
        """Ends what still runs with UNAVAILABLE, so that callers go on at another router."""
        for delivery in self._deliveries:
            text = f"the router left {delivery.progress}: go on at another one"
            delivery.end(Unavailable(text))

    async def _admit(
        self,
        target: Target,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        record: RequestRecord,
        choices: PromptChoices,
        number: int,
        stack: contextlib.ExitStack,
    ) -> tuple[RequestState, AdmissionLease]:
        """`stack` is closed at the request's end."""
        tenant, version = self.tenant_of(caller), target.version
        if request.workers:
            self.check_operator(caller)
        ticket, tickets = request.resume_ticket, self._tickets
        resumes = bool(request.resumed_token_ids and ticket)
        resumes = resumes and stack.enter_context(tickets.use(ticket, tenant.name))
        if not (number or resumes):
            version.wait_queue.check_room(tenant.share)
        snapshot = version.fleet.snapshot()
        async with self.within(caller):  # work on threads may wait behind that of others
            admitted = await version.admission.admit(
                request,
                self.deadline_of(caller),
                snapshot.max_context,
                record.request_id,
                tenant,
                choices,
                number,
                version.full_name,
                target.adapter,
            )
        if resumes and tickets.is_for(ticket, admitted.prompt, admitted.kv_salt):
            admitted.has_ticket = True
        rate = version.fleet.snapshot().prefill_rate
        lease = version.admission.enter(
            admitted, tenant, request.priority, choices, number, prefill_rate=rate
        )
        state = RequestState(admitted, record.arrived, record.arrived_ns)
        self.stats.admitted(record, state)
        return state, lease

    def _ticket(self, request: TokenizedRequest, caller: Caller, shown: bytes) -> bytes:
        """The ticket with which the request may be resumed: the one it has shown, or a new one."""
        if not caller.resumes or request.has_ticket:
            return shown if request.has_ticket else b""
        left_s = request.time_left_s
        return self._tickets.issue(request.tenant, request.prompt, request.kv_salt, left_s)

    def _check(self, version: ModelVersion, state: RequestState) -> None:
        """Predicts the time to first token. Raises Late if that would be too late."""
        began, demand = time.perf_counter(), version.dispatch.demand(state)
        snapshot, queue = version.fleet.snapshot(), version.wait_queue
        snapshot = snapshot.holding(state.request.adapter)
        try:
            state.predicted_ttft_s = early_rejection.check(
                state.request, demand, snapshot, queue, time.monotonic()
            )
        finally:
            self.stats.on_placed(time.perf_counter() - began)

    def _delivery(
        self,
        version: ModelVersion,
        state: RequestState,
        lease: AdmissionLease,
        record: RequestRecord,
        sink: Sink,
        trace: Context,
    ) -> Delivery:
        def on_tokens(num_tokens: int, gap_s: float | None) -> None:
            lease.delivered(num_tokens)
            version.output_tokens += num_tokens
            self.stats.delivered(record, num_tokens, gap_s)

        def on_first() -> None:  # from the arrival, or from where one of several requests begins
            tracing.record(self._tracer, "router.first_token", trace, state.started_ns)
            self.stats.first_token(record)

        text = TextStream(version.admission.tokenizer, state.request)
        return Delivery(state, text, sink, on_tokens, on_first)

    async def _run(
        self,
        version: ModelVersion,
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
                    model=resumed_name(version.full_name, state.request.adapter),
                )
                delivery.start(started)
                await version.dispatch.run(state, trace, delivery.put)
                with tracing.span(self._tracer, "router.finish", trace):
                    route = state.final_route()
                    route.model = str(version)
                    if not self.tenants.is_operator(caller.metadata):
                        route.prefill = route.decode = ""
                    record.finished = True
                    await delivery.finish(route)
        except TimeoutError:
            raise delivery.timeout_error from None
        finally:
            self._deliveries.discard(delivery)


def _describe_reader(span: Span, caller: Caller) -> None:
    """Records at a request's end how much of its output the caller has still to read."""
    if caller.unread_bytes is not None:
        span.set_attribute("baton.http.unread_bytes", caller.unread_bytes())


@contextlib.contextmanager
def _served(record: RequestRecord, target: Target) -> Iterator[None]:
    """A request to a version, which counts as running there; names it in record and span."""
    version, span = target.version, record.span
    assert span is not None
    record.labels, record.route, record.fleet = version.labels, target.route, version.fleet
    record.traffic = version.traffic
    span.update_name(f"{record.operation} {version.name}")
    span.set_attributes({**version.labels, "baton.tenant": record.tenant})
    version.running += 1
    try:
        yield
    finally:
        version.running -= 1
