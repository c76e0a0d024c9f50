"""Sequences that hold KV blocks on this worker, from Reserve to the last token, and how they end.

    RESERVED --Commit--> DECODING --last token--> gone
        \\___________________\\____ cancel, lease, deadline, lost router, failure ____> gone

A sequence decodes from its Commit on, while its KV's checksum is computed; its router hears nothing
of it until that agrees. Where it does not, the entry ends, and with it all that was computed.

Each entry has a lease that expires by itself, so that no lost message can leak blocks. While a
remote writer may still write into an entry's blocks they are quarantined, not freed.

A router's sequences belong to its connection: they end with it, and nobody else can name them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton.block_hash import token_digest
from baton.engine.loop import Engine, Progress, Reserved, StepReport
from baton.engine.sequence import Sequence
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded, Stale
from baton.generation.structured_output import GrammarCompiler, GrammarMatcher
from baton.log_format import about
from baton.telemetry import tracing
from baton.v1 import decode_pb2
from baton.v1.dispatch_pb2 import WorkerMessage
from baton.worker.dispatch_service import RouterStream
from baton.worker.messages import (
    FINISH_REASONS,
    ModelLimits,
    compiled_grammar,
    logprobs_proto,
    prompt_logprobs_proto,
    sequence_of,
)
from kvtransfer.deadline import in_background
from kvtransfer.receiver import HandoffReceiver, ReservedBlocks, Verified

log = logging.getLogger(__name__)

# For which a writer that says nothing keeps an entry of a request without a deadline: ten minutes
# by default, as long as a router gives a request.
MAX_SILENT_LEASES = 20


class DecodeSpans:
    """Collects times as they pass and records the spans; the first `end` counts."""

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        self._tracer = tracer
        self._span = tracer.start_span("decode", context=parent)
        self._context = tracing.context_of(self._span)
        self.trace_id = tracing.trace_id_of(self._span)  # empty where nothing is recorded
        self._reserve_ns = time.time_ns()
        self._committed_ns = 0
        self._first_step_ns = 0
        self._tokens = 0
        self._steps = 0  # that gave tokens: fewer than those where drafts were right

    def reserved(self, cached_tokens: int, started: bool) -> None:
        attributes = {"baton.cached_tokens": cached_tokens, "baton.prefills_here": started}
        self._record("decode.reserve", self._reserve_ns, None, attributes)

    def committed(self) -> None:
        self._committed_ns = time.time_ns()

    def token(self) -> None:
        """As `step`, for a sequence that got one token, and not its first here."""
        self._tokens += 1
        self._steps += 1

    def step(self, started_ns: int, ended_ns: int, progress: Progress) -> None:
        self._tokens += len(progress.token_ids)
        self._steps += bool(progress.token_ids)
        if not self._first_step_ns:
            self._first_step_ns = ended_ns
            # A step may have begun before Commit's reply was booked here.
            admitted_ns = max(self._committed_ns, started_ns)
            self._record("decode.admit", self._committed_ns, admitted_ns)
            self._record("decode.first_step", admitted_ns, ended_ns)

    def end(self, reason: str) -> None:
        if not self._span.is_recording():  # it has ended
            return
        if self._first_step_ns:
            attributes = {"gen_ai.usage.output_tokens": self._tokens, "baton.steps": self._steps}
            self._record("decode.run", self._first_step_ns, None, attributes)
        self._span.set_attribute("baton.end", reason)
        self._span.end()

    def _record(
        self, name: str, start_ns: int, end_ns: int | None, attributes: dict[str, int] | None = None
    ) -> None:
        tracing.record(self._tracer, name, self._context, start_ns, end_ns, attributes)


@dataclass(eq=False)
class Entry:
    """One sequence that holds blocks here."""

    handoff_id: str
    router: RouterStream
    sequence: Sequence
    num_tokens: int  # known when it was reserved; the handoff covers all of them
    deadline: float | None  # loop time
    spans: DecodeSpans
    stream_interval: int = 1  # tokens in an event, at least, but for the first and the last one
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    blocks: ReservedBlocks | None = None
    decoding: bool = False
    unverified: bool = False  # it decodes, and its router must not be told yet
    early: list[Progress] = field(default_factory=list)  # what it is told then
    compiled: asyncio.Future[GrammarMatcher] | None = None  # its grammar, if there is one to come
    timer: asyncio.TimerHandle | None = None
    silent_leases: int = 0  # since its sender was heard of
    told: bool = False  # its router got an event
    untold: Progress | None = None  # what is kept for the next one

    @property
    def about(self) -> Mapping[str, str]:
        return about(trace_id=self.spans.trace_id, handoff_id=self.handoff_id)


class Reservations:
    """All entries, by handoff id. Event-loop thread only; kvtransfer's `BlockOwner`."""

    def __init__(
        self,
        engine: Engine,
        limits: ModelLimits,
        grammars: GrammarCompiler,
        lease_s: float,
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """`count` gets each reservation's outcome, as `WorkerMetrics.reserved` has them."""
        self._engine, self._limits, self._lease_s = engine, limits, lease_s
        self._grammars, self._count = grammars, count
        self._entries: dict[str, Entry] = {}
        # By (handoff id, token): what the engine answers to their release.
        self._quarantined: dict[tuple[str, str], Future[list[int]]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.receiver: HandoffReceiver  # set once, when the worker is built

    def reserve(
        self, router: RouterStream, request: decode_pb2.ReserveRequest, spans: DecodeSpans
    ) -> None:
        """Has blocks held, or not: the router gets a ReserveResponse, or a failure.

        That is Overloaded where there is no room, and comes as soon as the engine has answered.
        """
        spec = request.sequence
        now = asyncio.get_running_loop().time()
        deadline = now + spec.time_left_ms / 1000 if spec.time_left_ms else None
        try:
            if spec.handoff_id in self._entries:
                raise InvalidRequest(f"handoff {spec.handoff_id} exists", "handoff_id")
            sequence = sequence_of(spec, self._limits)
            compiled = compiled_grammar(sequence, self._grammars)
        except BatonError as error:
            self.refuse(router, spec.handoff_id, spans, error)
            return
        entry = Entry(
            spec.handoff_id,
            router,
            sequence,
            sequence.num_tokens,
            deadline,
            spans,
            request.stream_interval,
        )
        self._entries[spec.handoff_id] = entry
        self._idle.clear()
        self._renew(entry)
        local_tokens = request.local_prefill_max_tokens
        if compiled is None:
            self._hold(entry, local_tokens)
        else:
            entry.compiled = asyncio.wrap_future(compiled)
            entry.compiled.add_done_callback(partial(self._compiled, entry, local_tokens))

    def refuse(
        self, router: RouterStream, handoff_id: str, spans: DecodeSpans, error: BaseException
    ) -> None:
        """Tells the router why nothing is held."""
        spans.end(str(error) or type(error).__name__)
        self._count("refused" if isinstance(error, Overloaded) else "failed")
        router.failed(handoff_id, error)

    def cancel(self, router: RouterStream, *handoff_ids: str) -> None:
        """Ends entries of this router, in any state; unknown ids are ignored."""
        for handoff_id in handoff_ids:
            entry = self._entries.get(handoff_id)
            if entry is not None and entry.router is router:
                self._end(entry, "cancelled")

    def lost(self, router: RouterStream) -> None:
        """Ends all entries of a router whose connection has ended."""
        for entry in [e for e in self._entries.values() if e.router is router]:
            reason = "the router's connection ended"
            log.warning("handoff %s: %s", entry.handoff_id, reason, extra=entry.about)
            self._end(entry, reason)

    async def idle(self) -> None:
        await self._idle.wait()

    async def close(self) -> None:
        """Gives every entry back to its router, and waits until their blocks are dealt with."""
        for entry in list(self._entries.values()):
            self._give_up(entry, "the decode worker is draining")
        await asyncio.gather(*self._endings, return_exceptions=True)

    def find(self, handoff_id: str, token: str) -> ReservedBlocks:
        """What a handoff may write into. Raises Stale when it is not reserved (any more)."""
        entry = self._entries.get(handoff_id)
        if entry is None or entry.token != token or entry.decoding or entry.blocks is None:
            raise Stale(f"handoff {handoff_id} is not reserved here")
        entry.silent_leases = 0
        self._renew(entry)  # bytes are coming: the sender is alive
        return entry.blocks

    async def committed(
        self, handoff_id: str, token: str, first_token_id: int, verified: Verified = None
    ) -> None:
        self.find(handoff_id, token)
        self._limits.check_token(first_token_id, "first_token_id")
        entry, engine = self._entries[handoff_id], self._engine
        entry.unverified = verified is not None
        self._start_decoding(entry)
        known = not entry.unverified
        kv = await asyncio.wrap_future(
            engine.resume(handoff_id, entry.num_tokens, first_token_id, known)
        )
        if verified is None:
            return
        try:
            await verified
        except Exception as error:
            if self._entries.get(handoff_id) is entry:
                self._forget(entry)
                entry.spans.end(str(error) or type(error).__name__)
            await asyncio.wrap_future(engine.discard(kv))
            raise
        engine.accept(kv)
        if self._entries.get(handoff_id) is not entry:
            raise Stale(f"handoff {handoff_id} ended while its KV was verified")
        entry.unverified = False
        for progress in entry.early:
            self._pass_on(entry, progress)

    async def aborted(self, handoff_id: str, token: str, reason: str) -> None:
        """Nothing is written any more."""
        if released := self._quarantined.pop((handoff_id, token), None):
            await asyncio.wrap_future(
                self._engine.end_quarantine(await asyncio.wrap_future(released))
            )
        entry = self._entries.get(handoff_id)
        if entry is not None and entry.token == token and not entry.decoding:
            log.info("handoff %s aborted: %s", handoff_id, reason, extra=entry.about)
            await asyncio.wait([self._end(entry, "cancelled")])

    def on_step(self, report: StepReport) -> None:
        """Tells each router, in one message, what its sequences got."""
        router: RouterStream | None = None
        for seq_id, token_id in report.token_ids.items():
            entry = self._entries.get(seq_id)
            if entry is None:
                continue
            if entry.told and entry.stream_interval <= 1:
                # Hundreds in each step: as little as can be for each.
                if entry.router is not router:
                    router = entry.router
                    add_event = router.outgoing.events.add
                entry.spans.token()
                add_event(handoff_id=seq_id, token_ids=(token_id,))
            else:
                self._take(entry, Progress(seq_id, token_ids=(token_id,)), report)
        for progress in report.others:
            entry = self._entries.get(progress.seq_id)
            if entry is not None:
                self._take(entry, progress, report)

    def _take(self, entry: Entry, progress: Progress, report: StepReport) -> None:
        """Handles what one sequence got."""
        if not entry.decoding:
            self._start_decoding(entry)
        entry.spans.step(report.started_ns, report.ended_ns, progress)
        if entry.unverified:
            entry.early.append(progress)
        else:
            self._pass_on(entry, progress)

    def _pass_on(self, entry: Entry, progress: Progress) -> None:
        """Tells the router; with its last progress an entry is over."""
        if progress.token_ids or progress.abort_reason or progress.prompt_logprobs:
            _tell(entry, progress)  # else its prompt is being computed
        if progress.finish_reason or progress.abort_reason:
            self._forget(entry)
            entry.spans.end(progress.finish_reason or "failed")

    def _compiled(
        self, entry: Entry, local_tokens: int, compiled: asyncio.Future[GrammarMatcher]
    ) -> None:
        """The grammar is compiled, or cannot be, or the entry has ended, which cancels it."""
        error = None if compiled.cancelled() else compiled.exception()
        if self._entries.get(entry.handoff_id) is not entry:
            error = Stale("the request ended while its grammar was compiled")
        if error is None:
            entry.sequence.grammar = compiled.result()
            self._renew(entry)
            self._hold(entry, local_tokens)
            return
        self.refuse(entry.router, entry.handoff_id, entry.spans, error)
        if self._entries.get(entry.handoff_id) is entry:
            self._end(entry, "")

    def _hold(self, entry: Entry, local_tokens: int) -> None:
        digest = token_digest(entry.sequence.tokens, entry.sequence.cache_salt)
        reserved = self._engine.reserve(entry.sequence, local_tokens)
        asyncio.wrap_future(reserved).add_done_callback(partial(self._reserved, entry, digest))

    def _reserved(self, entry: Entry, digest: bytes, answer: asyncio.Future[Reserved]) -> None:
        """The engine has answered."""
        spans, router = entry.spans, entry.router
        error = answer.exception()
        # Where a step's report has come before this, it may have finished by now.
        if (
            error is None
            and not entry.decoding
            and self._entries.get(entry.handoff_id) is not entry
        ):
            error = Stale("the request was cancelled while it was being reserved")
        if error is not None:
            self.refuse(router, entry.handoff_id, spans, error)
            if self._entries.get(entry.handoff_id) is entry:
                self._end(entry, "")
            return
        reserved = answer.result()
        if reserved.started and not entry.decoding:
            self._start_decoding(entry)
        entry.blocks = ReservedBlocks(
            reserved.block_ids, entry.num_tokens, reserved.num_cached, digest
        )
        spans.reserved(reserved.num_cached, reserved.started)
        self._count("started" if reserved.started else "held")
        router.outgoing.reserved.add(
            handoff_id=entry.handoff_id,
            reservation_token=entry.token,
            cached_tokens=reserved.num_cached,
            started=reserved.started,
        )

    def _renew(self, entry: Entry) -> None:
        lease_end = asyncio.get_running_loop().time() + self._lease_s
        self._set_timer(entry, min(lease_end, entry.deadline or lease_end))

    def _start_decoding(self, entry: Entry) -> None:
        entry.decoding = True
        entry.spans.committed()
        self._set_timer(entry, entry.deadline)

    def _set_timer(self, entry: Entry, when: float | None) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_at(when, self._expire, entry, when) if when is not None else None

    def _expire(self, entry: Entry, when: float) -> None:
        overdue = when == entry.deadline  # not by the clock: timers are early by up to 1 ms
        entry.silent_leases += 1
        is_kept = entry.deadline is not None or entry.silent_leases <= MAX_SILENT_LEASES
        if not overdue and is_kept and self.receiver.writing(entry.handoff_id):
            # A long prompt: no message comes between the grant and Commit. Its blocks could not be
            # reused anyway, and the end of the writer, or of the request, ends the entry.
            self._renew(entry)
            return
        reason = f"its {'deadline' if overdue else 'reservation lease'} has passed"
        log.warning("handoff %s: %s", entry.handoff_id, reason, extra=entry.about)
        if overdue:  # the request's: no fault of this worker, as an abort would be
            self._end(entry, reason)
            entry.router.failed(entry.handoff_id, DeadlineExceeded(reason))
        else:
            self._give_up(entry, reason)

    def _give_up(self, entry: Entry, reason: str) -> None:
        """Ends an entry of which its router does not know why."""
        self._end(entry, reason)
        _tell(entry, Progress(entry.handoff_id, 0, abort_reason=reason))

    def _end(self, entry: Entry, reason: str) -> asyncio.Task[None]:
        self._forget(entry)
        entry.spans.end(reason)
        return self._free(entry)

    def _free(self, entry: Entry) -> asyncio.Task[None]:
        """Frees the blocks, or quarantines those that a sender may still write into.

        It is under way when this returns, and ends whether or not the task is awaited.
        """
        handoff_id, blocks = entry.handoff_id, entry.blocks
        if self.receiver.writing(handoff_id):
            assert blocks is not None, "nothing is written before blocks are reserved"
            quarantine_from = blocks.cached_tokens // self._limits.block_size
            released = self._engine.release(handoff_id, quarantine_from)
            self._quarantined[handoff_id, entry.token] = released
        else:
            released = self._engine.release(handoff_id)
        self.receiver.forget(handoff_id)
        return in_background(self._endings, _released(released))

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.handoff_id]
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.compiled is not None:
            entry.compiled.cancel()
        if not self._entries:
            self._idle.set()


async def _released(released: Future[list[int]]) -> None:
    try:
        await asyncio.wrap_future(released)
    except Exception as error:
        log.error("blocks were not freed: %s", error)


def _tell(entry: Entry, progress: Progress) -> None:
    """Adds to what its router gets, or keeps it until that makes `stream_interval` tokens."""
    if (before := entry.untold) is not None:
        entry.untold = None
        if progress.abort_reason:  # its tokens are not those of the failed step
            _add_event(entry.router.outgoing, before)
        else:
            progress = progress._replace(
                token_ids=before.token_ids + progress.token_ids,
                logprobs=before.logprobs + progress.logprobs,
            )
    is_last = progress.finish_reason or progress.abort_reason
    enough = len(progress.token_ids) >= entry.stream_interval
    if is_last or enough or progress.prompt_logprobs or not entry.told:
        entry.told = True
        _add_event(entry.router.outgoing, progress)
    else:
        entry.untold = progress


def _add_event(message: WorkerMessage, progress: Progress) -> None:
    # What most events lack is set apart: as arguments, empty ones cost as much as the others.
    event = message.events.add(handoff_id=progress.seq_id, token_ids=progress.token_ids)
    if progress.logprobs:
        event.logprobs.extend(map(logprobs_proto, progress.logprobs))
    if progress.finish_reason:
        event.finish_reason = FINISH_REASONS[progress.finish_reason]
    if progress.abort_reason:
        event.abort_reason, event.invalid = progress.abort_reason, progress.invalid
    if progress.prompt_logprobs is not None:
        event.prompt_logprobs.CopyFrom(prompt_logprobs_proto(progress.prompt_logprobs))
