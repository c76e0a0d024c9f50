"""One worker as the router sees it: the one stream to it, and what it reported there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from baton.errors import BatonError, Stale, Unavailable
from baton.net import rpc
from baton.net.failures import error_of
from baton.net.message_stream import MAX_MESSAGE_BYTES, MessageStream
from baton.v1 import common_pb2, decode_pb2, prefill_pb2, worker_pb2
from baton.v1.dispatch_pb2 import RouterMessage, WorkerMessage
from router.fleet.kv_index import AssignedPrompt, KvIndex
from router.fleet.liveness import HeartbeatStream, LivenessConfig
from router.fleet.snapshot import MISMATCH, READY, SILENT, STALLED, WorkerView

log = logging.getLogger(__name__)

# Reports of a worker about one sequence or prompt; an error is the last one.
Event = (
    decode_pb2.ReserveResponse | decode_pb2.SequenceEvent | prefill_pb2.PrefillResponse | BatonError
)
_Connection = MessageStream[WorkerMessage, RouterMessage]
_CONNECT_TIMEOUT_S = 2.0
_QUARANTINED = "QUARANTINED"
_MOST_TOGETHER_BYTES = 16 << 10  # in a message; more begin another one
_CONNECT = "/baton.v1.DispatchService/Connect"


class Member:
    """Follows one incarnation of a worker until `close`.

    All subscribers get an error when the worker breaks off, falls silent, stalls, leaves or was
    replaced by another process.
    """

    def __init__(
        self,
        record: common_pb2.WorkerRecord,
        router_id: str,
        mismatch: str,
        liveness: LivenessConfig,
        index: KvIndex,
        touched: set[str],
        quarantined: dict[str, list[tuple[str, str]]],
        on_change: Callable[[], None],
        first_pause_s: Callable[[], float],
    ) -> None:
        """With a `mismatch` it is not followed.

        The fleet's `index`, `touched` (by name, when its view is another one) and `quarantined`
        pairs are kept up to date; `on_change` is called where waiting requests may find room.
        """
        self.load = worker_pb2.Load(blocks_total=record.blocks_total)
        self.pairs: list[worker_pb2.PairStatus] = []
        self._assigned: dict[str, AssignedPrompt] = {}  # by handoff id
        self._index = index
        self._slot = index.join()
        self._touched = touched
        self._quarantined = quarantined
        self._name = record.incarnation
        self._router_id = router_id
        self._mismatch = mismatch
        self._liveness = liveness
        self._on_change = on_change
        self.draining = False  # the registry or the worker says so; no worker comes back from it
        self._closed = False
        self._replaced = ""  # by which process
        self._stalled = ""  # why
        self._subscribers: dict[str, Callable[[Event], None]] = {}
        self._connection: _Connection | None = None  # once the worker has answered on it
        self.update(record)
        self._stream: HeartbeatStream | None = None  # none where it is not followed
        if not mismatch:
            self._stream = HeartbeatStream(self._name, self._follow, self._lost, first_pause_s)

    @property
    def view(self) -> WorkerView:
        state, reason = self._state()
        prompts = tuple(self._assigned.values())
        return WorkerView(
            self.record,
            self.load,
            state,
            reason,
            prompts,
            len(self._subscribers),
            self._slot,
            suspected=state == SILENT and self.answers,
        )

    @property
    def answers(self) -> bool:
        """Whether it is connected and not lost."""
        return self._stream is not None and self._stream.alive

    def update(self, record: common_pb2.WorkerRecord) -> None:
        """The registry has a newer record of the same incarnation."""
        self.record = record
        self.draining |= record.state == common_pb2.WORKER_STATE_DRAINING
        self._touched.add(self._name)

    def assign(self, handoff_id: str, prompt: AssignedPrompt) -> None:
        """Counts a prompt against the worker until `unassign`, before its load shows it."""
        self._assigned[handoff_id] = prompt
        self._index.begin(handoff_id, self._slot, prompt)
        self._touched.add(self._name)

    def unassign(self, handoff_id: str) -> None:
        self._index.end(handoff_id, self._assigned.pop(handoff_id))
        self._touched.add(self._name)

    def subscribe(self, handoff_id: str, deliver: Callable[[Event], None]) -> None:
        """Sends events of a sequence or prompt to `deliver`, in order; an error is the last one."""
        self._subscribers[handoff_id] = deliver
        self._touched.add(self._name)

    def unsubscribe(self, handoff_id: str) -> None:
        """No request waits for this sequence any more."""
        self._subscribers.pop(handoff_id, None)
        self._touched.add(self._name)

    @property
    def outgoing(self) -> RouterMessage:
        """What the worker gets at the end of this turn of the loop, to be added to.

        Raises Unavailable where it is not connected, and Stale where it was replaced.
        """
        if self._connection is not None:
            if self._connection.outgoing.ByteSize() > _MOST_TOGETHER_BYTES:
                self._connection.seal()
            return self._connection.outgoing
        if self._closed:
            raise Unavailable(f"worker {self._name} has left")
        if self._replaced:
            raise Stale(self._replaced)
        why = self._stream.why if self._stream else self._mismatch
        raise Unavailable(f"worker {self._name} is not connected: {why}")

    def cancel(self, handoff_id: str) -> None:
        """Frees a sequence's or prompt's blocks; without a connection the worker has done so."""
        if self._connection is not None:
            self.outgoing.cancel.append(handoff_id)

    def keep_traces(self, trace_ids: Iterable[str]) -> None:
        """Has the worker export the spans of these traces, if it is connected."""
        if self._connection is not None:
            self._connection.outgoing.keep_traces.extend(trace_ids)

    def tick(self) -> bool:
        """A tick of the router's loop has passed; see `LivenessConfig` and `HeartbeatStream`."""
        if (stream := self._stream) is None:
            return False
        first_try_failed = stream.tick()
        lost_ticks = self._liveness.lost_ticks
        if stream.silent_ticks >= lost_ticks // 2:
            self._touched.add(self._name)
        if stream.silent_ticks >= lost_ticks:
            answered, why = stream.alive, self._no_heartbeat
            stream.cut(why)  # when it wakes, it must find it broken
            self._connection = None
            if answered:
                log.warning("worker %s is lost for now: %s", self._name, why)
                self._on_change()
        elif stream.silent_ticks == lost_ticks // 2 and stream.alive:
            self._on_change()
        if not stream.alive and stream.state == SILENT:
            # Also those who subscribed a moment too late.
            self._fail_all(f"worker {self._name} is lost: {stream.why}")
        elif self._stalled:
            self._fail_all(f"worker {self._name} is stalled: {self._stalled}")
        return first_try_failed

    async def close(self, reason: str) -> None:
        """The worker is gone: all subscribers get the error."""
        was_closed, self._closed = self._closed, True
        self._fail_all(reason)
        if self._stream is not None:
            await self._stream.close()
        if not was_closed:
            self._index.leave(self._slot)
            self._quarantined.pop(self._name, None)

    @property
    def _silent_ticks(self) -> int:
        return self._stream.silent_ticks if self._stream else 0

    @property
    def _no_heartbeat(self) -> str:
        return f"no heartbeat for {self._silent_ticks * self._liveness.tick_s:.1f} s"

    def _state(self) -> tuple[str, str]:
        """Its state, and the reason when that is not READY."""
        if self._mismatch:
            return MISMATCH, self._mismatch
        if self.draining or self.record.state != common_pb2.WORKER_STATE_READY:
            state = "DRAINING" if self.draining else "STARTING"
            return state, f"the worker is {state.lower()}"
        if self._stream is not None and not self._stream.alive:
            return self._stream.state, self._stream.why
        if self._silent_ticks >= self._liveness.lost_ticks // 2:
            return SILENT, self._no_heartbeat
        if self._stalled:
            return STALLED, self._stalled
        return READY, ""

    async def _follow(self, stream: HeartbeatStream) -> None:
        """One stream, from its beginning to its end. Raises why it has ended."""
        channel = rpc.channel(
            self.record.address, role="worker", max_message_bytes=MAX_MESSAGE_BYTES, watched=True
        )
        metadata = (
            ("baton-router-id", self._router_id),
            ("baton-heartbeat-ms", str(self._liveness.heartbeat_ms)),
        )
        call = channel.stream_stream(_CONNECT)(metadata=metadata)
        try:
            with rpc.translated():
                await _connected(call, self.record.address)
                connection = _Connection(call, WorkerMessage, RouterMessage)
                await connection.run(self._take_all(stream, connection))
        finally:
            self._connection = None
            call.cancel()
            await channel.close(None)

    async def _take_all(self, stream: HeartbeatStream, connection: _Connection) -> None:
        answered = False
        async for message in connection.messages():
            if answered:
                self._take(stream, message)
            else:
                self._begin(stream, connection, message)
                answered = True

    def _take(self, stream: HeartbeatStream, message: WorkerMessage) -> None:
        """Handles a worker's message."""
        if not stream.alive:
            return  # it was silent for too long, and is not listened to any more
        if stream.silent_ticks >= self._liveness.lost_ticks // 2:
            with self._announcing_change():
                stream.heard()
        else:
            stream.heard()
        self._handle(message)

    def _handle(self, message: WorkerMessage) -> None:
        if message.HasField("report"):
            self._take_report(message.report)
        for reserved in message.reserved:
            self._deliver(reserved.handoff_id, reserved)
        for response in message.prefill:
            self._deliver(response.handoff_id, response)
        subscriber = self._subscribers.get
        for event in message.events:
            if deliver := subscriber(event.handoff_id):
                deliver(event)
        for failure in message.failures:  # behind the others: it is the last of its sequence
            self._deliver(failure.handoff_id, error_of(failure))

    def _begin(
        self, stream: HeartbeatStream, connection: _Connection, message: WorkerMessage
    ) -> None:
        """The worker has answered. Raises Stale when another process has taken its address."""
        if (found := message.incarnation) != self._name:
            self._replaced = f"another process, {found}, has taken the place of {self._name}"
            self._fail_all(self._replaced)
            raise Stale(self._replaced)
        with self._announcing_change():
            stream.opened()
        self._connection = connection
        self._handle(message)

    @contextlib.contextmanager
    def _announcing_change(self) -> Iterator[None]:
        """Around what may change the state: a heartbeat alone is no change."""
        before = self._state(), self.load, self.pairs
        yield
        if (self._state(), self.load, self.pairs) != before:
            self._touched.add(self._name)
            self._on_change()

    def _take_report(self, report: worker_pb2.LoadReport) -> None:
        with self._announcing_change():
            self.load, self.pairs = report.load, list(report.pairs)
            self._quarantined[self._name] = [
                (pair.prefill, pair.decode) for pair in report.pairs if pair.state == _QUARANTINED
            ]
            cache = report.cache
            self._index.take(self._slot, cache.stored, cache.evicted, cleared=cache.cleared)
            self.draining |= report.state == common_pb2.WORKER_STATE_DRAINING
            self._stalled = self._liveness.why_stalled(self.load)

    def _deliver(self, handoff_id: str, event: Event) -> None:
        if deliver := self._subscribers.get(handoff_id):
            deliver(event)

    def _lost(self, changed: bool) -> None:
        self._fail_all(f"the connection to worker {self._name} broke")
        if changed:
            self._on_change()

    def _fail_all(self, reason: str) -> None:
        for deliver in list(self._subscribers.values()):
            deliver(Unavailable(reason))
        self._subscribers.clear()
        self._touched.add(self._name)


async def _connected(call: Any, address: str) -> None:
    """Raises Unavailable where connecting fails or takes too long."""
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await call.wait_for_connection()
    except TimeoutError:
        raise Unavailable(f"cannot connect to {address}: no answer") from None
