"""Abort messages on their way to decode workers: repeated until each one was answered.

Until a decode worker knows that its writer has stopped, it must keep the blocks out of use. So an
Abort must not be lost, but a handoff that is given up need not wait for the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from baton import rpc
from baton.errors import BatonError, Cancelled, DeadlineExceeded, Unavailable
from baton.log_format import about
from baton.registry.backoff import Backoff
from baton.v1 import handoff_pb2, handoff_pb2_grpc

log = logging.getLogger(__name__)

_NO_ANSWER = (Unavailable, DeadlineExceeded, Cancelled)
_MAX_PENDING = 4096  # messages; each waits for a peer that is silent, or has just failed
_CALL_S, _MAX_INTERVAL_S, _CLOSE_S = 2.0, 5.0, 1.0

Metadata = tuple[tuple[str, str], ...]


class Aborts:
    """Reports to decode workers, in the background, that nothing more is written.

    Each message is repeated until it is answered or `give_up_s` have passed. Then only the end of
    this process frees the blocks: by then the peer has almost surely ended.
    """

    def __init__(self, give_up_s: float = 600.0) -> None:
        self._give_up_s = give_up_s
        self._channels: dict[str, tuple[grpc.aio.Channel, int]] = {}  # by address, with its users
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self, address: str, request: handoff_pb2.AbortRequest, metadata: Metadata
    ) -> asyncio.Future[None]:
        """Starts sending; the future is done after the first try, whatever its result."""
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        give_up_s = self._give_up_s if len(self._tasks) < _MAX_PENDING else _CALL_S
        task = asyncio.create_task(self._repeat(address, request, metadata, give_up_s, tried))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return tried

    async def close(self) -> None:
        """Waits shortly for answers, then ends. What is sent later is tried for one call's time."""
        self._give_up_s = _CALL_S
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _repeat(
        self,
        address: str,
        request: handoff_pb2.AbortRequest,
        metadata: Metadata,
        give_up_s: float,
        tried: asyncio.Future[None],
    ) -> None:
        handoff_id, extra = request.handoff_id, about(handoff_id=request.handoff_id)
        backoff = Backoff(first_s=0.1, most_s=_MAX_INTERVAL_S)
        try:
            async with asyncio.timeout(give_up_s), self._stub(address) as stub:
                while True:
                    try:
                        with rpc.translated():
                            await stub.Abort(request, timeout=_CALL_S, metadata=metadata)
                        return
                    except _NO_ANSWER as error:
                        why = "abort of handoff %s is not answered yet: %s"
                        log.warning(why, handoff_id, error, extra=extra)
                    except BatonError as error:  # an answer, even that the handoff is long gone
                        log.info("abort of handoff %s: %s", handoff_id, error, extra=extra)
                        return
                    _set(tried)
                    await backoff.wait()
        except TimeoutError:
            log.error("abort of handoff %s: no answer from %s", handoff_id, address, extra=extra)
        finally:
            _set(tried)

    @contextlib.asynccontextmanager
    async def _stub(self, address: str) -> AsyncIterator[handoff_pb2_grpc.HandoffServiceStub]:
        """One channel for each peer, kept while a message to it is on its way."""
        channel, users = self._channels.get(address) or (rpc.channel(address), 0)
        self._channels[address] = channel, users + 1
        try:
            yield handoff_pb2_grpc.HandoffServiceStub(channel)
        finally:
            channel, users = self._channels.pop(address)
            if users > 1:
                self._channels[address] = channel, users - 1
            else:
                await channel.close(None)


def _set(tried: asyncio.Future[None]) -> None:
    if not tried.done():
        tried.set_result(None)
