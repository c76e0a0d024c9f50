"""Event streams: one for each router, one message for each engine step.

A stream goes by an id that its router keeps to itself, for a second stream of an id replaces the
first; so it is not logged either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from baton.errors import Unavailable
from baton.v1 import decode_pb2

log = logging.getLogger(__name__)

MAX_BACKLOG = 4096  # messages a router may be behind before its stream is cut
LEAST_SILENCE_S = 0.05  # heartbeats do not come faster than that

Messages = asyncio.Queue[decode_pb2.StreamEventsResponse | None]  # None: the end


class EventStreams:
    """Routers that listen now. Event-loop thread only."""

    def __init__(self) -> None:
        self._queues: dict[str, Messages] = {}
        self._routers: dict[str, str] = {}  # whose they are, for the log
        self._closed = False

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._queues

    def send(self, stream_id: str, events: Iterable[decode_pb2.SequenceEvent]) -> bool:
        """Queues one message; False when the router did not read and is cut off here and now."""
        queue = self._queues.get(stream_id)
        if queue is None:
            return True
        if queue.qsize() < MAX_BACKLOG:
            queue.put_nowait(decode_pb2.StreamEventsResponse(events=events))
            return True
        name = self._routers.get(stream_id)
        log.warning("router %s is %d messages behind: cutting it off", name, MAX_BACKLOG)
        while not queue.empty():
            queue.get_nowait()
        self._end(stream_id)
        return False

    def register(self, stream_id: str, router_id: str) -> Messages:
        """From now on events for this router are kept. A second stream replaces the first.

        Raises Unavailable when this worker has closed its streams.
        """
        if self._closed:
            raise Unavailable("the decode worker has drained")
        self._end(stream_id)
        self._routers[stream_id] = router_id
        return self._queues.setdefault(stream_id, asyncio.Queue())

    def leave(self, stream_id: str, messages: Messages) -> bool:
        """This stream is over; whether the router is now without one."""
        if self._queues.get(stream_id) is messages:
            del self._queues[stream_id], self._routers[stream_id]
        return stream_id not in self._queues

    def close(self) -> None:
        """Ends every stream after what is queued."""
        self._closed = True
        for stream_id in list(self._queues):
            self._end(stream_id)

    def _end(self, stream_id: str) -> None:
        if queue := self._queues.pop(stream_id, None):
            del self._routers[stream_id]
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
