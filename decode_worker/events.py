"""Event streams: one for each router, one message for each engine step.

A stream's id is its router's secret, because a second stream of an id replaces the first; so it is
not logged either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from baton.errors import Unavailable
from baton.v1 import decode_pb2

log = logging.getLogger(__name__)

MAX_BACKLOG = 4096  # messages a router may be behind before its stream is cut
MIN_HEARTBEAT_S = 0.05

Messages = asyncio.Queue[decode_pb2.StreamEventsResponse | None]  # None: the end


class EventStreams:
    """Routers with an open stream. Event-loop thread only."""

    def __init__(self) -> None:
        self._streams: dict[str, tuple[Messages, str]] = {}  # with the router's name, for the log
        self._closed = False

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    def send(self, stream_id: str, events: Iterable[decode_pb2.SequenceEvent]) -> bool:
        """Queues one message; False when the router is too far behind and is cut off now."""
        if stream_id not in self._streams:
            return True
        queue, name = self._streams[stream_id]
        if queue.qsize() < MAX_BACKLOG:
            queue.put_nowait(decode_pb2.StreamEventsResponse(events=events))
            return True
        log.warning("router %s is %d messages behind: cutting it off", name, MAX_BACKLOG)
        while not queue.empty():
            queue.get_nowait()
        self._end(stream_id)
        return False

    def register(self, stream_id: str, router_id: str) -> Messages:
        """Starts queueing events for this router. A second stream replaces the first.

        Raises Unavailable when this worker has closed its streams.
        """
        if self._closed:
            raise Unavailable("the decode worker has drained")
        self._end(stream_id)
        messages: Messages = asyncio.Queue()
        self._streams[stream_id] = messages, router_id
        return messages

    def leave(self, stream_id: str, messages: Messages) -> bool:
        """This stream is over; whether the router is now without one."""
        if stream_id in self._streams and self._streams[stream_id][0] is messages:
            del self._streams[stream_id]
        return stream_id not in self._streams

    def close(self) -> None:
        self._closed = True
        for stream_id in list(self._streams):
            self._end(stream_id)

    def _end(self, stream_id: str) -> None:
        if stream_id in self._streams:
            self._streams.pop(stream_id)[0].put_nowait(None)


async def next_message(
    messages: Messages, heartbeat_s: float
) -> decode_pb2.StreamEventsResponse | None:
    """The next message; an empty one as a heartbeat after `heartbeat_s` without any (0: never)."""
    try:
        async with asyncio.timeout(max(heartbeat_s, MIN_HEARTBEAT_S) if heartbeat_s else None):
            return await messages.get()
    except TimeoutError:
        return decode_pb2.StreamEventsResponse()
