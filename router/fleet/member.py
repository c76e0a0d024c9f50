"""One worker as the router follows it: its load, its signs of life, and decode's event stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence

import grpc

from baton import rpc
from baton.config import split_address
from baton.errors import BatonError, Stale, Unavailable
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.dispatch.orphans import Strays
from router.fleet.heartbeat import Lifeline, Patience
from router.fleet.snapshot import (
    MISMATCH,
    READY,
    SILENT,
    STALLED,
    Assigned,
    WorkerView,
)
from router.placement.cached import CachedPrefixes

log = logging.getLogger(__name__)

Event = decode_pb2.SequenceEvent | BatonError
_STRAYS_TURN_S = 1.0  # a Cancel under way has arrived by then
_CANCEL_TIMEOUT_S = 2.0
_CONNECT_TIMEOUT_S = 2.0
_STATES = {
    common_pb2.WORKER_STATE_READY: READY,
    common_pb2.WORKER_STATE_DRAINING: "DRAINING",
    common_pb2.WORKER_STATE_STARTING: "STARTING",
}


class Member:
    """Follows one incarnation of a worker until `close`.

    Whoever has subscribed is told at once when the worker breaks off, falls silent, stalls, leaves
    or finds another process in its place.
    """

    def __init__(
        self,
        record: common_pb2.WorkerRecord,
        router_id: str,
        mismatch: str,
        patience: Patience,
        on_change: Callable[[], None],
        first_pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.record = record
        self.load = worker_pb2.Load(blocks_total=record.blocks_total)
        self.pairs: list[worker_pb2.PairStatus] = []
        self.assigned: dict[str, Assigned] = {}  # by handoff id
        self.cached = CachedPrefixes()
        # A secret of ours and the worker's: a caller that knows a stream's id can take it over.
        self.stream_id = secrets.token_hex(16)
        self._router_id = router_id
        self._mismatch = mismatch
        self._patience = patience
        self._on_change = on_change
        self._first_pause_s = first_pause_s
        self._draining = False
        self._closed = False
        self._replaced = ""  # by whom
        self._subscribers: dict[str, Callable[[Event], None]] = {}
        self._strays = Strays()
        self._ticks = 0
        self._strays_ticks = patience.ticks_in(_STRAYS_TURN_S)
        self._cancelling: asyncio.Task[None] | None = None
        self._channel = rpc.channel(record.address)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self.update(record)
        self._lines = self._follow() if not mismatch else []

    @property
    def view(self) -> WorkerView:
        """The worker as it is now."""
        state, reason = self._state()
        return WorkerView(
            self.record,
            self.load,
            state,
            reason,
            tuple(self.assigned.values()),
            len(self._subscribers),
            self.cached,
        )

    def update(self, record: common_pb2.WorkerRecord) -> None:
        """The registry has a newer record of the same incarnation."""
        self.record = record
        self._note_state(record.state)

    def subscribe(self, handoff_id: str, deliver: Callable[[Event], None]) -> None:
        """Sends events of a sequence to `deliver`, in order; an error is the last one.

        A prefill worker has no events but the error that says that it is lost.
        """
        self._subscribers[handoff_id] = deliver

    def unsubscribe(self, handoff_id: str) -> None:
        """Nobody waits for this sequence any more."""
        self._subscribers.pop(handoff_id, None)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around calls to the worker: they raise BatonError, also when `close` ends them."""
        if self._replaced:
            raise Stale(self._replaced)
        try:
            with rpc.translated():
                yield
        except asyncio.CancelledError:
            # gRPC cancels whoever awaits a call when the channel closes: that is not our caller.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise Unavailable(f"worker {self.record.incarnation} has left") from None
        except grpc.aio.UsageError as error:  # a call on a closed channel
            raise Unavailable(f"worker {self.record.incarnation} has left") from error

    def tick(self) -> None:
        """A tick of the router's loop has passed; see `Patience`."""
        for line in self._lines:
            line.tick()
        if self._silent_ticks >= self._patience.lost_ticks:
            self._give_up()
        elif self._silent_ticks == self._patience.suspect_ticks and self._answers:
            self._on_change()
        for line in self._lines:
            if not line.alive and line.state == SILENT:
                # Also those who came a moment too late.
                self._fail_all(f"worker {self.record.incarnation} is lost: {line.why}")
        self._ticks += 1
        if self._ticks % self._strays_ticks == 0:
            self._cancel_strays()

    async def stop_following(self, reason: str) -> None:
        """The worker is gone: whoever waits for it is told."""
        self._closed = True
        self._fail_all(reason)
        await asyncio.gather(*(line.close() for line in self._lines))

    async def close(self, reason: str) -> None:
        """As `stop_following`, and ends the connection."""
        await self.stop_following(reason)
        if self._cancelling is not None:
            self._cancelling.cancel()
            await asyncio.gather(self._cancelling, return_exceptions=True)
        await self._channel.close(None)

    def _give_up(self) -> None:
        """It is silent for too long: when it wakes, it must find its streams broken."""
        why = f"it gave no sign of life for {self._silent_s:.1f} s"
        is_news = self._answers
        if is_news:
            log.warning("worker %s is lost for now: %s", self.record.incarnation, why)
        for line in self._lines:
            line.cut(why)
        if is_news:
            self._on_change()

    @property
    def _answers(self) -> bool:
        return any(line.alive for line in self._lines)

    @property
    def _silent_ticks(self) -> int:
        return max((line.silent_ticks for line in self._lines), default=0)

    @property
    def _silent_s(self) -> float:
        return self._silent_ticks * self._patience.tick_s

    def _state(self) -> tuple[str, str]:
        """Its state, and the reason when that is not READY."""
        if self._mismatch:
            return MISMATCH, self._mismatch
        state = "DRAINING" if self._draining else _STATES.get(self.record.state, "STARTING")
        if state != READY:
            return state, f"the worker is {state.lower()}"
        for line in self._lines:
            if not line.alive:
                return line.state, line.why
        if self._silent_ticks >= self._patience.suspect_ticks:
            return SILENT, f"it gave no sign of life for {self._silent_s:.1f} s"
        if stalled := self._patience.why_stalled(self.load, self.record.chunk_tokens):
            return STALLED, stalled
        return READY, ""

    def _follow(self) -> list[Lifeline]:
        name, pause = self.record.incarnation, self._first_pause_s
        lines = [Lifeline(f"watch {name}", self._watch_load, self._watch_lost, pause)]
        if self.record.role == common_pb2.WORKER_ROLE_DECODE:
            lines.append(Lifeline(f"events {name}", self._stream_events, self._events_lost, pause))
        return lines

    async def _watch_load(self, line: Lifeline) -> None:
        await self._check_identity(line)
        self.cached.take(worker_pb2.CacheEvent(cleared=True))
        request = worker_pb2.WatchRequest(heartbeat_ms=self._patience.heartbeat_ms)
        async for news in self.worker.Watch(request):
            with self._telling_change():
                line.opened()
                self._take(news)

    async def _stream_events(self, line: Lifeline) -> None:
        await self._check_identity(line)
        request = decode_pb2.StreamEventsRequest(
            router_id=self._router_id,
            stream_id=self.stream_id,
            heartbeat_ms=self._patience.heartbeat_ms,
        )
        call = self.decode.StreamEvents(request)
        try:
            await call.wait_for_connection()  # the worker knows this router now
            # It has freed what came over an earlier stream.
            self._fail_all("the event stream was opened anew")
            with self._telling_change():
                line.opened()
            async for step in call:
                with self._telling_change():
                    line.heard()
                for event in step.events:
                    self._deliver(event)
        finally:
            call.cancel()

    async def _check_identity(self, line: Lifeline) -> None:
        """Raises Stale when another process has taken the worker's address."""
        if not line.answered:
            await _check_listening(self.record.address)
        described = await self.worker.Describe(worker_pb2.DescribeRequest())
        line.heard()
        found, name = described.record.incarnation, self.record.incarnation
        if found != name:
            self._replaced = f"another process, {found}, has taken the place of {name}"
            self._fail_all(self._replaced)
            raise Stale(self._replaced)

    @contextlib.contextmanager
    def _telling_change(self) -> Iterator[None]:
        """Around what may change the state: others need not hear of every sign of life."""
        before = self._state(), self.load, self.pairs
        yield
        if (self._state(), self.load, self.pairs) != before:
            self._on_change()

    def _take(self, news: worker_pb2.WatchResponse) -> None:
        self.load = news.load
        self.pairs = list(news.pairs)
        self.cached.take(news.cache)
        self._note_state(news.state)
        if stalled := self._patience.why_stalled(self.load, self.record.chunk_tokens):
            self._fail_all(f"worker {self.record.incarnation} is stalled: {stalled}")

    def _deliver(self, event: decode_pb2.SequenceEvent) -> None:
        if deliver := self._subscribers.get(event.handoff_id):
            deliver(event)
        elif not (event.finish_reason or event.abort_reason):
            self._strays.saw(event.handoff_id)

    def _cancel_strays(self) -> None:
        """One Cancel at a time; those it does not reach are seen again."""
        strays = self._strays.turn()
        if strays and (self._cancelling is None or self._cancelling.done()):
            self._cancelling = asyncio.create_task(_cancel(strays, self, _CANCEL_TIMEOUT_S))

    def _note_state(self, state: common_pb2.WorkerState) -> None:
        """Registry and worker both tell; no worker comes back from DRAINING."""
        self._draining |= state == common_pb2.WORKER_STATE_DRAINING

    def _watch_lost(self, changed: bool) -> None:
        if changed:
            self._on_change()

    def _events_lost(self, changed: bool) -> None:
        self._fail_all(f"the event stream of decode worker {self.record.incarnation} broke")
        if changed:
            self._on_change()

    def _fail_all(self, reason: str) -> None:
        for deliver in list(self._subscribers.values()):
            deliver(Unavailable(reason))
        self._subscribers.clear()


async def cancel_on(member: Member, handoff_id: str, timeout_s: float) -> None:
    """Frees a sequence's blocks on a decode worker, or leaves that to its lease."""
    await _cancel([handoff_id], member, timeout_s)


async def _cancel(handoff_ids: Sequence[str], member: Member, timeout_s: float) -> None:
    request = decode_pb2.CancelRequest(handoff_ids=handoff_ids)
    # The reservations' leases are the backstop.
    with contextlib.suppress(BatonError), member.calling():
        await member.decode.Cancel(request, timeout=timeout_s)


async def _check_listening(address: str) -> None:
    """Raises Unavailable unless a connection can be made.

    gRPC would go on by itself to connect, every second, to an address at which nobody ever was.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            host, port = split_address(address)
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, ValueError) as error:
        raise Unavailable(f"cannot connect to {address}: {error or 'no answer'}") from error
    writer.transport.abort()
