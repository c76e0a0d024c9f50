"""One end of a bidirectional gRPC stream that carries batched messages, as raw bytes.

A message costs grpc.aio about 0.05 ms at each end, whatever its size, so everything that is added
within one turn of the event loop leaves as one message, and what is not urgent waits a moment for
more. While gRPC has not taken the last message, later turns are collected, too: messages whose
fields are all repeated merge when their bytes are concatenated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from baton.errors import BatonError, InvalidRequest, Unavailable

MAX_MESSAGE_BYTES = 64 << 20
MAX_UNSENT_BYTES = 16 << 20  # that gRPC does not take because the other end does not read
CLOSE_S = 2.0  # for the last messages
SOON_S = 0.001  # that a message may wait for more to join it
_END = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
_JOINED_BYTES = 32 << 10  # of messages of several turns that leave as one

Received = TypeVar("Received", bound=Message)
Sent = TypeVar("Sent", bound=Message)


class RawStream(Protocol):
    """A call of a client, or a server's context; neither has serialisers."""

    async def read(self) -> Any:
        """Bytes of a message; `grpc.aio.EOF` at the end."""

    async def write(self, message: bytes, /) -> None:
        """Returns when gRPC has taken the message."""


class MessageStream(Generic[Received, Sent]):
    """Sends and receives over one stream. Event-loop thread only."""

    def __init__(self, raw: RawStream, received: type[Received], sent: type[Sent]) -> None:
        self._raw, self._received, self._sent = raw, received, sent
        self._loop = asyncio.get_running_loop()
        self._open: Sent | None = None  # to be added to
        self._due: asyncio.TimerHandle | None = None  # flushes it
        self._at_once = False  # it leaves at the end of this turn
        self._sealed: deque[bytes] = deque()  # of turns before
        self._unsent_bytes = 0  # in `_sealed`
        self._idle: asyncio.Future[None] | None = None  # the writer waits on it
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._closing = self._ended = False

    @property
    def outgoing(self) -> Sent:
        """The message that leaves at the end of this turn of the event loop, to be added to."""
        if self._open is None:
            self._open = self._sent()
        self.flush()
        return self._open

    @property
    def outgoing_soon(self) -> Sent:
        """The message that leaves next, to be added to: after SOON_S if not with something else."""
        if self._open is None:
            self._open = self._sent()
            self._due = self._loop.call_later(SOON_S, self.flush)
        return self._open

    def flush(self) -> None:
        """Sends the open message at the end of this turn of the event loop."""
        if self._open is not None and not self._at_once:
            self._at_once = True
            if not self._wake_writer():
                self._loop.call_soon(self.seal)

    def seal(self) -> None:
        """Completes the open message; later additions start another."""
        if (message := self._taken()) is None or self._ended:
            return
        self._sealed.append(serialized(message))
        self._unsent_bytes += len(self._sealed[-1])
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.fail(Unavailable(f"{self._unsent_bytes >> 20} MiB were left unread"))

    def fail(self, error: BatonError) -> None:
        """Ends the stream at once; `run` raises the error."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def close(self) -> None:
        """Ends the stream after what was added so far."""
        self._closing = True
        self.flush()
        self._wake_writer()

    async def run(self, reading: Coroutine[Any, Any, None]) -> None:
        """Returns when the other end has closed the stream or this end has.

        `reading` iterates over `messages`. Raises what that raises, and why the stream broke.
        """
        tasks = [asyncio.create_task(reading), asyncio.create_task(self._write_all())]
        try:
            waited = {*tasks, self._failed}
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if done == {tasks[0]} and tasks[0].exception() is None:
                self.close()
                rest = {tasks[1], self._failed}
                await asyncio.wait(rest, timeout=CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended = True
            self._taken()
            self._sealed.clear()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            ended = [one for one in (self._failed, *tasks) if one.done() and not one.cancelled()]
            errors = [one.exception() for one in ended]  # of all, as asyncio wants
        for error in filter(None, errors):
            raise error

    async def messages(self) -> AsyncIterator[Received]:
        """All that the other end sends. Raises InvalidRequest for bytes that are no message."""
        while (data := await self._raw.read()) is not _END:
            try:
                message = self.parse(data)
            except DecodeError:
                name = self._received.DESCRIPTOR.name
                raise InvalidRequest(f"these bytes are no {name}") from None
            yield message

    def parse(self, data: bytes) -> Received:
        """Raises DecodeError for what is no message, InvalidRequest for what is not accepted."""
        return self._received.FromString(data)

    def complete(self, message: Sent) -> None:
        """Adds what every message may carry; the message is sent next."""

    async def _write_all(self) -> None:
        while True:
            if not (self._at_once or self._sealed):
                if self._closing:
                    return
                self._idle = self._loop.create_future()
                await self._idle
                continue
            try:
                await self._raw.write(self._next())
            except asyncio.InvalidStateError:  # the call is over; the reader gets the reason
                await asyncio.sleep(CLOSE_S)
                raise Unavailable("the stream has ended") from None

    def _taken(self) -> Sent | None:
        """The open message, which is not added to any more."""
        message, self._open, self._at_once = self._open, None, False
        if self._due is not None:
            self._due.cancel()
            self._due = None
        return message

    def _wake_writer(self) -> bool:
        """Returns whether it was idle."""
        if self._idle is None or self._idle.done():
            return False
        self._idle.set_result(None)
        return True

    def _next(self) -> bytes:
        """The bytes of the next message; all that is unsent where that is not much."""
        size, parts = 0, list[bytes]()
        while self._sealed and (not parts or size + len(self._sealed[0]) <= _JOINED_BYTES):
            parts.append(self._sealed.popleft())
            size += len(parts[-1])
        self._unsent_bytes -= size
        if not self._sealed and size < _JOINED_BYTES:
            message = self._taken() or self._sent()
            self.complete(message)
            parts.append(serialized(message))
        return parts[0] if len(parts) == 1 else b"".join(parts)


def serialized(message: Message) -> bytes:
    """The bytes of a message, or of a part of one."""
    return message.SerializeToString()
