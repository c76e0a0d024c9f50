"""One worker as the router follows it: its channel, its load, and for decode its event stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

import grpc

from baton import rpc
from baton.errors import BatonError, InternalError, Unavailable
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from router.snapshot import READY, WorkerView

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
        self.assigned_tokens = 0
        self._router_id = router_id
        self._mismatch = mismatch
        self._on_change = on_change
        self._watching = False
        self._streaming = record.role != common_pb2.WORKER_ROLE_DECODE
        self._why_down = "not connected yet"
        self._subscribers: dict[str, Callable[[Event], None]] = {}
        self._channel = rpc.channel(record.address)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._tasks = self._follow() if not mismatch else []

    @property
    def view(self) -> WorkerView:
        """The worker as it is now."""
        state, reason = self._state()
        return WorkerView(self.record, self.load, state, reason, self.assigned_tokens)

    def update(self, record: common_pb2.WorkerRecord) -> None:
        """The registry has a newer record of the same incarnation."""
        self.record = record

    def subscribe(self, handoff_id: str, deliver: Callable[[Event], None]) -> None:
        """Sends events of a sequence to `deliver`, in order; an error is the last one."""
        self._subscribers[handoff_id] = deliver

    def unsubscribe(self, handoff_id: str) -> None:
        """Nobody waits for this sequence any more."""
        self._subscribers.pop(handoff_id, None)

    async def close(self, reason: str) -> None:
        """The worker is gone: whoever waits for it is told."""
        self._fail_all(reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def _state(self) -> tuple[str, str]:
        if self._mismatch:
            return "MISMATCH", self._mismatch
        state = _STATES.get(self.record.state, "STARTING")
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
            pause_s = _RECONNECT_S[0]
            while True:
                connected = self._watching
                try:
                    await follow()
                    lost("the worker closed the stream")
                except grpc.RpcError as error:
                    lost(str(rpc.error_of(error)))
                self._on_change()
                pause_s = _RECONNECT_S[0] if connected else min(pause_s * 2, _RECONNECT_S[1])
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter

        return asyncio.create_task(loop(), name=f"follow {self.record.incarnation}")

    async def _watch_load(self) -> None:
        async for news in self.worker.Watch(worker_pb2.WatchRequest()):
            self.load = news.load
            self.pairs = list(news.pairs)
            if news.state == common_pb2.WORKER_STATE_DRAINING:
                self.record.state = news.state
            self._watching = True
            self._on_change()

    async def _stream_events(self) -> None:
        request = decode_pb2.StreamEventsRequest(router_id=self._router_id)
        call = self.decode.StreamEvents(request)
        await call.initial_metadata()  # sent once the worker knows this router
        self._streaming = True
        self._on_change()
        async for step in call:
            for event in step.events:
                if deliver := self._subscribers.get(event.handoff_id):
                    deliver(event)

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
    with contextlib.suppress(grpc.RpcError):  # the reservation's lease is the backstop
        await member.decode.Cancel(request, timeout=timeout_s)


def ended(event: decode_pb2.SequenceEvent) -> InternalError | None:
    """The error that an event carries when the worker gave the sequence up."""
    return InternalError(event.abort_reason) if event.abort_reason else None
