"""Event streams: one for each router, one message for each engine step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable

from baton.errors import Unavailable
from baton.v1 import decode_pb2

log = logging.getLogger(__name__)

MAX_BACKLOG = 4096  # messages a router may be behind before its stream is cut


class EventStreams:
    """Routers that listen now. Event-loop thread only."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[decode_pb2.StreamEventsResponse | None]] = {}

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._queues

    def send(self, router_id: str, events: Iterable[decode_pb2.SequenceEvent]) -> None:
        """Queues one message; a router that does not read is cut off."""
        queue = self._queues.get(router_id)
        if queue is None:
            return
        if queue.qsize() >= MAX_BACKLOG:
            log.warning("router %s is %d messages behind: cutting it off", router_id, MAX_BACKLOG)
            self._end(router_id)
            return
        queue.put_nowait(decode_pb2.StreamEventsResponse(events=events))

    def register(self, router_id: str) -> None:
        """From now on events for this router are kept. A second stream replaces the first."""
        self._end(router_id)
        self._queues[router_id] = asyncio.Queue()

    async def listen(self, router_id: str) -> AsyncGenerator[decode_pb2.StreamEventsResponse, None]:
        """A registered router's messages. Raises Unavailable when it is cut off or replaced."""
        queue = self._queues[router_id]
        try:
            while (message := await queue.get()) is not None:
                yield message
            raise Unavailable("the event stream was closed by the decode worker")
        finally:
            if self._queues.get(router_id) is queue:
                del self._queues[router_id]

    def close(self) -> None:
        """Ends every stream after what is queued."""
        for router_id in list(self._queues):
            self._end(router_id)

    def _end(self, router_id: str) -> None:
        if queue := self._queues.pop(router_id, None):
            queue.put_nowait(None)
