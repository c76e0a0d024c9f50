"""Sequences that hold KV blocks on this worker, from Reserve to the last token, and how they end.

    RESERVED --Commit--> DECODING --last token--> gone
        \\___________________\\____ cancel, lease, deadline, lost router, failure ____> gone

Each entry has a lease that expires by itself, so that no lost message can leak blocks. While a
remote writer may still write into an entry's blocks they are quarantined, not freed.

Routers get events by a stream each, one message for each engine step. A stream's id is its router's
secret, because a second stream of an id replaces the first; so it is not logged either.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton import telemetry
from baton.engine.loop import Engine, Progress, StepReport
from baton.engine.sequence import Sequence
from baton.errors import InvalidRequest, Stale, Unavailable
from baton.log_format import about
from baton.prefix import token_digest
from baton.structured_output import GrammarCompiler
from baton.v1 import decode_pb2
from baton.worker.messages import FINISH_REASONS, ModelLimits, logprobs_proto, sequence_of
from kvtransfer.deadline import in_background
from kvtransfer.receiver import HandoffReceiver, ReservedBlocks

log = logging.getLogger(__name__)

MAX_BACKLOG = 4096  # messages a router may be behind before its stream is cut

Messages = asyncio.Queue[decode_pb2.StreamEventsResponse | None]  # None: the end


class DecodeSpans:
    """Collects times as they pass and records the spans; the first `end` counts."""

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        self._tracer = tracer
        self._span = tracer.start_span("decode", context=parent)
        self._context = telemetry.context_of(self._span)
        self.trace_id = telemetry.trace_id_of(self._span)  # empty where nothing is recorded
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
        telemetry.record(self._tracer, name, self._context, start_ns, end_ns, attributes)


@dataclass(eq=False)
class Entry:
    """One sequence that holds blocks here."""

    handoff_id: str
    stream_id: str
    sequence: Sequence
    num_tokens: int  # known when it was reserved; the handoff covers all of them
    deadline: float | None  # loop time
    spans: DecodeSpans
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    blocks: ReservedBlocks | None = None
    decoding: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def about(self) -> Mapping[str, str]:
        return about(trace_id=self.spans.trace_id, handoff_id=self.handoff_id)


class Reservations:
    """All entries, by handoff id. Event-loop thread only; kvtransfer's `BlockOwner`."""

    def __init__(
        self, engine: Engine, limits: ModelLimits, grammars: GrammarCompiler, lease_s: float
    ) -> None:
        self._engine, self._limits, self._lease_s = engine, limits, lease_s
        self._grammars = grammars
        self._streams: dict[str, tuple[Messages, str]] = {}  # with the router's name, for the log
        self._closed = False
        self._entries: dict[str, Entry] = {}
        # By (handoff id, token): what the engine answers to their release.
        self._quarantined: dict[tuple[str, str], Future[list[int]]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.receiver: HandoffReceiver  # set once, when the worker is built

    async def reserve(
        self, request: decode_pb2.ReserveRequest, incarnation: str, spans: DecodeSpans
    ) -> decode_pb2.ReserveResponse:
        """Holds blocks, or refuses at once.

        Raises Overloaded when there is no room, Unavailable when the router does not listen.
        """
        spec = request.sequence
        now = asyncio.get_running_loop().time()
        deadline = now + spec.time_left_ms / 1000 if spec.time_left_ms else None
        sequence = await sequence_of(spec, self._limits, self._grammars)
        # From here on it is one step to the entry that a cancellation finds.
        if request.stream_id not in self._streams:
            raise Unavailable("the router has no event stream open here")
        if spec.handoff_id in self._entries:
            raise InvalidRequest(f"handoff {spec.handoff_id} exists", "handoff_id")
        whose = spec.handoff_id, request.stream_id
        entry = Entry(*whose, sequence, sequence.num_tokens, deadline, spans)
        self._entries[spec.handoff_id] = entry
        self._idle.clear()
        self._renew(entry)
        try:
            blocks, started = await self._hold(entry, request.local_prefill_max_tokens)
        except BaseException:  # also a caller that hung up: the engine may have reserved by now
            if self._entries.get(spec.handoff_id) is entry:
                self._forget(spec.handoff_id)
                self._free(entry)
            raise
        spans.reserved(blocks.cached_tokens, started)
        return decode_pb2.ReserveResponse(
            reservation_token=entry.token,
            cached_tokens=blocks.cached_tokens,
            started=started,
            incarnation=incarnation,
        )

    async def cancel(self, *handoff_ids: str) -> None:
        """Ends entries in any state, even if the caller hangs up; unknown ids are ignored."""
        endings = []
        for handoff_id in handoff_ids:
            if entry := self._forget(handoff_id):
                entry.spans.end("cancelled")
                endings.append(self._free(entry))
        if endings:
            await asyncio.wait(endings)

    def listen(self, stream_id: str, router_id: str) -> Messages:
        """Starts queueing events for this router, whose earlier stream ends, with its sequences.

        Raises Unavailable when this worker has closed its streams.
        """
        self._cancel_stream(stream_id)  # the router gave them up when that one broke
        if self._closed:
            raise Unavailable("the decode worker has drained")
        self._end_stream(stream_id)
        messages: Messages = asyncio.Queue()
        self._streams[stream_id] = messages, router_id
        return messages

    def hang_up(self, stream_id: str, messages: Messages) -> None:
        """This stream is over; unless another has replaced it, so are its router's sequences."""
        if stream_id in self._streams and self._streams[stream_id][0] is messages:
            del self._streams[stream_id]
        if stream_id not in self._streams:
            self._cancel_stream(stream_id)

    async def idle(self) -> None:
        await self._idle.wait()

    async def close(self) -> None:
        """Gives every entry back to its router, waits until their blocks are dealt with, and ends
        the streams."""
        for handoff_id in list(self._entries):
            self._start_ending(handoff_id, "the decode worker is draining")
        await asyncio.gather(*self._endings, return_exceptions=True)
        self._closed = True
        for stream_id in list(self._streams):
            self._end_stream(stream_id)

    def find(self, handoff_id: str, token: str) -> ReservedBlocks:
        """What a handoff may write into. Raises Stale when it is not reserved (any more)."""
        entry = self._entries.get(handoff_id)
        if entry is None or entry.token != token or entry.decoding or entry.blocks is None:
            raise Stale(f"handoff {handoff_id} is not reserved here")
        self._renew(entry)  # bytes are coming: the sender is alive
        return entry.blocks

    async def committed(self, handoff_id: str, token: str, first_token_id: int) -> None:
        self.find(handoff_id, token)
        self._limits.check_token(first_token_id, "first_token_id")
        entry = self._entries[handoff_id]
        self._start_decoding(entry)
        resumed = self._engine.resume(handoff_id, entry.num_tokens, first_token_id)
        await asyncio.wrap_future(resumed)

    async def aborted(self, handoff_id: str, token: str, reason: str) -> None:
        """Nothing is written any more."""
        if released := self._quarantined.pop((handoff_id, token), None):
            await asyncio.wrap_future(self._engine.readmit(await asyncio.wrap_future(released)))
        entry = self._entries.get(handoff_id)
        if entry is not None and entry.token == token and not entry.decoding:
            log.info("handoff %s aborted: %s", handoff_id, reason, extra=entry.about)
            await self.cancel(handoff_id)

    def on_step(self, report: StepReport) -> None:
        """Sends each router one message with the events of its sequences."""
        events: dict[str, list[decode_pb2.SequenceEvent]] = {}
        for progress in report.progress:
            entry = self._entries.get(progress.seq_id)
            if entry is None:
                continue
            if not entry.decoding:
                self._start_decoding(entry)
            entry.spans.step(report.started_ns, report.ended_ns, progress)
            if event := _event(progress):
                events.setdefault(entry.stream_id, []).append(event)
            if progress.finish_reason or progress.abort_reason:
                self._forget(progress.seq_id)
                entry.spans.end(progress.finish_reason or "failed")
        for stream_id, stream_events in events.items():
            self._send(stream_id, stream_events)

    async def _hold(self, entry: Entry, start_tokens: int) -> tuple[ReservedBlocks, bool]:
        """Takes blocks; true where the sequence has started, and may have finished.

        Raises Overloaded, or Stale when the entry was ended meanwhile.
        """
        sequence = entry.sequence
        digest = token_digest(sequence.tokens, sequence.cache_salt)
        reserved = await asyncio.wrap_future(self._engine.reserve(sequence, start_tokens))
        if not entry.decoding:  # no step's report has come before this
            if self._entries.get(entry.handoff_id) is not entry:
                raise Stale("the request was cancelled while it was being reserved")
            if reserved.started:
                self._start_decoding(entry)
        entry.blocks = ReservedBlocks(
            reserved.block_ids,
            entry.num_tokens,
            reserved.num_cached,
            digest,
        )
        return entry.blocks, reserved.started

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
        entry.timer = loop.call_at(when, self._expire, entry) if when is not None else None

    def _expire(self, entry: Entry) -> None:
        now = asyncio.get_running_loop().time()
        overdue = entry.deadline is not None and now >= entry.deadline
        if not overdue and self.receiver.writing(entry.handoff_id):
            # A long prompt: no message comes between the grant and Commit. Its blocks could not be
            # reused anyway, and the end of the writer, or of the request, ends the entry.
            self._renew(entry)
            return
        reason = f"its {'deadline' if overdue else 'reservation lease'} has passed"
        log.warning("handoff %s: %s", entry.handoff_id, reason, extra=entry.about)
        self._start_ending(entry.handoff_id, reason)

    def _start_ending(self, handoff_id: str, reason: str) -> None:
        entry = self._forget(handoff_id)
        if entry is None:  # its router was just cut off
            return
        entry.spans.end(reason)
        event = decode_pb2.SequenceEvent(handoff_id=handoff_id, abort_reason=reason)
        self._free(entry)
        self._send(entry.stream_id, [event])

    def _send(self, stream_id: str, events: list[decode_pb2.SequenceEvent]) -> None:
        """Queues one message, unless the router is too far behind: then it is cut off."""
        if stream_id not in self._streams:
            return
        queue, name = self._streams[stream_id]
        if queue.qsize() < MAX_BACKLOG:
            queue.put_nowait(decode_pb2.StreamEventsResponse(events=events))
            return
        log.warning("router %s is %d messages behind: cutting it off", name, MAX_BACKLOG)
        while not queue.empty():
            queue.get_nowait()
        self._end_stream(stream_id)
        self._cancel_stream(stream_id)

    def _cancel_stream(self, stream_id: str) -> None:
        for handoff_id in [h for h, e in self._entries.items() if e.stream_id == stream_id]:
            self._start_ending(handoff_id, "the router's event stream broke")

    def _end_stream(self, stream_id: str) -> None:
        if stream_id in self._streams:
            self._streams.pop(stream_id)[0].put_nowait(None)

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

    def _forget(self, handoff_id: str) -> Entry | None:
        entry = self._entries.pop(handoff_id, None)
        if entry is not None and entry.timer is not None:
            entry.timer.cancel()
        if not self._entries:
            self._idle.set()
        return entry


async def _released(released: Future[list[int]]) -> None:
    try:
        await asyncio.wrap_future(released)
    except Exception as error:
        log.error("blocks were not freed: %s", error)


def _event(progress: Progress) -> decode_pb2.SequenceEvent | None:
    """A step's event for the router; none while a prompt is still being computed."""
    if not progress.token_ids and not progress.abort_reason:
        return None
    # What most events lack is set apart: as arguments, empty ones cost as much as the others.
    event = decode_pb2.SequenceEvent(handoff_id=progress.seq_id, token_ids=progress.token_ids)
    if progress.logprobs:
        event.logprobs.extend(map(logprobs_proto, progress.logprobs))
    if progress.finish_reason:
        event.finish_reason = FINISH_REASONS[progress.finish_reason]
    if progress.abort_reason:
        event.abort_reason, event.invalid = progress.abort_reason, progress.invalid
    return event
