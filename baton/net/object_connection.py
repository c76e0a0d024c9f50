"""Typed messages over a socket, between the processes of one worker: JSON, and int32 arrays.

A connection carries the dataclasses of one closed table, by name and fields; nothing else can be
sent or arrives, and nothing is unpickled. On one host it is a socketpair. Between hosts each end
first proves to the other that it has the worker's secret, which etcd holds; TLS encrypts where
processes have certificates.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import ssl
import struct
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np

_LENGTHS = struct.Struct(">IQ")  # bytes of the JSON, and of the arrays that follow it
_ARRAY = "int32"  # key of the object that stands for an array in the JSON
_NONCE_BYTES = 32
_PROOF_S = 5.0
# A host that vanishes is noticed after this many seconds, also while nothing is sent.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)
Messages = tuple[type[Any], ...]


class ObjectConnection:
    """One end. With TLS, one thread at a time may use it.

    messages: the dataclasses that may be sent and received. Their fields are what JSON has (tuples
    arrive as lists) and int32 arrays.
    """

    def __init__(self, connected: socket.socket, messages: Messages) -> None:
        self.socket = connected
        self._messages = {one.__name__: one for one in messages}

    def send(self, message: Any) -> None:
        """Raises OSError, TypeError for what is not in the table."""
        self.socket.sendall(self.encode(message))

    def encode(self, message: Any) -> bytes:
        """A message as bytes. Raises TypeError for what is not in the table."""
        name, arrays = type(message).__name__, list[bytes]()
        if self._messages.get(name) is not type(message):
            raise TypeError(f"{name} is no message of this connection")

        def stand_in(item: Any) -> dict[str, Any]:
            if not isinstance(item, np.ndarray) or item.dtype != np.int32:
                raise TypeError(f"{type(item).__name__} cannot be sent to other processes")
            arrays.append(item.tobytes())
            return {_ARRAY: item.shape}

        values = [name, *(getattr(message, field.name) for field in fields(message))]
        text, data = json.dumps(values, default=stand_in).encode(), b"".join(arrays)
        return _LENGTHS.pack(len(text), len(data)) + text + data

    def recv(self) -> Any:
        """Waits for the other end's next message.

        Raises EOFError when the other end has closed, OSError, also for a message that is not in
        the table.
        """
        text_bytes, data_bytes = _LENGTHS.unpack(_receive(self.socket, _LENGTHS.size))
        text, data = _receive(self.socket, text_bytes), _receive(self.socket, data_bytes)
        at = 0

        def array(item: dict[str, Any]) -> Any:
            nonlocal at
            if item.keys() != {_ARRAY}:
                return item
            shape = item[_ARRAY]
            count = int(np.prod(shape))
            at, begin = at + 4 * count, at
            return np.frombuffer(data, np.int32, count, begin).reshape(shape)

        try:
            name, *arguments = json.loads(text, object_hook=array)
            return self._messages[name](*arguments)
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionError(f"not a message of this connection: {error}") from error

    def send_descriptor(self, descriptor: int) -> None:
        """Gives the process at the other end of a socketpair a file descriptor. Raises OSError."""
        socket.send_fds(self.socket, [b"\0"], [descriptor])

    def recv_descriptor(self) -> int:
        """What the other end gave, now this process's own. Raises EOFError, OSError."""
        _, found, _, _ = socket.recv_fds(self.socket, 1, 1)
        if not found:
            raise EOFError("the connection was closed")
        return found[0]

    def limit_sending(self, timeout_s: float) -> None:
        """`send` raises OSError once the other end has read nothing for this time."""
        limit = struct.pack("ll", int(timeout_s), 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def poll(self, timeout_s: float | None) -> bool:
        """Whether a message, or the end, comes in time; None waits for it."""
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        ready = select.poll()
        ready.register(self.socket, select.POLLIN)
        return bool(ready.poll(None if timeout_s is None else timeout_s * 1e3))

    def end_sending(self) -> None:
        """Closes this direction: the other end's `poll` and then `recv` find the end; until then
        it can still send. Any thread may call it."""
        with contextlib.suppress(OSError):  # the other end has closed
            socket.socket.shutdown(self.socket, socket.SHUT_WR)  # TLS would end both ways

    def close(self) -> None:
        self.socket.close()

    def fileno(self) -> int:
        return self.socket.fileno()


def broadcast(connections: Iterable[ObjectConnection], message: Any) -> None:
    """Sends a message, encoded once, over connections of one table. Raises OSError."""
    data: bytes | None = None
    for connection in connections:
        data = data or connection.encode(message)
        connection.socket.sendall(data)


def _receive(connected: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises EOFError, OSError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = connected.recv_into(view)
        if not got:
            raise EOFError("the connection was closed")
        view = view[got:]
    return data


def accepted(
    connected: socket.socket,
    secret: bytes,
    context: ssl.SSLContext | None,
    messages: Messages,
) -> ObjectConnection:
    """The listening end of an accepted socket. Raises OSError, EOFError, with the socket closed."""
    proven = _proven(connected, secret, context, "", b"called", b"caller")
    return ObjectConnection(proven, messages)


def connect(
    host: str,
    port: int,
    secret: bytes,
    context: ssl.SSLContext | None,
    server_name: str,
    messages: Messages,
) -> ObjectConnection:
    """The connecting end. server_name: the name in the listener's certificate.

    Raises OSError, EOFError.
    """
    connected = socket.create_connection((host.strip("[]"), port), _PROOF_S)
    proven = _proven(connected, secret, context, server_name, b"caller", b"called")
    return ObjectConnection(proven, messages)


def _prove_secret(connected: socket.socket, secret: bytes, ours: bytes, theirs: bytes) -> None:
    """Both ends prove the secret by a MAC over fresh random bytes of both.

    ours, theirs: names of the two ends, which differ. Raises OSError, EOFError.
    """
    nonce = os.urandom(_NONCE_BYTES)
    connected.sendall(nonce)
    other = bytes(_receive(connected, _NONCE_BYTES))

    def mac(end: bytes, nonces: bytes) -> bytes:
        return hmac.digest(secret, end + nonces, "sha256")

    connected.sendall(mac(ours, nonce + other))
    expected = mac(theirs, other + nonce)
    if not hmac.compare_digest(_receive(connected, len(expected)), expected):
        raise ConnectionRefusedError("the other end does not have this worker's secret")


def _proven(
    connected: socket.socket, secret: bytes, context: ssl.SSLContext | None,
    server_name: str, ours: bytes, theirs: bytes,
) -> socket.socket:  # fmt: skip
    """A socket over TLS, if there is a context, whose ends have proven the secret."""
    try:
        connected.settimeout(_PROOF_S)
        if context is not None:
            is_caller = bool(server_name)
            connected = context.wrap_socket(
                connected, server_side=not is_caller, server_hostname=server_name or None
            )
        _prove_secret(connected, secret, ours, theirs)
        connected.settimeout(None)
        for option in _KEEPALIVE:
            connected.setsockopt(*option)
    except BaseException:
        connected.close()
        raise
    return connected
