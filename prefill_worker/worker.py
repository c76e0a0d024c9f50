"""A worker's part that runs prompts in chunks, hands their KV over, returns first tokens.

Each chunk's full blocks are sent while the next chunk computes. The first token goes to the router
as soon as it is sampled, before the handoff is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.context import Context

from baton.block_hash import token_digest
from baton.engine.build import Loaded
from baton.engine.pooling import Vector
from baton.engine.sequence import Sequence
from baton.engine.step_report import SequenceProgress, StepReport
from baton.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from baton.telemetry import propagation, tracing
from baton.v1 import common_pb2, prefill_pb2, worker_pb2
from baton.v1.common_pb2 import WorkerRecord
from baton.v1.dispatch_pb2 import RouterMessage
from baton.worker.dispatch_service import RouterStream
from baton.worker.messages import (
    FINISH_REASONS,
    compiled_grammar,
    logprobs_proto,
    prompt_logprobs_proto,
    sequence_of,
)
from baton.worker.node import Node, Part
from baton.worker.pooling import PromptPooler
from kvtransfer.interface import Transport
from kvtransfer.outgoing import OutgoingLinks
from kvtransfer.pool import handoff_slots
from kvtransfer.rank_ends import RankPool
from kvtransfer.sender import HandoffSender

log = logging.getLogger(__name__)

Send = Callable[[prefill_pb2.PrefillResponse], None]
_HANDOFF_ID = "sequence.handoff_id"
# Most workers of a role in a fleet whose links are opened before handoffs need them: the number of
# links that a prefill worker keeps, and a decode worker over NCCL.
MAX_OPENED_AHEAD = 16


@dataclass
class Prompt:
    """A running prompt."""

    sequence: Sequence
    num_tokens: int  # tokens of the handoff; the sequence gets one more, sampled here
    trace: Context
    sent: int  # token slots whose blocks were sent, or are not needed by the decode worker
    arrived_ns: int = field(default_factory=time.time_ns)
    computed: int | None = None  # tokens; None before the first chunk
    queued: bool = False  # whether any block was queued for sending
    pooled: Vector | None = None  # the sum of hidden states so far, or logits of label tokens
    steps: asyncio.Queue[tuple[StepReport, SequenceProgress] | None] = field(
        default_factory=asyncio.Queue
    )
    spans: list[Callable[[], None]] = field(default_factory=list)  # recorded at the prompt's end
    chunk_ended_ns: int = 0  # of the last chunk
    longest_gap_ns: int = 0  # between two chunks


class PrefillPart(Part):
    """Runs prompts for routers, and hands their KV over to other workers."""

    def __init__(
        self, node: Node, loaded: Loaded, pools: list[RankPool], usable: list[Transport]
    ) -> None:
        super().__init__(node, loaded, pools, usable)
        self.engine, self.limits, self.metrics = node.engine, node.limits, node.metrics
        self.tracer, self.config = node.tracer, node.config
        self._pooler = PromptPooler(loaded)
        self._links = OutgoingLinks(pools, node.record, usable, node.find)
        self._opening_links = asyncio.create_task(self._open_links())
        self.metrics.observe_links(self._links.status)
        self._prompts: dict[str, Prompt] = {}
        self._tasks: dict[tuple[RouterStream, str], asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def pairs(self) -> list[worker_pb2.PairStatus]:
        return self._links.status()

    def on_step(self, report: StepReport) -> None:
        if not self._prompts:
            return
        for progress in report.progress:
            if prompt := self._prompts.get(progress.seq_id):
                prompt.steps.put_nowait((report, progress))

    async def idle(self) -> None:
        await self._idle.wait()

    async def close(self) -> None:
        """Gives up running prompts, which routers then place elsewhere."""
        for prompt in self._prompts.values():
            prompt.steps.put_nowait(None)
        try:
            async with asyncio.timeout(self.config.transfer_timeout_s):
                await self.idle()
        except TimeoutError:
            log.warning("%d prompts did not end; their calls are cancelled", len(self._prompts))
        self._opening_links.cancel()
        await self._links.close()

    async def _open_links(self) -> None:
        """Opens links to new decode workers one at a time, so that no handoff has to wait for one.

        After a failure the first handoff tries again.
        """
        tried = set[str]()
        async with contextlib.aclosing(self.node.members.changes()) as changes:
            async for records in changes:
                tried &= records.keys()
                for peer in peers_to_open(records, self.node.incarnation) - tried:
                    tried.add(peer)
                    await self._links.open_ahead(peer)

    def dispatch(self, router: RouterStream, message: RouterMessage) -> Iterator[None]:
        for request in message.prefill:
            key = router, request.sequence.handoff_id
            if key in self._tasks:
                router.failed(key[1], InvalidRequest(f"handoff {key[1]} runs here", _HANDOFF_ID))
            else:
                self._tasks[key] = asyncio.create_task(self._answer(router, request))
                self._tasks[key].add_done_callback(partial(self._answered, key))
            yield
        for handoff_id in message.cancel:
            if task := self._tasks.get((router, handoff_id)):
                task.cancel()
            yield

    def _answered(self, key: tuple[RouterStream, str], _: asyncio.Task[None]) -> None:
        del self._tasks[key]

    def lost(self, router: RouterStream) -> None:
        for (whose, _), task in self._tasks.items():
            if whose is router:
                task.cancel()

    async def _answer(self, router: RouterStream, request: prefill_pb2.PrefillRequest) -> None:
        """Runs a prompt for a router, and reports its failure."""
        handoff_id = request.sequence.handoff_id

        def send(response: prefill_pb2.PrefillResponse) -> None:
            response.handoff_id = handoff_id
            router.outgoing.prefill.append(response)

        try:
            await self.prefill(request, propagation.extract(request.trace.items()), send)
        except Exception as error:
            router.failed(handoff_id, error)

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, trace: Context, send: Send
    ) -> None:
        """Sends the prompt's messages: started, first token, committed. May be cancelled.

        Without a target nothing is handed over: the request wants no tokens.

        Raises InvalidRequest, Unavailable, Overloaded, DeadlineExceeded, and what handoffs raise.
        """
        self.node.refuse_if_draining()
        spec, cached_tokens = request.sequence, request.target.cached_tokens
        sequence = sequence_of(spec, self.limits, pause_after=1)
        self._pooler.prepare(sequence)
        if sequence.seq_id in self._prompts:
            raise InvalidRequest(f"handoff {sequence.seq_id} runs here", _HANDOFF_ID)
        if request.HasField("target") is not (sequence.params.max_tokens > 0):
            raise InvalidRequest("only a request that generates tokens has a target", "target")
        size = self.limits.groups.block_size
        if cached_tokens % size or cached_tokens >= sequence.num_tokens:
            raise InvalidRequest(
                f"{cached_tokens} of {sequence.num_tokens} tokens cannot be cached in whole blocks "
                f"of {size} with one left to compute",
                "target.cached_tokens",
            )
        attributes = {"baton.prompt_tokens": len(spec.token_ids)}
        with tracing.span(self.tracer, "prefill", trace, attributes) as span:
            context = tracing.context_of(span)
            first_token = self.limits.groups.handoff_start(cached_tokens, sequence.num_tokens)
            prompt = Prompt(sequence, sequence.num_tokens, context, first_token)
            try:
                async with asyncio.timeout(spec.time_left_ms / 1000 or None):
                    await self._run(prompt, request, send)
            except DeadlineExceeded:
                raise
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed during prefill") from None
            finally:
                span.set_attribute("baton.preemptions", sequence.preemptions)
                span.set_attribute("baton.longest_gap_ms", prompt.longest_gap_ns / 1e6)

    async def _run(self, prompt: Prompt, request: prefill_pb2.PrefillRequest, send: Send) -> None:
        sequence, seq_id = prompt.sequence, prompt.sequence.seq_id
        self._prompts[seq_id] = prompt
        self._idle.clear()
        hands_over = request.HasField("target")
        try:
            async with (
                self._handoff(prompt, request) if hands_over else contextlib.nullcontext()
            ) as handoff:
                try:
                    if compiled := compiled_grammar(sequence, self.node.grammars):
                        sequence.grammar = await asyncio.wrap_future(compiled)
                    await asyncio.wrap_future(self.engine.add(sequence))
                    last = await self._compute(prompt, handoff, send)
                except BaseException:  # cancellation, too: no further chunk runs
                    self.engine.pause(seq_id)
                    raise
                if (
                    handoff and not last.finish_reason
                ):  # otherwise nothing is left to decode: it is aborted
                    with self.metrics.transferring():
                        stats = await handoff.committed()
                    self.metrics.transferred(stats, prompt.trace)
                    committed = prefill_pb2.PrefillCommitted(
                        transfer_bytes=stats.num_bytes,
                        transfer_ms=stats.transfer_s * 1e3,
                        transport=stats.kind,
                    )
                    send(prefill_pb2.PrefillResponse(committed=committed))
        finally:  # not earlier: the blocks must be held until the handoff is aborted
            if prompt.computed is None:  # it ended before its first chunk
                waited = prompt.trace, prompt.arrived_ns
                tracing.record(self.tracer, "prefill.queue", *waited)
            for record in prompt.spans:
                record()
            del self._prompts[seq_id]
            self.engine.release(seq_id)
            if not self._prompts:
                self._idle.set()

    def _handoff(self, prompt: Prompt, request: prefill_pb2.PrefillRequest) -> HandoffSender:
        sequence = prompt.sequence
        return HandoffSender(
            self._links,
            self.tracer,
            request.target,
            sequence.seq_id,
            self.limits.groups.handoff_end(prompt.num_tokens),
            request.sequence.time_left_ms / 1000 or self.config.lease_s,
            parent=prompt.trace,
            token_digest=token_digest(sequence.tokens, sequence.cache_salt),
            groups=self.limits.groups,
            step_timeout_s=self.config.transfer_timeout_s,
        )

    async def _compute(
        self, prompt: Prompt, handoff: HandoffSender | None, send: Send
    ) -> SequenceProgress:
        """Follows the engine's steps until the first token is sampled, and queues blocks to send.

        Blocks are queued before the step's message is sent, and spans are recorded at the end:
        writing one takes as long as a put.
        """
        while True:
            step = await prompt.steps.get()
            if step is None:
                raise Unavailable(f"the worker {self.node.why_leaving}")
            report, progress = step
            if progress.abort_reason:
                failed = InvalidRequest if progress.invalid else InternalError
                raise failed(progress.abort_reason)
            begins = prompt.computed is None
            before = prompt.sequence.num_cached if prompt.computed is None else prompt.computed
            # A report of a token alone has no number of computed tokens: all are.
            prompt.computed = prompt.num_tokens if progress.token_ids else progress.num_computed
            if handoff and not progress.finish_reason:
                self._send_blocks(prompt, handoff)
                if progress.token_ids:
                    handoff.conclude(progress.token_ids[0])
                await asyncio.sleep(0)  # lets the put begin
            if begins:
                send(prefill_pb2.PrefillResponse(started=self._started(prompt, report)))
            self._record_chunk(prompt, report, before)
            if (found := progress.prompt_logprobs) is not None:
                part = prompt_logprobs_proto(found)
                send(prefill_pb2.PrefillResponse(prompt_logprobs=part))
            if (pooled := progress.pooled) is not None:
                prompt.pooled = pooled if prompt.pooled is None else prompt.pooled + pooled
            if progress.token_ids or progress.finish_reason:
                first_token = _first_token(progress)
                asked = prompt.sequence.params, prompt.pooled, prompt.num_tokens
                first_token.pooled.extend(self._pooler.finish(*asked))
                send(prefill_pb2.PrefillResponse(first_token=first_token))
                return progress

    def _send_blocks(self, prompt: Prompt, handoff: HandoffSender) -> None:
        """Queues newly complete blocks for sending: full ones, and at the end the partial one.

        A prompt that was preempted before is sent when all of it is computed: then it has left the
        batch and keeps its blocks, while a report of a chunk may be older than the preemption.

        Raises Overloaded if it was preempted since blocks were queued: they are sent, or sent
        again, from where other KV may be by now.
        """
        groups, end = self.limits.groups, prompt.computed or 0
        size = groups.block_size
        if end < prompt.num_tokens:
            end -= end % size
        else:
            end = groups.handoff_end(end)
        # Read before the count of preemptions, which changes before the blocks do.
        block_ids = prompt.sequence.handoff_blocks(prompt.num_tokens, size)
        if prompt.sequence.preemptions:
            if prompt.queued:
                raise Overloaded("the prompt lost its KV blocks while they were handed over")
            if prompt.computed != prompt.num_tokens:
                return
        if end <= prompt.sent:
            return
        if not block_ids:  # the prompt has ended; the report of that is already queued
            return
        slots = handoff_slots(groups, block_ids, prompt.sent, end, prompt.num_tokens)
        with self.metrics.transferring():
            handoff.send(slots, end - prompt.sent)
        prompt.sent, prompt.queued = end, True

    def _started(self, prompt: Prompt, report: StepReport) -> prefill_pb2.PrefillStarted:
        waited = prompt.trace, prompt.arrived_ns, report.started_ns
        prompt.spans.append(partial(tracing.record, self.tracer, "prefill.queue", *waited))
        queue_ms = max(0.0, (report.started_ns - prompt.arrived_ns) / 1e6)
        self.metrics.prompt_started(queue_ms / 1e3, prompt.trace)
        cached_tokens = prompt.sequence.num_cached
        return prefill_pb2.PrefillStarted(queue_ms=queue_ms, cached_tokens=cached_tokens)

    def _record_chunk(self, prompt: Prompt, report: StepReport, before: int) -> None:
        done = prompt.computed or 0
        attributes = {"baton.chunk_tokens": done - before, "baton.computed_tokens": done}
        span = prompt.trace, report.started_ns, report.ended_ns
        record = partial(tracing.record, self.tracer, "prefill.chunk", *span, attributes)
        prompt.spans.append(record)
        if ended_ns := prompt.chunk_ended_ns:
            prompt.longest_gap_ns = max(prompt.longest_gap_ns, report.started_ns - ended_ns)
        prompt.chunk_ended_ns = report.ended_ns


def peers_to_open(records: Mapping[str, WorkerRecord], incarnation: str) -> set[str]:
    """The workers to which this one should open a link: both are READY, and by their roles routers
    pair them. None in a large fleet, where such links would close one another.
    """
    this, ready = records.get(incarnation), common_pb2.WORKER_STATE_READY
    largest_role = max(Counter(one.role for one in records.values()).values(), default=0)
    if this is None or this.state != ready or largest_role > MAX_OPENED_AHEAD:
        return set()
    if this.role == common_pb2.WORKER_ROLE_DECODE:
        return set()
    return {
        one.incarnation
        for one in records.values()
        if one.role != common_pb2.WORKER_ROLE_PREFILL
        and one.incarnation != incarnation
        and one.state == ready
        and one.kv == this.kv
    }


def _first_token(progress: SequenceProgress) -> prefill_pb2.PrefillFirstToken:
    # No speculation: the sequence leaves the batch with this token.
    return prefill_pb2.PrefillFirstToken(
        token_id=progress.token_ids[0] if progress.token_ids else None,
        logprobs=logprobs_proto(progress.logprobs[0]) if progress.logprobs else None,
        finish_reason=FINISH_REASONS[progress.finish_reason],
    )
