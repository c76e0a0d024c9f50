"""The transport between two processes of one host: the receiver's pool, mapped by the sender.

The pool lies in a memfd, which a process of the same user and pid namespace opens through /proc.
Only that memfd is written to: one of the process that the registry names, with its secret name, of
the pool's size, and sealed, so that it keeps its size. A first write into a page costs many times
what copying it does, so both ends map theirs before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import torch

from baton.errors import TransferFailed
from baton.shared_memory import MADV_POPULATE_READ, SEALS, SharedMemoryArea, populate
from baton.v1 import common_pb2
from kvtransfer.digest import Digest
from kvtransfer.interface import Link, Listener, ReceiverProcess, Transport
from kvtransfer.pool import KvPool, Slots, copy_slots


class ShmTransport(Transport):
    """Needs a receiver whose pool lies in a `SharedMemoryArea`, on the same host."""

    name = "shm"
    kind = common_pb2.TRANSPORT_SHM
    one_sided = True

    def listen(self, pool: KvPool) -> Listener:
        area = pool.area
        assert isinstance(area, SharedMemoryArea), "the pool does not lie in shared memory"
        place = {"fd": area.fd, "name": area.name, "touched": area.touched}
        return Listener(json.dumps({**place, **pool.place}).encode())

    def connect(self, pool: KvPool, endpoint: bytes, pid: int, timeout_s: float) -> Link:
        try:
            place = json.loads(endpoint)
            link = _ShmLink(pool, pid, place)
            if place["touched"]:
                threading.Thread(target=link.map_pages, name="kv-map", daemon=True).start()
            return link
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TransferFailed(f"shm: cannot map the receiver's pool: {error}") from error


class _ShmLink(Link):
    def __init__(self, pool: KvPool, pid: int, place: dict[str, Any]) -> None:
        path, name = Path(f"/proc/{pid}/fd/{int(place['fd'])}"), place["name"]
        num_bytes = pool.bytes_at(place)
        _check_name(path, name)  # opening something else may have effects of its own
        self._pool, self._receiver = pool, ReceiverProcess("shm", pid)
        try:
            remote_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _check_name(Path(f"/proc/self/fd/{remote_fd}"), name)
                _check_memory(remote_fd, num_bytes)
                mapped = mmap.mmap(remote_fd, num_bytes)
            finally:
                os.close(remote_fd)
        except BaseException:
            self._receiver.close()
            raise
        area = torch.frombuffer(mapped, dtype=torch.uint8)
        self._map: mmap.mmap | None = mapped
        self._remote: KvPool | None = pool.counterpart(area, place)
        self._closed = threading.Event()

    def map_pages(self) -> None:
        """Maps what the receiver has in memory, until the link is closed."""
        if (mapped := self._map) is not None:
            with contextlib.suppress(OSError):  # then pages are mapped when they are written
                populate(mapped, MADV_POPULATE_READ, self._closed)

    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> None:
        self._receiver.check()
        assert self._remote is not None
        copy_slots(self._pool, local, self._remote, remote, digest)
        self._receiver.check()

    def abort(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        self._receiver.close()
        # Both hold the mapping, and an exception's frames may hold the link for long.
        self._remote = self._map = None
        self._closed.set()


def _check_name(path: Path, name: str) -> None:
    """Raises ValueError unless an open file is the memfd of that name: a pid can be reused."""
    if str(path.readlink()) != f"/memfd:{name} (deleted)":
        raise ValueError(f"{path} is not {name}")


def _check_memory(fd: int, nbytes: int) -> None:
    """Raises ValueError unless a file has that size for good; OSError when it cannot be sealed."""
    size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if size != nbytes or seals & SEALS != SEALS:
        raise ValueError(f"it has {size} bytes, not {nbytes}, or is not sealed")
