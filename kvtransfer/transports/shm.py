"""The transport between two processes of one host: the receiver's pool, mapped by the sender.

The pool is a memfd, which is given to a process of the same machine and user, and mapped only if it
has the pool's size and is sealed against changes of it. The first write into a page costs many
times as much as a copy of it, so both ends populate the pages before.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from typing import Any

import torch

from baton.shared_memory import MADV_POPULATE_READ, SEALS, SharedMemoryArea, populate
from baton.v1 import common_pb2
from kvtransfer.checksum import Checksum
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.pool import KvPool, Slots, copy_slots
from kvtransfer.shared_pool import ReceiverProcess, SharedPoolListener, received


class ShmTransport(Transport):
    """For a receiver on the same host whose pool is in a `SharedMemoryArea`."""

    name = "shm"
    kind = common_pb2.TRANSPORT_SHM
    one_sided = True

    def listen(self, pool: KvPool) -> ReceivingEnd:
        area = pool.area
        assert isinstance(area, SharedMemoryArea), "the pool is not in shared memory"
        layout = {"touched": area.touched, **pool.layout}
        return SharedPoolListener(self.name, area.fd, layout)

    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> SendingEnd:
        with received(self.name, endpoint, timeout_s) as (layout, fd, receiver):
            end = _ShmSendingEnd(pool, layout, fd, receiver)
        if layout.get("touched"):
            threading.Thread(target=end.map_pages, name="kv-map", daemon=True).start()
        return end


class _ShmSendingEnd(SendingEnd):
    def __init__(
        self, pool: KvPool, layout: dict[str, Any], fd: int, receiver: ReceiverProcess
    ) -> None:
        num_bytes = pool.bytes_at(layout)
        _check_memory(fd, num_bytes)
        self._pool, self._receiver = pool, receiver
        mapped = mmap.mmap(fd, num_bytes)
        area = torch.frombuffer(mapped, dtype=torch.uint8)
        self._map: mmap.mmap | None = mapped
        self._remote: KvPool | None = pool.counterpart(area, layout)
        self._closed = threading.Event()

    def map_pages(self) -> None:
        """Maps the pages that the receiver has in memory, until the link is closed."""
        if (mapped := self._map) is not None:
            with contextlib.suppress(OSError):  # then the first write of a page maps it
                populate(mapped, MADV_POPULATE_READ, self._closed)

    def put(self, local: Slots, remote: Slots, checksum: Checksum, timeout_s: float) -> None:
        self._receiver.check()
        assert self._remote is not None
        copy_slots(self._pool, local, self._remote, remote, checksum)
        self._receiver.check()

    def abort(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        self._receiver.close()
        # Both refer to the mapping, and frames of an exception may refer to this end for long.
        self._remote = self._map = None
        self._closed.set()


def _check_memory(fd: int, nbytes: int) -> None:
    """Raises ValueError unless a file is sealed with that size; OSError if it has no seals."""
    size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if size != nbytes or seals & SEALS != SEALS:
        raise ValueError(f"it has {size} bytes, not {nbytes}, or is not sealed")
