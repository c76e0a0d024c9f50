"""Passes the receiver's pool to the sender of a one-sided link, as its memory's file descriptor.

It is passed over a Unix socket (SCM_RIGHTS) in /dev/shm, which processes of a machine share, and
containers with `ipc: host`. The two need only have the same user in common: process ids and /proc
are useless in another process namespace, and abstract sockets in another network namespace. For the
same reason each end gives the other a pidfd of itself, which signals its exit in any namespace.

A socket is for one link. Its path and its secret come with the answer to the Offer, over the
control stream. Only the receiver's user can connect, and only with the secret is the memory given.
The file exists while the link opens; a file left by a killed process is removed by the next
listener.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.config import SHARED_FOLDER
from baton.errors import TransferFailed
from kvtransfer.deadline import Deadline
from kvtransfer.interface import ReceivingEnd

_PREFIX = "baton-link-"
_SECRET_BYTES = 32
_HELLO_S = 1.0  # for a connected process to send the secret
_BINDING_S = 10.0  # age at which a file without a listening process is abandoned


class SharedPoolListener(ReceivingEnd):
    """The receiver's end: gives the descriptor `fd` of its pool to the sender.

    `layout`: what the sender needs to use the memory. Raises OSError if no socket can be made.
    """

    def __init__(self, transport: str, fd: int, layout: Mapping[str, Any]) -> None:
        _remove_abandoned()
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        super().__init__(json.dumps({**layout, "secret": self._secret.hex()}).encode())
        self._transport, self._path = transport, _path(self._secret)
        self._sender: int | None = None
        self._aborted = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fd = os.dup(fd)  # stays open if the pool is closed meanwhile
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # the mode of the file that `bind` makes
            self._socket.bind(str(self._path))
            self._socket.listen()
        except BaseException:
            self.close()
            raise

    def accept(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        try:
            while self._sender is None and not self._aborted:
                self._socket.settimeout(deadline.left_s())
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(deadline.left_s(_HELLO_S))
                    self._give(connection)
        except OSError as error:
            raise TransferFailed(f"{self._transport}: the sender did not come: {error}") from error
        finally:
            self._stop_listening()
        if self._sender is None:
            raise TransferFailed(f"{self._transport}: the link was aborted")

    def sender_pidfd(self) -> int | None:
        return self._sender

    def abort(self) -> None:
        self._aborted = True
        with contextlib.suppress(OSError):  # nothing waits in `accept`
            _connect(self._path, 0.0).close()

    def close(self) -> None:
        self._stop_listening()
        if self._sender is not None:
            os.close(self._sender)
            self._sender = None

    def _give(self, connection: socket.socket) -> None:
        """Gives the memory to a process of this user that has the secret."""
        fds = list[int]()
        with contextlib.suppress(OSError):  # the process has disconnected
            secret, fds = _receive(connection, _SECRET_BYTES + 1, 1)
            if fds and _is_ours(connection) and hmac.compare_digest(secret, self._secret):
                with _own_pidfd() as pidfd:
                    socket.send_fds(connection, [b"\0"], [self._fd, pidfd])
                self._sender = fds.pop()
        for fd in fds:
            os.close(fd)

    def _stop_listening(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ReceiverProcess:
    """The process whose memory a one-sided link writes into, checked before and after every put.

    Mapped memory outlives its owner, so without these checks bytes could be lost unnoticed. It owns
    `pidfd`.
    """

    def __init__(self, transport: str, pidfd: int) -> None:
        self._transport, self._pidfd = transport, pidfd
        self._aborted = False
        self._exited = select.poll()
        self._exited.register(self._pidfd, select.POLLIN)

    def check(self) -> None:
        """Raises TransferFailed if the link was aborted or closed, or the process has ended."""
        if self._aborted:
            raise TransferFailed(f"{self._transport}: the link was aborted")
        if self._exited.poll(0):
            raise TransferFailed(f"{self._transport}: the receiver is gone")

    def abort(self) -> None:
        """Makes every later check fail."""
        self._aborted = True

    def close(self) -> None:
        """Aborts the link and closes the descriptor; may be called twice."""
        self._aborted, pidfd, self._pidfd = True, self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


@contextlib.contextmanager
def received(
    transport: str, endpoint: bytes, timeout_s: float
) -> Iterator[tuple[dict[str, Any], int, ReceiverProcess]]:
    """The sender's end: the pool's layout, a descriptor of its memory, and the receiver's process.

    The descriptor is closed on exit; the process must be closed by the object made from it. Errors
    within, and a receiver that does not answer in time, are raised as TransferFailed.
    """
    try:
        layout = dict(json.loads(endpoint))
        fd, pidfd = _ask(bytes.fromhex(layout["secret"]), Deadline(timeout_s))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TransferFailed(f"{transport}: no such receiver: {error}") from error
    process = ReceiverProcess(transport, pidfd)
    try:
        yield layout, fd, process
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        process.close()
        where = f" on {layout['gpu']}" if layout.get("gpu") else ""
        raise TransferFailed(
            f"{transport}: cannot open the receiver's memory{where}: {error}"
        ) from error
    finally:
        os.close(fd)


def _ask(secret: bytes, deadline: Deadline) -> tuple[int, int]:
    """Descriptors of the memory and of the process of the receiver with this secret."""
    with _connect(_path(secret), deadline.left_s()) as connection:
        if not _is_ours(connection):
            raise PermissionError("it belongs to another user")
        with _own_pidfd() as pidfd:
            socket.send_fds(connection, [secret], [pidfd])
        connection.settimeout(deadline.left_s())
        _, fds = _receive(connection, 1, 2)
    if len(fds) != 2:
        for fd in fds:
            os.close(fd)
        raise ConnectionError("it did not give its memory")
    return fds[0], fds[1]


def check_folder() -> None:
    """Raises OSError if no socket can be made in the folder."""
    path = _path(secrets.token_bytes(_SECRET_BYTES))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
        try:
            trial.bind(str(path))
            trial.listen()
            _connect(path, 0.0).close()
        finally:
            path.unlink(missing_ok=True)


def _path(secret: bytes) -> Path:
    """The socket's path, which does not reveal the secret."""
    return SHARED_FOLDER / (_PREFIX + hashlib.sha256(secret).hexdigest()[:32])


def _connect(path: Path, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, max_bytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Receives descriptors that children do not inherit; Python 3.11's `recv_fds` ignores flags."""
    fds = array.array("i")
    room = socket.CMSG_LEN(max_fds * fds.itemsize)
    data, found, _, _ = connection.recvmsg(max_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in found:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    return data, list(fds)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end has this user."""
    size = struct.calcsize("iII")
    _, uid, _ = struct.unpack(
        "iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return bool(uid == os.geteuid())


@contextlib.contextmanager
def _own_pidfd() -> Iterator[int]:
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _remove_abandoned() -> None:
    """Removes the sockets of this user's processes that were killed while a link opened."""
    for path in SHARED_FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _BINDING_S:
                try:
                    _connect(path, 0.0).close()
                except ConnectionRefusedError:  # no process listens
                    path.unlink()
