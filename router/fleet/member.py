"""One worker as the router follows it: its load, its heartbeats, and decode's event stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence, Set

import grpc

from baton import rpc, tls
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
from router.fleet.heartbeat import HeartbeatStream, LivenessConfig
from router.fleet.prefix_index import PrefixIndex
from router.fleet.snapshot import MISMATCH, READY, SILENT, STALLED, AssignedPrompt, WorkerView

log = logging.getLogger(__name__)

_ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}
Event = decode_pb2.SequenceEvent | BatonError
CANCEL_TIMEOUT_S = 2.0
_CONNECT_TIMEOUT_S = 2.0
_QUARANTINED = "QUARANTINED"
_ORPHANS_ROUND_S = 1.0  # a Cancel under way has arrived by then
MOST_ORPHANS = 1024  # remembered at a time; the others are seen again
CANCEL_BATCH = 256  # named in one Cancel


class Member:
    """Follows one incarnation of a worker until `close`.

    All subscribers get an error at once when the worker breaks off, falls silent, stalls, leaves or
    was replaced by another process.
    """

    def __init__(
        self,
        record: common_pb2.WorkerRecord,
        router_id: str,
        mismatch: str,
        liveness: LivenessConfig,
        index: PrefixIndex,
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
        # A secret between us and the worker: a caller that knows a stream's id can take it over.
        self.stream_id = secrets.token_hex(16)
        self._name = record.incarnation
        self._router_id = router_id
        self._mismatch = mismatch
        self._liveness = liveness
        self._on_change = on_change
        self._draining = False  # the registry or the worker says so; no worker comes back from it
        self._closed = False
        self._replaced = ""  # by which process
        self._subscribers: dict[str, Callable[[Event], None]] = {}
        # Sequences that the worker sends tokens of though no request here waits for them: their
        # Cancel was lost, or is on its way. The former are those of two rounds.
        self._orphans: set[str] = set()
        self._orphans_before: set[str] = set()
        self._ticks = 0
        self._cancelling: asyncio.Task[None] | None = None
        self.update(record)
        self._connect()
        followed = [("watch", self._watch_load, self._watch_lost)]
        if record.role == common_pb2.WORKER_ROLE_DECODE:
            followed.append(("events", self._stream_events, self._events_lost))
        self._streams = [
            HeartbeatStream(f"{what} {self._name}", follow, lost, first_pause_s)
            for what, follow, lost in ([] if mismatch else followed)
        ]

    @property
    def view(self) -> WorkerView:
        state, reason = self._state()
        prompts = tuple(self._assigned.values())
        return WorkerView(
            self.record, self.load, state, reason, prompts, len(self._subscribers), self._slot
        )

    @property
    def cached(self) -> Set[int]:
        """Hashes of the whole blocks that its prefix cache holds, as its events report."""
        return self._index.cached(self._slot)

    def update(self, record: common_pb2.WorkerRecord) -> None:
        """The registry has a newer record of the same incarnation."""
        self.record = record
        self._draining |= record.state == common_pb2.WORKER_STATE_DRAINING
        self._touched.add(self._name)

    def _connect(self) -> None:
        """A channel with the certificate as it is now; calls that run on an earlier one go on."""
        self._credentials = tls.current().of_client()
        self._channel = rpc.channel(
            self.record.address, self._credentials, role=_ROLES[self.record.role]
        )
        self.worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self._channel)

    def assign(self, handoff_id: str, prompt: AssignedPrompt) -> None:
        """Counts a prompt against the worker until `unassign`, before its load shows it."""
        self._assigned[handoff_id] = prompt
        self._touched.add(self._name)

    def unassign(self, handoff_id: str) -> None:
        del self._assigned[handoff_id]
        self._touched.add(self._name)

    def subscribe(self, handoff_id: str, deliver: Callable[[Event], None]) -> None:
        """Sends events of a sequence to `deliver`, in order; an error is the last one.

        A prefill worker has no events but the error when it is lost.
        """
        self._subscribers[handoff_id] = deliver
        self._touched.add(self._name)

    def unsubscribe(self, handoff_id: str) -> None:
        """No request waits for this sequence any more."""
        self._subscribers.pop(handoff_id, None)
        self._touched.add(self._name)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around calls to the worker: they raise BatonError, also when `close` ends them."""
        if self._replaced:
            raise Stale(self._replaced)
        try:
            with rpc.translated():
                yield
        except asyncio.CancelledError:
            # gRPC cancels tasks that await a call when the channel closes: not by our caller.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise Unavailable(f"worker {self._name} has left") from None
        except grpc.aio.UsageError as error:  # a call on a closed channel
            raise Unavailable(f"worker {self._name} has left") from error

    async def cancel(self, handoff_ids: Sequence[str]) -> None:
        """Frees sequences' blocks on a decode worker; if that fails, their leases do."""
        request = decode_pb2.CancelRequest(handoff_ids=handoff_ids)
        with contextlib.suppress(BatonError), self.calling():
            await self.decode.Cancel(request, timeout=CANCEL_TIMEOUT_S)

    def tick(self) -> None:
        """A tick of the router's loop has passed; see `LivenessConfig`."""
        for stream in self._streams:
            stream.tick()
        lost_ticks, answers = self._liveness.lost_ticks, any(s.alive for s in self._streams)
        if self._silent_ticks >= lost_ticks // 2:
            self._touched.add(self._name)
        if self._silent_ticks >= lost_ticks:
            why = self._no_heartbeat
            for stream in self._streams:  # when it wakes, it must find them broken
                stream.cut(why)
            if answers:
                log.warning("worker %s is lost for now: %s", self._name, why)
                self._on_change()
        elif self._silent_ticks == lost_ticks // 2 and answers:
            self._on_change()
        for stream in self._streams:
            if not stream.alive and stream.state == SILENT:
                # Also those who subscribed a moment too late.
                self._fail_all(f"worker {self._name} is lost: {stream.why}")
        self._ticks += 1
        if self._ticks % self._liveness.ticks_in(_ORPHANS_ROUND_S) == 0:
            self._cancel_orphans()

    async def stop_following(self, reason: str) -> None:
        """The worker is gone: all subscribers get the error."""
        was_closed, self._closed = self._closed, True
        self._fail_all(reason)
        await asyncio.gather(*(stream.close() for stream in self._streams))
        if not was_closed:
            self._index.leave(self._slot)
            self._quarantined.pop(self._name, None)

    async def close(self, reason: str) -> None:
        """As `stop_following`, and ends the connection."""
        await self.stop_following(reason)
        if self._cancelling is not None:
            self._cancelling.cancel()
            await asyncio.gather(self._cancelling, return_exceptions=True)
        await self._channel.close(None)

    @property
    def _silent_ticks(self) -> int:
        return max((stream.silent_ticks for stream in self._streams), default=0)

    @property
    def _no_heartbeat(self) -> str:
        return f"no heartbeat for {self._silent_ticks * self._liveness.tick_s:.1f} s"

    def _state(self) -> tuple[str, str]:
        """Its state, and the reason when that is not READY."""
        if self._mismatch:
            return MISMATCH, self._mismatch
        if self._draining or self.record.state != common_pb2.WORKER_STATE_READY:
            state = "DRAINING" if self._draining else "STARTING"
            return state, f"the worker is {state.lower()}"
        for stream in self._streams:
            if not stream.alive:
                return stream.state, stream.why
        if self._silent_ticks >= self._liveness.lost_ticks // 2:
            return SILENT, self._no_heartbeat
        if stalled := self._liveness.why_stalled(self.load):
            return STALLED, stalled
        return READY, ""

    async def _watch_load(self, stream: HeartbeatStream) -> None:
        await self._check_identity(stream)
        self._index.clear(self._slot)
        request = worker_pb2.WatchRequest(heartbeat_ms=self._liveness.heartbeat_ms)
        async for update in self.worker.Watch(request):
            with self._announcing_change():
                stream.opened()
                self.load, self.pairs = update.load, list(update.pairs)
                self._quarantined[self._name] = [
                    (pair.prefill, pair.decode)
                    for pair in update.pairs
                    if pair.state == _QUARANTINED
                ]
                if update.cache.cleared:
                    self._index.clear(self._slot)
                self._index.evict(self._slot, update.cache.evicted)
                self._index.store(self._slot, update.cache.stored)
                self._draining |= update.state == common_pb2.WORKER_STATE_DRAINING
                if stalled := self._liveness.why_stalled(self.load):
                    self._fail_all(f"worker {self._name} is stalled: {stalled}")

    async def _stream_events(self, stream: HeartbeatStream) -> None:
        await self._check_identity(stream)
        request = decode_pb2.StreamEventsRequest(
            router_id=self._router_id,
            stream_id=self.stream_id,
            heartbeat_ms=self._liveness.heartbeat_ms,
        )
        call = self.decode.StreamEvents(request)
        try:
            await call.wait_for_connection()  # the worker knows this router now
            # It has freed what came over an earlier stream.
            self._fail_all("the event stream was opened anew")
            with self._announcing_change():
                stream.opened()
            async for step in call:
                if stream.silent_ticks:
                    with self._announcing_change():
                        stream.heard()
                for event in step.events:
                    self._deliver(event)
        finally:
            call.cancel()

    async def _check_identity(self, stream: HeartbeatStream) -> None:
        """Raises Stale when another process has taken the worker's address."""
        if not stream.answered:
            await _check_listening(self.record.address)
        if tls.current().of_client() is not self._credentials:
            self._connect()
        described = await self.worker.Describe(worker_pb2.DescribeRequest())
        stream.heard()
        if (found := described.record.incarnation) != self._name:
            self._replaced = f"another process, {found}, has taken the place of {self._name}"
            self._fail_all(self._replaced)
            raise Stale(self._replaced)

    @contextlib.contextmanager
    def _announcing_change(self) -> Iterator[None]:
        """Around what may change the state: a heartbeat alone is no change."""
        before = self._state(), self.load, self.pairs
        yield
        if (self._state(), self.load, self.pairs) != before:
            self._touched.add(self._name)
            self._on_change()

    def _deliver(self, event: decode_pb2.SequenceEvent) -> None:
        if deliver := self._subscribers.get(event.handoff_id):
            deliver(event)
        elif not (event.finish_reason or event.abort_reason) and len(self._orphans) < MOST_ORPHANS:
            self._orphans.add(event.handoff_id)

    def _cancel_orphans(self) -> None:
        """One Cancel at a time; those it does not reach are seen again."""
        lasting = sorted(self._orphans_before & self._orphans)[:CANCEL_BATCH]
        self._orphans_before, self._orphans = self._orphans, set()
        if lasting and (self._cancelling is None or self._cancelling.done()):
            self._cancelling = asyncio.create_task(self.cancel(lasting))

    def _watch_lost(self, changed: bool) -> None:
        self._touched.add(self._name)
        if changed:
            self._on_change()

    def _events_lost(self, changed: bool) -> None:
        self._fail_all(f"the event stream of decode worker {self._name} broke")
        self._watch_lost(changed)

    def _fail_all(self, reason: str) -> None:
        for deliver in list(self._subscribers.values()):
            deliver(Unavailable(reason))
        self._subscribers.clear()
        self._touched.add(self._name)


async def _check_listening(address: str) -> None:
    """Raises Unavailable unless a connection can be made.

    gRPC would go on by itself to connect, every second, to an address where no process listens.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            host, port = split_address(address)
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, ValueError) as error:
        raise Unavailable(f"cannot connect to {address}: {error or 'no answer'}") from error
    writer.transport.abort()
