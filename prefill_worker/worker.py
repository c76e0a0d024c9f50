"""A prefill worker: a prompt's way through queue, chunks, block transfer, first token and Commit.

Each chunk's full blocks are sent while the next chunk computes; the first token goes to the router
as soon as it is sampled, before the handoff is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from opentelemetry.context import Context

from baton import rpc, telemetry
from baton.config import WorkerConfig, split_address
from baton.engine.build import Loaded
from baton.engine.loop import Progress, StepReport
from baton.engine.sequence import Sequence
from baton.errors import DeadlineExceeded, InternalError, InvalidRequest, Unavailable
from baton.prefix import token_digest
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2
from baton.worker import process
from baton.worker.messages import FINISH_REASONS, ModelLimits, logprobs_proto, sequence_of
from baton.worker.node import Node
from kvtransfer import transports
from kvtransfer.links import LinkPool
from kvtransfer.pool import KvPool, Slots
from kvtransfer.sender import Handoff, HandoffSender, TransferStats

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One step's progress of one prompt; times are wall-clock nanoseconds."""

    started_ns: int
    ended_ns: int
    progress: Progress


@dataclass
class Prompt:
    """A prompt that runs here."""

    sequence: Sequence
    num_tokens: int  # all that the handoff covers; the sequence gets one more, sampled here
    trace: Context
    sent: int  # tokens whose blocks were sent, or are cached by the decode worker
    arrived_ns: int = field(default_factory=time.time_ns)
    computed: int = 0
    steps: asyncio.Queue[Step | None] = field(default_factory=asyncio.Queue)  # None: give up


class PrefillWorker:
    """Runs prompts for routers and hands their KV over."""

    def __init__(self, node: Node, loaded: Loaded, pool: KvPool) -> None:
        config = node.config
        host, _ = split_address(node.record.address)
        usable = transports.usable(pool, host, config.transport)
        self.transports = tuple(transport.kind for transport in usable)
        self._node = node
        self._block_size = loaded.layout.block_size
        self._limits = ModelLimits.of(loaded)
        self._links = LinkPool(
            pool, usable, loaded.descriptor, config.incarnation, partial(node.find, "decode")
        )
        self._sender = HandoffSender(
            self._links, node.telemetry.tracer, step_timeout_s=config.transfer_timeout_s
        )
        self._prompts: dict[str, Prompt] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        """Adds PrefillService."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_PrefillServicer(self), server)
        return ["baton.v1.PrefillService"]

    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Links to decode workers."""
        return self._links.status()

    def on_step(self, report: StepReport) -> None:
        """Passes each prompt its progress."""
        for progress in report.progress:
            if prompt := self._prompts.get(progress.seq_id):
                prompt.steps.put_nowait(Step(report.started_ns, report.ended_ns, progress))

    async def idle(self) -> None:
        """Returns when no prompt runs and no transfer is under way."""
        await self._idle.wait()

    async def close(self) -> None:
        """Gives up what still runs, which routers then place elsewhere."""
        for prompt in self._prompts.values():
            prompt.steps.put_nowait(None)
        try:
            async with asyncio.timeout(self._node.config.transfer_timeout_s):
                await self.idle()
        except TimeoutError:
            log.warning("%d prompts did not end; their calls are cancelled", len(self._prompts))
        await self._links.close()

    async def run(
        self,
        request: prefill_pb2.PrefillRequest,
        trace: Context,
        send: Callable[[prefill_pb2.PrefillResponse], Awaitable[None]],
    ) -> None:
        """Sends the prompt's messages: started, first token, committed. Cancelling stops it.

        Raises InvalidRequest, Unavailable, Overloaded, DeadlineExceeded, and what handoffs raise.
        """
        self._node.refuse_if_draining()
        spec = request.sequence
        sequence = sequence_of(spec, self._limits, park_after=1)
        self._check(sequence, request.target.cached_tokens)
        attributes = {"baton.prompt_tokens": len(spec.token_ids)}
        with telemetry.span(self._node.telemetry.tracer, "prefill", trace, attributes) as span:
            prompt = Prompt(
                sequence=sequence,
                num_tokens=sequence.num_tokens,
                trace=telemetry.context_of(span),
                sent=request.target.cached_tokens,
            )
            async with contextlib.aclosing(self._run(prompt, request)) as responses:
                try:
                    async with asyncio.timeout(spec.time_left_ms / 1000 or None):
                        async for response in responses:
                            await send(response)
                except DeadlineExceeded:
                    raise
                except TimeoutError:
                    raise DeadlineExceeded("the deadline passed during prefill") from None

    def _check(self, sequence: Sequence, cached_tokens: int) -> None:
        if sequence.seq_id in self._prompts:
            raise InvalidRequest(f"handoff {sequence.seq_id} runs here", "sequence.handoff_id")
        if cached_tokens % self._block_size or cached_tokens >= sequence.num_tokens:
            raise InvalidRequest(
                f"{cached_tokens} of {sequence.num_tokens} tokens cannot be cached in whole blocks "
                f"of {self._block_size} with one left to compute",
                "target.cached_tokens",
            )

    async def _run(
        self, prompt: Prompt, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        sequence, spec = prompt.sequence, request.sequence
        with self._listed(prompt):
            handoff = self._sender.open(
                request.target,
                sequence.seq_id,
                prompt.num_tokens,
                spec.time_left_ms / 1000 or self._node.config.lease_s,
                prompt.trace,
                token_digest(sequence.tokens, sequence.cache_salt),
            )
            async with handoff:
                computing = self._compute(prompt, handoff)
                async with self._queued(sequence), contextlib.aclosing(computing) as responses:
                    async for response in responses:
                        yield response
                        if response.first_token.finish_reason:
                            return  # nothing is left to decode: the handoff is aborted
                with self._node.metrics.transferring():
                    stats = await handoff.committed()
                self._node.metrics.transferred(stats, prompt.trace)
                yield _committed(stats)

    async def _compute(
        self, prompt: Prompt, handoff: Handoff
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Follows the engine until the first token is sampled; blocks are queued on the way.

        Before the step's message: writing one takes as long as a put.
        """
        step = await _next(prompt)
        responses = [self._started(prompt, step)]
        while True:
            progress = step.progress
            self._record_chunk(prompt, step)
            if not progress.finish_reason:
                self._send(prompt, handoff)
                if progress.token_ids:
                    handoff.conclude(prompt.num_tokens, progress.token_ids[0])
            if progress.token_ids:
                responses.append(_first_token(progress))
            for response in responses:
                yield response
            if progress.token_ids:
                return
            responses = []
            step = await _next(prompt)

    def _send(self, prompt: Prompt, handoff: Handoff) -> None:
        """Queues the blocks that became complete: whole ones, and at the end the partial one."""
        size, end = self._block_size, prompt.computed
        if end < prompt.num_tokens:
            end -= end % size
        if end <= prompt.sent:
            return
        # Block ids of a prompt do not change between admission and its end, so reading is safe.
        blocks = prompt.sequence.block_ids[prompt.sent // size : -(-end // size)]
        if not blocks:  # it has ended by itself; the step that reports it is already queued
            return
        with self._node.metrics.transferring():
            handoff.send(prompt.sent, Slots(tuple(blocks), end - prompt.sent))
        prompt.sent = end

    def _started(self, prompt: Prompt, step: Step) -> prefill_pb2.PrefillResponse:
        tracer, cached = self._node.telemetry.tracer, prompt.sequence.num_cached
        telemetry.record(tracer, "prefill.queue", prompt.trace, prompt.arrived_ns, step.started_ns)
        prompt.computed = cached
        queue_ms = max(0.0, (step.started_ns - prompt.arrived_ns) / 1e6)
        self._node.metrics.prompt_started(queue_ms / 1e3, prompt.trace)
        return prefill_pb2.PrefillResponse(
            started=prefill_pb2.PrefillStarted(queue_ms=queue_ms, cached_tokens=cached)
        )

    def _record_chunk(self, prompt: Prompt, step: Step) -> None:
        done = step.progress.num_computed
        attributes = {"baton.chunk_tokens": done - prompt.computed, "baton.computed_tokens": done}
        prompt.computed = done
        telemetry.record(
            self._node.telemetry.tracer,
            "prefill.chunk",
            prompt.trace,
            step.started_ns,
            step.ended_ns,
            attributes,
        )

    @contextlib.asynccontextmanager
    async def _queued(self, sequence: Sequence) -> AsyncGenerator[None, None]:
        """Adds it to the engine; once it is given up, no further chunk runs.

        Its blocks have to stay until the handoff is aborted, which may take longer.
        """
        engine = self._node.engine
        try:
            await asyncio.wrap_future(engine.add(sequence))
            yield
        except BaseException:  # also a caller that hung up
            engine.halt(sequence.seq_id)
            raise

    @contextlib.contextmanager
    def _listed(self, prompt: Prompt) -> Iterator[None]:
        """Registers the prompt while it runs, and frees its blocks at the end."""
        seq_id = prompt.sequence.seq_id
        self._prompts[seq_id] = prompt
        self._idle.clear()
        try:
            yield
        finally:
            del self._prompts[seq_id]
            self._node.engine.release(seq_id)
            if not self._prompts:
                self._idle.set()


async def _next(prompt: Prompt) -> Step:
    """The next step that computed some of it. Raises Unavailable, InternalError."""
    step = await prompt.steps.get()
    if step is None:
        raise Unavailable("the prefill worker is draining")
    if step.progress.abort_reason:
        raise InternalError(step.progress.abort_reason)
    return step


def _first_token(progress: Progress) -> prefill_pb2.PrefillResponse:
    (token_id,) = progress.token_ids  # no drafts: the sequence leaves the batch with this one
    logprobs = logprobs_proto(progress.logprobs[0]) if progress.logprobs else None
    return prefill_pb2.PrefillResponse(
        first_token=prefill_pb2.PrefillFirstToken(
            token_id=token_id,
            logprobs=logprobs,
            finish_reason=FINISH_REASONS[progress.finish_reason],
        )
    )


def _committed(stats: TransferStats) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        committed=prefill_pb2.PrefillCommitted(
            transfer_bytes=stats.num_bytes,
            transfer_ms=stats.transfer_s * 1e3,
            transport=common_pb2.Transport.Name(stats.transport_kind),
        )
    )


class _PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """PrefillService, thin: `PrefillWorker.run` does the work."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    @rpc.unary
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> None:
        """Runs one prompt."""
        trace = telemetry.extract(context.invocation_metadata())
        await self._worker.run(request, trace, context.write)


def run(config: WorkerConfig) -> int:
    """Runs the process until drained; 0. Raises ConfigError when it cannot begin."""
    return process.run(config, PrefillWorker)
