"""All handoffs of a decode worker, from Reserve to the last token: the one place that changes them.

`decode_worker.handoff` has the table of states. Every state but QUARANTINED ends by cancel,
deadline, a lost router or a failure, and those before COMMITTED by a lease, too, which expires by
itself: no lost message can leak blocks. Blocks that a remote sender may still write into are
quarantined, not freed, until it has stopped or its process has ended.

A sequence decodes from its Commit on, while its checksum is verified; its router gets nothing until
that agrees. If it does not, the handoff ends, and all that was computed is discarded.

A router's handoffs belong to its connection: they end with it, and no other router can name them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Set
from concurrent.futures import Future
from functools import partial
from typing import Any

from baton.block_hash import token_digest
from baton.engine.engine import Engine, Reserved, UnverifiedKv
from baton.engine.step_report import SequenceProgress, StepReport
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Stale,
    TransferFailed,
)
from baton.generation.structured_output import GrammarCompiler, GrammarMatcher
from baton.net.tasks import in_background
from baton.v1 import decode_pb2
from baton.v1 import handoff_pb2 as pb
from baton.worker.dispatch_service import RouterStream
from baton.worker.messages import ModelLimits, compiled_grammar, sequence_of
from decode_worker.events import EventStream
from decode_worker.handoff import Handoff, State, Transfer
from decode_worker.spans import DecodeSpans
from kvtransfer.incoming import IncomingLink
from kvtransfer.pool import Slots
from kvtransfer.rank_ends import LinkChecksum

log = logging.getLogger(__name__)

# Leases after which a handoff without a deadline ends though its sender may still write: ten
# minutes by default, the time that a router gives a request.
MAX_SILENT_LEASES = 20


class Reservations:
    """The table, by handoff id. Event-loop thread only.

    `verify_timeout_s` bounds the verification of a checksum. `count` gets the outcome of each
    reservation, as `WorkerMetrics.reserved` takes it.
    """

    def __init__(
        self, engine: Engine, limits: ModelLimits, grammars: GrammarCompiler, lease_s: float,
        verify_timeout_s: float, count: Callable[[str], None] = lambda outcome: None,
    ) -> None:  # fmt: skip
        self._engine, self._limits, self._grammars = engine, limits, grammars
        self._lease_s, self._verify_timeout_s, self._count = lease_s, verify_timeout_s, count
        # By handoff id; quarantined ones by reservation token, so that an id can be used again.
        self._handoffs: dict[str, Handoff] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # What routers ask for.

    def reserve(
        self, router: RouterStream, request: decode_pb2.ReserveRequest, spans: DecodeSpans
    ) -> None:
        """Reserves blocks. The router gets a ReserveResponse once the engine has answered, or a
        failure: Overloaded if there is no room."""
        spec, loop = request.sequence, asyncio.get_running_loop()
        deadline = loop.time() + spec.time_left_ms / 1000 if spec.time_left_ms else None
        try:
            if spec.handoff_id in self._handoffs:
                raise InvalidRequest(f"handoff {spec.handoff_id} exists", "handoff_id")
            sequence = sequence_of(spec, self._limits)
            compiled = compiled_grammar(sequence, self._grammars)
        except BatonError as error:
            self.refuse(router, spec.handoff_id, spans, error)
            return
        events = EventStream(router, spec.handoff_id, request.stream_interval)
        groups = self._limits.groups
        handoff = Handoff(spec.handoff_id, sequence, groups, deadline, events, spans)
        self._handoffs[spec.handoff_id] = handoff
        self._idle.clear()
        self._renew(handoff)
        local_tokens = request.local_prefill_max_tokens
        if compiled is None:
            self._hold(handoff, local_tokens)
        else:
            handoff.compiled = asyncio.wrap_future(compiled)
            handoff.compiled.add_done_callback(partial(self._compiled, handoff, local_tokens))

    def refuse(
        self, router: RouterStream, handoff_id: str, spans: DecodeSpans, error: BaseException
    ) -> None:
        """Reports to the router why nothing is reserved."""
        if isinstance(error, Overloaded):
            spans.refused()
            self._count("refused")
        else:
            spans.end(str(error) or type(error).__name__)
            self._count("failed")
        router.failed(handoff_id, error)

    def cancel(self, router: RouterStream, handoff_id: str) -> None:
        """Ends a handoff of this router, in any state; an unknown id is ignored."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None and handoff.events.router is router:
            self._end(handoff, "cancelled")

    def lost(self, router: RouterStream) -> None:
        """Ends all handoffs of a router whose connection has ended."""
        for handoff in [h for h in self._handoffs.values() if h.events.router is router]:
            if handoff.state is not State.QUARANTINED:
                reason = "the router's connection ended"
                log.warning("handoff %s: %s", handoff.handoff_id, reason, extra=handoff.about)
                self._end(handoff, reason)

    async def idle(self) -> None:
        """Returns when no router has a handoff here."""
        await self._idle.wait()

    async def close(self, reason: str) -> None:
        """Gives every handoff back to its router, and waits until their blocks are freed."""
        for handoff in list(self._handoffs.values()):
            if handoff.state is not State.QUARANTINED:
                self._give_up(handoff, reason)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # What senders ask for.

    async def ready(self, request: pb.ReadyRequest, link: IncomingLink) -> Slots:
        """Lets a one-sided sender write the next tokens, or starts to receive them.

        Raises Stale, InvalidRequest, TransferFailed.
        """
        handoff, transfer = self._transfer_of(request, link)
        slots = handoff.announce(transfer, request.first_token, request.num_tokens)
        if link.transport.one_sided:
            transfer.granted = True
            return slots
        posted = asyncio.Event()
        receive = self._received(handoff, transfer, link.receive(slots, transfer.checksum, posted))
        transfer.receives.add(in_background(self._tasks, receive))
        await posted.wait()
        if transfer.failure is not None:
            raise transfer.failure
        return slots

    async def commit(self, request: pb.CommitRequest, link: IncomingLink) -> None:
        """Starts decoding, and returns when the KV is verified.

        Not to be cancelled. Raises Stale, InvalidRequest, KvCorrupted, TransferFailed.
        """
        handoff, transfer = self._transfer_of(request, link)
        await transfer.receives_end()
        try:
            if transfer.failure is not None:
                raise transfer.failure
            self._check_current(handoff, transfer)
            handoff.check_tokens(transfer, request)
            is_verified = not link.transport.one_sided
            if is_verified:
                handoff.check_bytes(request, transfer.checksum)
            elif (
                self._limits.groups.state_blocks
            ):  # which decoding would change before it is read back
                arrived = await self._read_back(link.checksum(handoff.received_slots))
                self._check_current(handoff, transfer)
                handoff.check_bytes(request, arrived)
                is_verified = True
            self._limits.check_token(request.first_token_id, "first_token_id")
        except BatonError as error:
            handoff.warn(request.incarnation, error)
            if handoff.transfer is transfer:
                # The sender still has the KV; if it does not come back, the lease ends the handoff.
                self._stop_writing(handoff, str(error), resend=isinstance(error, TransferFailed))
            raise
        handoff.events.awaited = False
        handoff.transfer = None  # Commit says that everything has been written
        handoff.enter(State.RUNNING if is_verified else State.COMMITTED)
        self._start_decoding(handoff)
        # What a one-sided sender wrote is read back while the sequence decodes.
        reading = None if is_verified else link.checksum(handoff.received_slots)
        token_id, num_tokens = request.first_token_id, handoff.num_tokens
        resumed = self._engine.resume(handoff.handoff_id, num_tokens, token_id, is_verified)
        if reading is None:
            await asyncio.wrap_future(resumed)
        else:
            await self._verify(handoff, request, reading, resumed)

    async def _read_back(self, reading: asyncio.Future[LinkChecksum]) -> LinkChecksum:
        """The checksum of what has arrived. Raises TransferFailed, also when it takes too long."""
        await asyncio.wait({reading}, timeout=self._verify_timeout_s)
        if not reading.done():
            raise TransferFailed("the blocks were not read back in time")
        return reading.result()

    async def _verify(
        self, handoff: Handoff, request: pb.CommitRequest, arrived: asyncio.Future[LinkChecksum],
        resumed: Future[UnverifiedKv],
    ) -> None:  # fmt: skip
        """Returns once the router may get what was computed. Raises Stale, TransferFailed."""
        kv = await asyncio.wrap_future(resumed)
        try:
            handoff.check_bytes(request, await self._read_back(arrived))
        except Exception as error:
            handoff.warn(request.incarnation, error)
            if handoff.state is State.COMMITTED:
                self._leave(handoff, str(error) or type(error).__name__)
            await asyncio.wrap_future(self._engine.discard(kv))
            raise
        self._engine.accept(kv)
        if handoff.state is not State.COMMITTED:
            raise Stale(f"handoff {handoff.handoff_id} ended while its KV was verified")
        handoff.enter(State.RUNNING)
        computed, handoff.unverified = handoff.unverified, []
        for progress in computed:
            self._report(handoff, progress)

    async def abort(self, request: pb.AbortRequest) -> None:
        """The sender writes no more; with `resend`, not before its next Ready.

        Returns when posted receives have ended, too. Raises Stale for another sender, and if a
        handoff that is to be sent again is not reserved any more.
        """
        quarantined = self._handoffs.get(request.reservation_token)
        handoff = quarantined or self._handoffs.get(request.handoff_id)
        if handoff is not None and (transfer := handoff.transfer) is not None:
            handoff.check_sender(request.reservation_token, request.incarnation)
            self._stop_writing(handoff, request.reason, request.resend)
            await transfer.receives_end()
        elif (
            handoff is not None
            and handoff.state is State.RESERVED
            and handoff.token == request.reservation_token
            and not request.resend
        ):
            self._abort(handoff, request.reason)
        if request.resend:
            self._renew_reserved(request.handoff_id, request.reservation_token)

    async def sender_exited(self, incarnation: str) -> None:
        """Gives up the handoffs of a prefill process that has ended.

        Its link has been closed, so receives from it fail. Nothing of it is written once this
        returns.
        """
        for handoff in list(self._handoffs.values()):
            transfer = handoff.transfer
            if transfer is not None and transfer.link.peer == incarnation:
                self._stop_writing(handoff, f"prefill {incarnation} has ended")
                await transfer.receives_end()

    def senders(self) -> Set[str]:
        """The prefill processes that may be sending: their links must stay open."""
        return {h.transfer.link.peer for h in self._handoffs.values() if h.transfer is not None}

    # What the engine reports.

    def on_step(self, report: StepReport) -> None:
        """Adds what each sequence got in a step to the message for its router."""
        router: RouterStream | None = None
        handoff: Handoff | None = None
        ended_ns = report.ended_ns
        for seq_id, token_id in report.token_ids.items():
            handoff = self._handoffs.get(seq_id)
            if handoff is None:
                continue
            events = handoff.events
            if events.per_token:
                # Hundreds in each step: as little work as possible for each.
                if events.router is not router:
                    router = events.router
                    add_event = router.outgoing_soon.events.add
                spans = handoff.spans
                spans.single_tokens += 1
                gap_ns = ended_ns - spans.last_ns
                if gap_ns > spans.longest_gap_ns:  # noqa: PLR1730 - max() costs more
                    spans.longest_gap_ns = gap_ns
                spans.last_ns = ended_ns
                add_event(handoff_id=seq_id, token_ids=(token_id,))
            else:
                self._advance(handoff, SequenceProgress(seq_id, token_ids=(token_id,)), report)
        for progress in report.others:
            if (handoff := self._handoffs.get(progress.seq_id)) is not None:
                self._advance(handoff, progress, report)
        if report.num_sequences == 1 and handoff is not None:
            handoff.events.router.flush()  # others' tokens would come with a later step

    def _advance(self, handoff: Handoff, progress: SequenceProgress, report: StepReport) -> None:
        if handoff.state is State.REQUESTED:  # the report came before the answer to `reserve`
            handoff.enter(State.RUNNING)
            self._start_decoding(handoff)
        handoff.spans.step(report.started_ns, report.ended_ns, progress)
        if handoff.state is State.COMMITTED:
            handoff.unverified.append(progress)
        else:
            self._report(handoff, progress)

    def _report(self, handoff: Handoff, progress: SequenceProgress) -> None:
        """Passes progress on to the router; the last one ends the handoff."""
        if progress.token_ids or progress.abort_reason or progress.prompt_logprobs:
            handoff.events.send(progress)  # otherwise its prompt is still being computed
        if progress.finish_reason or progress.abort_reason:
            self._leave(handoff, progress.finish_reason or "failed")

    # REQUESTED → RESERVED, or RUNNING

    def _compiled(
        self, handoff: Handoff, local_tokens: int, compiled: asyncio.Future[GrammarMatcher]
    ) -> None:
        """The grammar is compiled, or failed to compile, or the handoff's end has cancelled it."""
        error = None if compiled.cancelled() else compiled.exception()
        if handoff.state is State.ENDED:
            error = Stale("the request ended while its grammar was compiled")
        if error is None:
            handoff.sequence.grammar = compiled.result()
            self._renew(handoff)
            self._hold(handoff, local_tokens)
        else:
            self._not_reserved(handoff, error)

    def _hold(self, handoff: Handoff, local_tokens: int) -> None:
        sequence = handoff.sequence
        handoff.token_digest = token_digest(sequence.tokens, sequence.cache_salt)
        reserved = self._engine.reserve(sequence, local_tokens)
        asyncio.wrap_future(reserved).add_done_callback(partial(self._held, handoff))

    def _held(self, handoff: Handoff, answer: asyncio.Future[Reserved]) -> None:
        """The engine has answered; a step's report may have come before, even the last one."""
        error = answer.exception()
        if error is None and handoff.state is State.ENDED and not handoff.has_decoded:
            error = Stale("the request was cancelled while it was being reserved")
        if error is not None:
            self._not_reserved(handoff, error)
            return
        reserved = answer.result()
        handoff.block_ids, handoff.cached_tokens = reserved.block_ids, reserved.num_cached
        if handoff.state is State.REQUESTED:
            handoff.enter(State.RUNNING if reserved.started else State.RESERVED)
            if reserved.started:
                self._start_decoding(handoff)
        handoff.spans.reserved(reserved.num_cached, reserved.started)
        self._count("started" if reserved.started else "held")
        handoff.events.router.outgoing.reserved.add(
            handoff_id=handoff.handoff_id,
            reservation_token=handoff.token,
            cached_tokens=reserved.num_cached,
            started=reserved.started,
        )

    def _not_reserved(self, handoff: Handoff, error: BaseException) -> None:
        self.refuse(handoff.events.router, handoff.handoff_id, handoff.spans, error)
        if handoff.state is not State.ENDED:
            self._end(handoff, "")

    # RESERVED → WRITING → WITHDRAWN → RESERVED

    def _renew_reserved(self, handoff_id: str, token: str) -> Handoff:
        """Returns a handoff that waits for its KV, with its lease renewed. Raises Stale."""
        handoff = self._handoffs.get(handoff_id)
        waiting = State.RESERVED, State.WRITING
        if handoff is None or handoff.token != token or handoff.state not in waiting:
            raise Stale(f"handoff {handoff_id} is not reserved here")
        handoff.silent_leases = 0
        self._renew(handoff)  # bytes are coming: the sender is alive
        return handoff

    def _transfer_of(
        self, request: pb.ReadyRequest | pb.CommitRequest, link: IncomingLink
    ) -> tuple[Handoff, Transfer]:
        """The transfer that a message belongs to, new if this is its first one. Raises Stale."""
        handoff = self._renew_reserved(request.handoff_id, request.reservation_token)
        if (transfer := handoff.transfer) is None:
            handoff.enter(State.WRITING)
            transfer = Transfer(link, handoff.first_token, link.new_checksum())
            handoff.transfer = transfer
        handoff.check_sender(request.reservation_token, request.incarnation)
        if transfer.link is not link:
            epoch = transfer.link.epoch
            raise Stale(f"handoff {handoff.handoff_id} began on link epoch {epoch}")
        return handoff, transfer

    def _check_current(self, handoff: Handoff, transfer: Transfer) -> None:
        """Raises Stale unless the transfer may still be committed; else renews the lease."""
        if handoff.transfer is not transfer or handoff.state is not State.WRITING:
            raise Stale(f"the reservation of handoff {handoff.handoff_id} is gone")
        self._renew_reserved(handoff.handoff_id, handoff.token)

    async def _received(
        self, handoff: Handoff, transfer: Transfer, receive: Coroutine[Any, Any, None]
    ) -> None:
        """Receives; the last receive to end completes a withdrawal or a quarantine."""
        try:
            await receive
            self._check_current(handoff, transfer)
        except BatonError as error:
            handoff.warn(transfer.link.peer, error)
            transfer.failure = transfer.failure or error
        task = asyncio.current_task()
        assert task is not None
        transfer.receives.remove(task)
        if handoff.transfer is transfer and handoff.state is not State.WRITING:
            self._settle(handoff)

    def _stop_writing(self, handoff: Handoff, reason: str, resend: bool = False) -> None:
        """The sender writes no more, except by receives that are posted.

        With `resend` the reservation waits for the sender to begin again, for as long as its lease.
        """
        assert handoff.transfer is not None
        handoff.transfer.granted = False
        if handoff.state is not State.QUARANTINED:
            if resend:
                text = "handoff %s is to be resent: %s"
                log.info(text, handoff.handoff_id, reason, extra=handoff.about)
                if handoff.state is State.WRITING:
                    handoff.enter(State.WITHDRAWN)
            else:
                self._abort(handoff, reason)
        if handoff.transfer is not None:
            self._settle(handoff)

    def _abort(self, handoff: Handoff, reason: str) -> None:
        log.info("handoff %s aborted: %s", handoff.handoff_id, reason, extra=handoff.about)
        self._end(handoff, reason)

    def _settle(self, handoff: Handoff) -> None:
        """Makes the blocks usable again, if nothing is written into them any more."""
        if handoff.may_be_written:
            return
        handoff.transfer = None
        if handoff.state is State.WITHDRAWN:
            handoff.enter(State.RESERVED)
            return
        assert handoff.released is not None
        in_background(self._tasks, self._freed(handoff.released, readmit=True))
        handoff.released = None
        handoff.enter(State.ENDED)
        del self._handoffs[handoff.token]

    # Leases and deadlines.

    def _renew(self, handoff: Handoff) -> None:
        lease_end = asyncio.get_running_loop().time() + self._lease_s
        self._set_timer(handoff, min(lease_end, handoff.deadline or lease_end))

    def _start_decoding(self, handoff: Handoff) -> None:
        """Leases end here: only the request's deadline is left."""
        handoff.has_decoded = True
        handoff.spans.committed()
        self._set_timer(handoff, handoff.deadline)

    def _set_timer(self, handoff: Handoff, when: float | None) -> None:
        if handoff.timer is not None:
            handoff.timer.cancel()
        loop = asyncio.get_running_loop()
        handoff.timer = (
            loop.call_at(when, self._expire, handoff, when) if when is not None else None
        )

    def _expire(self, handoff: Handoff, when: float) -> None:
        overdue = when == handoff.deadline  # not by the clock: timers are early by up to 1 ms
        handoff.silent_leases += 1
        is_kept = handoff.deadline is not None or handoff.silent_leases <= MAX_SILENT_LEASES
        if not overdue and is_kept and handoff.may_be_written:
            # A long prompt: no message comes between the grant and Commit. Its blocks could not be
            # reused anyway, and the end of the sender, or of the request, ends the handoff.
            self._renew(handoff)
            return
        reason = f"its {'deadline' if overdue else 'reservation lease'} has passed"
        log.warning("handoff %s: %s", handoff.handoff_id, reason, extra=handoff.about)
        if overdue:  # of the request: no fault of this worker, as an abort would be
            self._end(handoff, reason)
            handoff.events.router.failed(handoff.handoff_id, DeadlineExceeded(reason))
        else:
            self._give_up(handoff, reason)

    # Ends.

    def _give_up(self, handoff: Handoff, reason: str) -> None:
        """Ends a handoff for a reason that its router does not have yet."""
        self._end(handoff, reason)
        aborted = SequenceProgress(handoff.handoff_id, 0, abort_reason=reason)
        handoff.events.send(aborted, from_step=False)

    def _end(self, handoff: Handoff, reason: str) -> None:
        """Frees the blocks, or quarantines those that a sender may still write into."""
        if handoff.may_be_written:
            handoff.released = self._engine.release(handoff.handoff_id, handoff.cached_tokens)
            self._leave(handoff, reason, State.QUARANTINED)
        else:
            released = self._engine.release(handoff.handoff_id)
            in_background(self._tasks, self._freed(released))
            self._leave(handoff, reason)

    def _leave(self, handoff: Handoff, reason: str, state: State = State.ENDED) -> None:
        """The handoff is over for its router."""
        handoff.enter(state)
        handoff.spans.end(reason, handoff.sequence.preemptions)
        handoff.unverified.clear()
        self._set_timer(handoff, None)
        if handoff.compiled is not None:
            handoff.compiled.cancel()
        del self._handoffs[handoff.handoff_id]
        if state is State.ENDED:
            handoff.transfer = None
        else:
            self._handoffs[handoff.token] = handoff
        if all(one.state is State.QUARANTINED for one in self._handoffs.values()):
            self._idle.set()

    async def _freed(self, released: Future[list[int]], readmit: bool = False) -> None:
        """Waits until the engine has freed blocks; with `readmit`, out of their quarantine."""
        try:
            blocks = await asyncio.wrap_future(released)
            if readmit:
                await asyncio.wrap_future(self._engine.end_quarantine(blocks))
        except Exception as error:
            log.error("blocks were not freed: %s", error)

    def check(self) -> None:
        """Asserts that each handoff is as its state says. For tests, after each operation."""
        for key, handoff in self._handoffs.items():
            is_quarantined = handoff.state is State.QUARANTINED
            assert key == (handoff.token if is_quarantined else handoff.handoff_id)
            handoff.check()
        live = [h for h in self._handoffs.values() if h.state is not State.QUARANTINED]
        assert self._idle.is_set() == (not live)
