"""Values over sockets, between the ranks of one worker on several hosts: JSON, and int32 arrays.

Each end first proves to the other that it knows the worker's secret, which etcd holds; TLS encrypts
where processes have certificates.
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
from typing import Any

import numpy as np

_LENGTHS = struct.Struct(">IQ")  # of the JSON, and of the arrays behind it
_ARRAY = "int32"  # the key of what stands for one in the JSON
_NONCE_BYTES = 32
_PROOF_S = 5.0
# A host that vanishes is noticed after this many seconds, while nothing is sent too.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)


class ObjectConnection:
    """One end. With TLS, one thread at a time may use it.

    Values are what JSON knows (tuples arrive as lists) and int32 arrays.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, value: Any) -> None:
        """Raises OSError."""
        arrays = list[bytes]()

        def stand_in(item: Any) -> dict[str, Any]:
            if not isinstance(item, np.ndarray) or item.dtype != np.int32:
                raise TypeError(f"{type(item).__name__} is not sent to other hosts")
            arrays.append(item.tobytes())
            return {_ARRAY: item.shape}

        text, data = json.dumps(value, default=stand_in).encode(), b"".join(arrays)
        self.socket.sendall(_LENGTHS.pack(len(text), len(data)) + text + data)

    def recv(self) -> Any:
        """Waits for the other end's next value. Raises EOFError where it has ended, or OSError."""
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

        return json.loads(text, object_hook=array)

    def poll(self, timeout_s: float | None) -> bool:
        """Whether a value, or the end, comes in time; None waits for it."""
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        ready = select.poll()
        ready.register(self.socket, select.POLLIN)
        return bool(ready.poll(None if timeout_s is None else timeout_s * 1e3))

    def end_sending(self) -> None:
        """The other end's `poll` and then `recv` tell it the end; until `recv` did, it can still
        send. Any thread may call it."""
        with contextlib.suppress(OSError):  # it has ended by itself
            socket.socket.shutdown(self.socket, socket.SHUT_WR)  # TLS would end both ways

    def close(self) -> None:
        self.socket.close()

    def fileno(self) -> int:
        return self.socket.fileno()


def _receive(connected: socket.socket, size: int) -> bytearray:
    """So many bytes. Raises EOFError, OSError."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = connected.recv_into(view)
        if not got:
            raise EOFError("the connection was closed")
        view = view[got:]
    return data


def accepted(
    connected: socket.socket, secret: bytes, context: ssl.SSLContext | None
) -> ObjectConnection:
    """The end of who was connected to. Raises OSError, EOFError; the socket is closed then."""
    return _proven(connected, secret, context, "", b"called", b"caller")


def connect(
    host: str,
    port: int,
    secret: bytes,
    context: ssl.SSLContext | None = None,
    server_name: str = "",
) -> ObjectConnection:
    """The end of who connects; server_name: whom TLS certifies. Raises OSError, EOFError."""
    connected = socket.create_connection((host.strip("[]"), port), _PROOF_S)
    return _proven(connected, secret, context, server_name, b"caller", b"called")


def _proven(
    connected: socket.socket, secret: bytes, context: ssl.SSLContext | None,
    server_name: str, ours: bytes, theirs: bytes,
) -> ObjectConnection:  # fmt: skip
    """Both ends prove the secret by a MAC over fresh random bytes of both."""
    try:
        connected.settimeout(_PROOF_S)
        if context is not None:
            is_caller = bool(server_name)
            connected = context.wrap_socket(
                connected, server_side=not is_caller, server_hostname=server_name or None
            )
        nonce = os.urandom(_NONCE_BYTES)
        connected.sendall(nonce)
        other = bytes(_receive(connected, _NONCE_BYTES))

        def mac(end: bytes, nonces: bytes) -> bytes:
            return hmac.digest(secret, end + nonces, "sha256")

        connected.sendall(mac(ours, nonce + other))
        expected = mac(theirs, other + nonce)
        if not hmac.compare_digest(_receive(connected, len(expected)), expected):
            raise ConnectionRefusedError("the other end does not know this worker's secret")
        connected.settimeout(None)
        for option in _KEEPALIVE:
            connected.setsockopt(*option)
    except BaseException:
        connected.close()
        raise
    return ObjectConnection(connected)
