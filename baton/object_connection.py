"""Python objects over sockets: between the processes ("ranks") of one worker.

Objects are pickled, which lets their sender run any code: over a network, each end first proves to
the other that it knows the worker's secret, which etcd holds, and TLS encrypts where processes have
certificates.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import select
import socket
import ssl
import struct
from typing import Any

_LENGTH = struct.Struct(">Q")
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
    """One end. One thread may send while another receives, but for TLS one thread does both."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, value: Any) -> None:
        """Raises OSError."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def recv(self) -> Any:
        """Waits for the other end's next object. Raises EOFError where it has ended, or OSError."""
        (size,) = _LENGTH.unpack(receive(self.socket, _LENGTH.size))
        return pickle.loads(receive(self.socket, size))  # noqa: S301  (the other end is proven)

    def poll(self, timeout_s: float | None) -> bool:
        """Whether an object, or the end, comes in time; None waits for it."""
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        ready = select.poll()
        ready.register(self.socket, select.POLLIN)
        return bool(ready.poll(None if timeout_s is None else timeout_s * 1e3))

    def limit_sending(self, limit_s: float) -> None:
        """`send` raises OSError when the other end takes nothing for so long."""
        timeout = struct.pack("ll", int(limit_s), 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def end_sending(self) -> None:
        """The other end's `poll` and then `recv` tell it the end; until `recv` did, it can still
        send. Any thread may call it."""
        with contextlib.suppress(OSError):  # it has ended by itself
            socket.socket.shutdown(self.socket, socket.SHUT_WR)  # TLS would end both ways

    def close(self) -> None:
        self.socket.close()

    def fileno(self) -> int:
        return self.socket.fileno()


def receive(connected: socket.socket, size: int) -> bytearray:
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
        other = bytes(receive(connected, _NONCE_BYTES))

        def mac(end: bytes, nonces: bytes) -> bytes:
            return hmac.digest(secret, end + nonces, "sha256")

        connected.sendall(mac(ours, nonce + other))
        expected = mac(theirs, other + nonce)
        if not hmac.compare_digest(receive(connected, len(expected)), expected):
            raise ConnectionRefusedError("the other end does not know this worker's secret")
        connected.settimeout(None)
        for option in _KEEPALIVE:
            connected.setsockopt(*option)
    except BaseException:
        connected.close()
        raise
    return ObjectConnection(connected)
