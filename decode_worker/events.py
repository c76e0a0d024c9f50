"""Event streams: one for each router, one message for each engine step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from baton.errors import Unavailable
from baton.v1 import decode_pb2

log = logging.getLogger(__name__)

MAX_BACKLOG = 4096  # messages a router may be behind before its stream is cut
LEAST_SILENCE_S = 0.05  # signs of life do not come faster than that

Messages = asyncio.Queue[decode_pb2.StreamEventsResponse | None]  # None: the end


class EventStreams:
    """Routers that listen now. Event-loop thread only."""

    def __init__(self) -> None:
        self._queues: dict[str, Messages] = {}
        self._closed = False

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._queues

    def send(self, router_id: str, events: Iterable[decode_pb2.SequenceEvent]) -> bool:
        """Queues one message; False when the router did not read and is cut off here and now."""
        queue = self._queues.get(router_id)
        if queue is None:
            return True
        if queue.qsize() < MAX_BACKLOG:
            queue.put_nowait(decode_pb2.StreamEventsResponse(events=events))
            return True
        log.warning("router %s is %d messages behind: cutting it off", router_id, MAX_BACKLOG)
        while not queue.empty():
            queue.get_nowait()
        self._end(router_id)
        return False

    def register(self, router_id: str) -> Messages:
        """From now on events for this router are kept. A second stream replaces the first.

        Raises Unavailable when this worker has closed its streams.
        """
        if self._closed:
            raise Unavailable("the decode worker has drained")
        self._end(router_id)
        return self._queues.setdefault(router_id, asyncio.Queue())

    def leave(self, router_id: str, messages: Messages) -> bool:
        """This stream is over; whether the router is now without one."""
        if self._queues.get(router_id) is messages:
            del self._queues[router_id]
        return router_id not in self._queues

    def close(self) -> None:
        """Ends every stream after what is queued."""
        self._closed = True
        for router_id in list(self._queues):
            self._end(router_id)

    def _end(self, router_id: str) -> None:
        if queue := self._queues.pop(router_id, None):
            queue.put_nowait(None)


async def next_message(
    messages: Messages, silence_s: float
) -> decode_pb2.StreamEventsResponse | None:
    """What comes next; an empty message when nothing does for `silence_s` (0: that never comes)."""
    try:
        async with asyncio.timeout(max(silence_s, LEAST_SILENCE_S) if silence_s else None):
            return await messages.get()
    except TimeoutError:
        return decode_pb2.StreamEventsResponse()
