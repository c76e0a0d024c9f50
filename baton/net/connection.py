"""Protobuf messages over one TCP connection, each behind its length: between routers and workers.

A message costs a tenth of the CPU time of one on a gRPC stream, whose way to asyncio leads over a
completion queue and a thread of its own. With TLS where this process has it; a worker then takes
routers alone, as `baton.net.tls` has roles for gRPC's ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from baton import errors
from baton.config import split_address
from baton.errors import BatonError, InternalError, InvalidRequest, RetryableError, Unavailable
from baton.net import tls
from baton.v1 import dispatch_pb2

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20  # of a message from a worker
CLOSE_S = 2.0  # for the last messages
MAX_UNREAD_BYTES = 16 << 20  # that the other end leaves unread
_LENGTH = struct.Struct(">I")
# Kinds of fields, by protobuf's encoding.
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_MAX_SHIFT = 63
_ERRORS = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, BatonError)
}

Received = TypeVar("Received", bound=Message)
Sent = TypeVar("Sent", bound=Message)


class MessageConnection(asyncio.Protocol, ABC, Generic[Received, Sent]):
    """One end of a connection; the other end is a subclass too. Event-loop thread only."""

    transport: asyncio.Transport
    received: type[Received]
    sent: type[Sent]

    max_frame_bytes = MAX_FRAME_BYTES  # of a message that is taken now

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outgoing: Sent | None = None
        self._buffer = bytearray()  # of a frame that has not come as a whole
        # Raises why the connection has ended, once it has.
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.closed.add_done_callback(lambda closed: closed.exception())  # nobody has to ask

    @abstractmethod
    def take(self, message: Received) -> None:
        """Handles a message. A BatonError that it raises ends the connection."""

    def parse(self, frame: bytes) -> Received:
        """A message of its bytes. Raises DecodeError, and BatonError where it is not taken."""
        return self.received.FromString(frame)

    @property
    def num_unfinished(self) -> int:
        """Bytes of a message that has not come as a whole."""
        return len(self._buffer)

    @property
    def busy(self) -> bool:
        """Whether it takes no message now; `data_received` is called when it does again."""
        return False

    @property
    def outgoing(self) -> Sent:
        """The message that leaves at the end of this turn of the loop, to be added to."""
        if self._outgoing is None:
            self._outgoing = self.sent()
            self._loop.call_soon(self.flush)
        return self._outgoing

    def flush(self) -> None:
        """Sends what waits for the end of this turn."""
        message, self._outgoing = self._outgoing, None
        if message is None or self.transport.is_closing():
            return
        self.transport.write(framed(message))
        if (unread := self.transport.get_write_buffer_size()) > MAX_UNREAD_BYTES:
            self.fail(Unavailable(f"{unread >> 20} MiB were left unread"))

    def fail(self, error: BatonError) -> None:
        """Ends the connection at once, for that reason."""
        if not self.closed.done():
            self.closed.set_exception(error)
        self.transport.abort()

    def close(self, *, at_once: bool = False) -> None:
        """Ends the connection behind what is on its way, for which there is a moment."""
        self.flush()
        if at_once:
            self.transport.abort()
        else:
            self.transport.close()
            self._loop.call_later(CLOSE_S, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Sends without delay."""
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Takes all messages that have come as a whole, but none once this end is closing."""
        frames: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            frames = self._buffer
        begin, at = 0, _LENGTH.size
        with self.failing():
            while at <= len(frames) and not (self.busy or self.transport.is_closing()):
                (size,) = _LENGTH.unpack_from(frames, begin)
                if size > self.max_frame_bytes:
                    raise InvalidRequest(f"a message of {size} bytes is too large")
                if at + size > len(frames):
                    break
                message = self.parse(bytes(frames[at : at + size]))
                begin, at = at + size, at + size + _LENGTH.size
                self.take(message)
        if frames is self._buffer:
            del self._buffer[:begin]
        else:
            self._buffer += data[begin:]

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Ends the connection for what is raised inside."""
        try:
            yield
        except DecodeError:
            self.fail(InvalidRequest(f"these bytes are no {self.received.DESCRIPTOR.name}"))
        except BatonError as error:
            self.fail(error)
        except Exception as error:
            log.exception("a message was not handled")
            self.fail(InternalError(f"{type(error).__name__}: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone."""
        if not self.closed.done():
            self.closed.set_exception(Unavailable(str(exc or "the connection was closed")))


def count_fields(message: bytes, most: int) -> int:
    """How many fields a message has, as it was sent, not counting those of its fields; no further
    than `most` and one. A parsed field takes many times the bytes that an empty one has.

    Raises DecodeError where it is no message.
    """
    at, count = 0, 0
    try:
        while at < len(message) and count <= most:
            tag, at = _varint(message, at)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                size, at = _varint(message, at)
                at += size
            elif kind == _VARINT:
                _, at = _varint(message, at)
            else:
                at += _FIXED_BYTES[kind]
            count += 1
    except (IndexError, KeyError):
        raise DecodeError("truncated or unknown field") from None
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > _MAX_SHIFT:
            raise DecodeError("a number is too long")
    return value | byte << shift, at + 1


def framed(message: Message) -> bytes:
    """A message as it is sent."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


async def connect(
    connection: MessageConnection[Any, Any], address: str, role: str, timeout_s: float
) -> None:
    """Connects to a process of that role. Raises Unavailable where that fails or takes too long."""
    host, port = split_address(address)
    credentials = tls.current()
    context = credentials.client_context() if credentials.ca_file else None
    name = f"{role}.{tls.DOMAIN}" if context else None
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: connection, host.strip("[]"), port, ssl=context, server_hostname=name
            )
    except (OSError, ValueError) as error:
        raise Unavailable(f"cannot connect to {address}: {error or 'no answer'}") from error


def failure_of(error: BaseException, handoff_id: str = "") -> dispatch_pb2.Failure:
    """An error as a message; one that is none of the tree is an InternalError, and is logged."""
    if not isinstance(error, BatonError):
        log.exception("unexpected error", exc_info=error)
        error = InternalError(f"unexpected {type(error).__name__}: {error}")
    failure = dispatch_pb2.Failure(
        handoff_id=handoff_id,
        error=type(error).__name__,
        text=str(error).encode(errors="replace").decode(),
    )
    if isinstance(error, RetryableError):
        failure.retry_after_ms = int(error.retry_after_s * 1000)
    if isinstance(error, InvalidRequest):
        failure.field = error.field
    return failure


def error_of(failure: dispatch_pb2.Failure) -> BatonError:
    """The error that a message stands for."""
    cls = _ERRORS.get(failure.error, InternalError)
    if issubclass(cls, RetryableError):
        return cls(failure.text, failure.retry_after_ms / 1000)
    if issubclass(cls, InvalidRequest):
        return cls(failure.text, failure.field)
    return cls(failure.text)
