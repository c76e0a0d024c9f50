"""One worker as the router follows it: its channel, its load, and for decode its event stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator

import grpc

from baton import rpc
from baton.errors import BatonError, Unavailable
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.cached import CachedPrefixes
from router.snapshot import READY, Assigned, WorkerView

log = logging.getLogger(__name__)

Event = decode_pb2.SequenceEvent | BatonError
_RECONNECT_S = (0.1, 2.0)
_STATES = {
    common_pb2.WORKER_STATE_READY: READY,
    common_pb2.WORKER_STATE_DRAINING: "DRAINING",
    common_pb2.WORKER_STATE_STARTING: "STARTING",
}


class Member:
    """Follows one incarnation of a worker until `close`."""

    def __init__(
        self,
        record: common_pb2.WorkerRecord,
        router_id: str,
        mismatch: str,
        on_change: Callable[[], None],
    ) -> None:
        self.record = record
        self.load = worker_pb2.Load(blocks_total=record.blocks_total)
        self.pairs: list[worker_pb2.PairStatus] = []
        self.assigned: dict[str, Assigned] = {}  # by handoff id
        self.cached = CachedPrefixes()
        self._router_id = router_id
        self._mismatch = mismatch
        self._on_change = on_change
        self._draining = False
        self._closed = False
        self._watching = False
        self._streaming = record.role != common_pb2.WORKER_ROLE_DECODE
        self._why_down = "not connected yet"
        self._subscribers: dict[str, Callable[[Event], None]] = {}
        self._channel = rpc.channel(record.address)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self.update(record)
        self._tasks = self._follow() if not mismatch else []

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

        A prefill worker has no events but the error that says that it has left.
        """
        self._subscribers[handoff_id] = deliver

    def unsubscribe(self, handoff_id: str) -> None:
        """Nobody waits for this sequence any more."""
        self._subscribers.pop(handoff_id, None)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around calls to the worker: they raise BatonError, also when `close` ends them."""
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

    async def close(self, reason: str) -> None:
        """The worker is gone: whoever waits for it is told."""
        self._closed = True
        self._fail_all(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def _state(self) -> tuple[str, str]:
        if self._mismatch:
            return "MISMATCH", self._mismatch
        state = "DRAINING" if self._draining else _STATES.get(self.record.state, "STARTING")
        if state == READY and not (self._watching and self._streaming):
            return "UNREACHABLE", self._why_down
        return state, "" if state == READY else f"the worker is {state.lower()}"

    def _follow(self) -> list[asyncio.Task[None]]:
        tasks = [self._keep(self._watch_load, self._load_lost)]
        if self.record.role == common_pb2.WORKER_ROLE_DECODE:
            tasks.append(self._keep(self._stream_events, self._events_lost))
        return tasks

    def _keep(
        self, follow: Callable[[], Awaitable[None]], lost: Callable[[str], None]
    ) -> asyncio.Task[None]:
        """A task that runs `follow` again, after a pause with jitter, whenever its call ends."""

        async def loop() -> None:
            shortest_s, longest_s = _RECONNECT_S
            pause_s = shortest_s
            while True:
                began = time.monotonic()
                try:
                    await follow()
                    lost("the worker closed the stream")
                except grpc.RpcError as error:
                    lost(str(rpc.error_of(error)))
                self._on_change()
                if time.monotonic() - began > longest_s:  # it had worked
                    pause_s = shortest_s
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                pause_s = min(pause_s * 2, longest_s)

        return asyncio.create_task(loop(), name=f"follow {self.record.incarnation}")

    async def _watch_load(self) -> None:
        async for news in self.worker.Watch(worker_pb2.WatchRequest()):
            self.load = news.load
            self.pairs = list(news.pairs)
            self.cached.take(news.cache)
            self._note_state(news.state)
            self._watching = True
            self._on_change()

    async def _stream_events(self) -> None:
        request = decode_pb2.StreamEventsRequest(router_id=self._router_id)
        call = self.decode.StreamEvents(request)
        await call.wait_for_connection()  # the worker knows this router now
        self._streaming = True
        self._on_change()
        async for step in call:
            for event in step.events:
                if deliver := self._subscribers.get(event.handoff_id):
                    deliver(event)

    def _note_state(self, state: common_pb2.WorkerState) -> None:
        """Registry and worker both tell; no worker comes back from DRAINING."""
        self._draining |= state == common_pb2.WORKER_STATE_DRAINING

    def _load_lost(self, reason: str) -> None:
        self._watching = False
        self._why_down = reason

    def _events_lost(self, reason: str) -> None:
        self._streaming = False
        self._why_down = reason
        self._fail_all(f"the event stream of decode worker {self.record.incarnation} broke")

    def _fail_all(self, reason: str) -> None:
        for deliver in list(self._subscribers.values()):
            deliver(Unavailable(reason))
        self._subscribers.clear()


async def cancel_on(member: Member, handoff_id: str, timeout_s: float) -> None:
    """Frees a sequence's blocks on a decode worker, or leaves that to its lease."""
    request = decode_pb2.CancelRequest(handoff_ids=[handoff_id])
    # The reservation's lease is the backstop.
    with contextlib.suppress(BatonError), member.calling():
        await member.decode.Cancel(request, timeout=timeout_s)
