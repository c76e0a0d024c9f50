"""Abort messages on their way to decode workers: repeated until each one was answered.

Until a decode worker has heard that its writer is done, it must keep the blocks from everybody.
So a lost Abort is more than a lost courtesy; but whoever gives a handoff up need not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from baton import rpc
from baton.errors import BatonError, Cancelled, DeadlineExceeded, Unavailable
from baton.log_format import about
from baton.registry.backoff import Backoff
from baton.v1 import handoff_pb2, handoff_pb2_grpc

log = logging.getLogger(__name__)

_UNHEARD = (Unavailable, DeadlineExceeded, Cancelled)  # anything else is an answer
_MOST = 4096  # messages at a time; each waits for a peer that is silent, or has just failed
_CLOSE_S = 1.0

Metadata = tuple[tuple[str, str], ...]


@dataclass
class _Channel:
    """One peer's channel, kept while a message to it is on its way."""

    channel: grpc.aio.Channel
    users: int = 0


class Aborts:
    """Tells decode workers, in the background, that nothing more is written.

    Each message is repeated, at most `most_s` apart, until it is answered or `patience_s` are over.
    Then only the end of this process frees the blocks: by then the peer has almost surely ended.
    """

    def __init__(
        self,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        patience_s: float = 600.0,
        call_s: float = 2.0,
        most_s: float = 5.0,
    ) -> None:
        self._credentials = credentials
        self._patience_s, self._call_s, self._most_s = patience_s, call_s, most_s
        self._channels: dict[str, _Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self, address: str, request: handoff_pb2.AbortRequest, metadata: Metadata
    ) -> asyncio.Future[None]:
        """Begins to tell; the future is done after the first try, whatever came of it."""
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        patience_s = self._patience_s if len(self._tasks) < _MOST else self._call_s
        task = asyncio.create_task(self._tell(address, request, metadata, patience_s, tried))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return tried

    async def close(self) -> None:
        """A last moment to be heard, then the end. What is sent later is tried for `call_s`."""
        self._patience_s = self._call_s
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(
        self,
        address: str,
        request: handoff_pb2.AbortRequest,
        metadata: Metadata,
        patience_s: float,
        tried: asyncio.Future[None],
    ) -> None:
        backoff = Backoff(first_s=0.1, most_s=self._most_s)
        try:
            async with asyncio.timeout(patience_s), self._stub(address) as stub:
                while not await self._heard(stub, request, metadata):
                    _end(tried)
                    await backoff.wait()
        except TimeoutError:
            log.error(
                "abort of handoff %s was never heard by %s",
                request.handoff_id,
                address,
                extra=about(handoff_id=request.handoff_id),
            )
        finally:
            _end(tried)

    async def _heard(
        self,
        stub: handoff_pb2_grpc.HandoffServiceStub,
        request: handoff_pb2.AbortRequest,
        metadata: Metadata,
    ) -> bool:
        """One try; whether the peer answered, be it that the handoff is long gone."""
        try:
            with rpc.translated():
                await stub.Abort(request, timeout=self._call_s, metadata=metadata)
        except _UNHEARD as error:
            log.warning(
                "abort of handoff %s was not heard yet: %s",
                request.handoff_id,
                error,
                extra=about(handoff_id=request.handoff_id),
            )
            return False
        except BatonError as error:
            log.info(
                "abort of handoff %s: %s",
                request.handoff_id,
                error,
                extra=about(handoff_id=request.handoff_id),
            )
        return True

    @contextlib.asynccontextmanager
    async def _stub(self, address: str) -> AsyncIterator[handoff_pb2_grpc.HandoffServiceStub]:
        held = self._channels.get(address)
        if held is None:
            held = self._channels[address] = _Channel(rpc.channel(address, self._credentials))
        held.users += 1
        try:
            yield handoff_pb2_grpc.HandoffServiceStub(held.channel)
        finally:
            held.users -= 1
            if held.users == 0:
                del self._channels[address]
                await held.channel.close(None)


def _end(tried: asyncio.Future[None]) -> None:
    if not tried.done():
        tried.set_result(None)
