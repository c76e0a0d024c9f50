"""What the processes of one router share: their status, and what is in use of tenants' limits.

It is a memfd that their parent makes and that they open through /proc: no file system has it, so
nothing is left of it however they end. What two may write is read and written under a lock on its
bytes (`fcntl`), which the kernel releases when its holder dies. A process that is stopped within
one, some microseconds, delays the others by LOCK_S once in STUCK_S; they go on without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

from google.protobuf.message import DecodeError

from baton.errors import ConfigError
from baton.v1 import fleet_pb2

LOCK_S, STUCK_S = 0.02, 2.0
_PAUSE_S = 50e-6
_ROW = 1 << 20  # bytes for a process's status, by length; pages that are not used cost nothing
_LENGTH = 4
MAX_TENANTS = 4096
_DIGEST = 16  # of a tenant's name: zeros where a slot was never used
_BUCKETS, _DOUBLE = 4, 8


class Usage:
    """What is in use of one tenant's limits; read and written under `lock`.

    `requests` and `tokens` are states of `router.admission.tenants.TokenBucket`.
    """

    def __init__(
        self,
        values: memoryview[float] | None = None,
        process: int = 0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Without arguments it is this process's alone; zeros say that nothing is in use."""
        if values is None:
            values = memoryview(bytearray((_BUCKETS + 1) * _DOUBLE)).cast("d")
        self.requests, self.tokens = values[0:2], values[2:_BUCKETS]
        self._running, self._process = values[_BUCKETS:], process  # of each process
        self.lock = lock or contextlib.nullcontext()

    @property
    def running(self) -> int:
        """Requests that run, in all processes."""
        return int(sum(self._running))

    @property
    def running_here(self) -> int:
        """Those in this process."""
        return int(self._running[self._process])

    def add_running(self, count: int) -> None:
        """So many more run in this process, or fewer."""
        self._running[self._process] += count


class SharedState:
    """The memory that the processes of one router share, as one of them or their parent has it."""

    def __init__(self, path: str | Path, processes: int, process: int = 0) -> None:
        """Of that many processes this is number `process`, from 0. Raises OSError.

        `path` is that of the parent's, or empty in the parent. Twice as many have room: each beside
        its successor.
        """
        self._process, self._half = process, processes
        self._processes = processes = 2 * processes
        # A tenant's buckets; of each process, what runs there, and 1 where it knows the tenant.
        self._slot = _DIGEST + (_BUCKETS + 2 * processes) * _DOUBLE
        self._tenants = processes * _ROW  # where they begin
        size = self._tenants + MAX_TENANTS * self._slot
        if path:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._fd = os.memfd_create("baton-router", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        self._patience = _Patience()

    @property
    def path(self) -> str:
        """Where processes of the same user find it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def usage(self, tenant: str) -> Usage:
        """What is in use of a tenant's limits, until `release`. Raises ConfigError for one too
        many."""
        digest = _digest(tenant)
        with self._table_lock:
            if (start := self._find(digest)) is None:
                text = f"processes of one router share limits of {MAX_TENANTS} tenants at most"
                raise ConfigError(text)
            if self._memory[start : start + _DIGEST] != digest:
                self._memory[start : start + self._slot] = digest + bytes(self._slot - _DIGEST)
            values = self._values(start)
            values[_BUCKETS + self._processes + self._process] = 1.0
            counts = values[: _BUCKETS + self._processes]
            return Usage(counts, self._process, self._lock(start, self._slot))

    def release(self, tenant: str) -> None:
        """This process does not know a tenant any more; nothing of it may run here."""
        with self._table_lock:
            if (start := self._find(_digest(tenant))) is not None:
                self._values(start)[_BUCKETS + self._processes + self._process] = 0.0

    def _find(self, digest: bytes) -> int | None:
        """Where the slot of a tenant begins, or one that it may have: where all were used, that of
        a tenant that no process knows any more."""
        first = int.from_bytes(digest[:4], "little")
        starts = range(self._tenants, self._tenants + MAX_TENANTS * self._slot, self._slot)
        first %= MAX_TENANTS
        for start in chain(starts[first:], starts[:first]):
            if self._memory[start : start + _DIGEST] in (digest, bytes(_DIGEST)):
                return start
        known = _BUCKETS + self._processes
        return next((one for one in starts if not any(self._values(one)[known:])), None)

    def _values(self, start: int) -> memoryview[float]:
        return memoryview(self._memory)[start + _DIGEST : start + self._slot].cast("d")

    @property
    def _table_lock(self) -> _Lock:
        return self._lock(self._tenants, MAX_TENANTS * self._slot)

    def _lock(self, start: int, length: int) -> _Lock:
        return _Lock(self._fd, start, length, self._patience)

    def publish(self, status: fleet_pb2.GetStatusResponse) -> None:
        """Shows this process's status to the others."""
        text = status.SerializeToString()
        self._write(self._process, text if len(text) <= _ROW - _LENGTH else b"")

    def status(self, process: int) -> fleet_pb2.GetStatusResponse | None:
        """What a process showed last; None before its first, after its end, and where it was
        stopped while it wrote."""
        start = process * _ROW
        with self._lock(start, _ROW):
            length = int.from_bytes(self._memory[start : start + _LENGTH], "little")
            text = self._memory[start + _LENGTH : start + _LENGTH + length]
        with contextlib.suppress(DecodeError):
            return fleet_pb2.GetStatusResponse.FromString(text) if text else None
        return None

    def siblings(self) -> list[fleet_pb2.RouterStatus]:
        """The other processes, as they showed themselves last."""
        others = (n for n in range(self._processes) if n != self._process)
        return [status.router for n in others if (status := self.status(n))]

    def successor(self, process: int) -> int:
        """The number of what takes a process's place, while both run."""
        return (process + self._half) % self._processes

    def forget(self, process: int) -> None:
        """For the parent: a process has ended, and its requests with it."""
        self._write(process, b"")
        with self._table_lock:
            for number in range(MAX_TENANTS):
                values = self._values(self._tenants + number * self._slot)
                values[_BUCKETS + process] = values[_BUCKETS + self._processes + process] = 0.0

    def close(self) -> None:
        """For the parent, which uses no limits."""
        self._memory.close()
        os.close(self._fd)

    def _write(self, process: int, text: bytes) -> None:
        start = process * _ROW
        with self._lock(start, _ROW):
            data = len(text).to_bytes(_LENGTH, "little") + text
            self._memory[start : start + len(data)] = data


def _digest(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()[:_DIGEST]


@dataclass
class _Patience:
    """Until when nobody waits for a lock, as its holder was found to be stopped."""

    none_until: float = 0.0  # time.monotonic()


class _Lock:
    """A lock on bytes of a file, against other processes."""

    def __init__(self, fd: int, start: int, length: int, patience: _Patience) -> None:
        self._fd, self._start, self._length = fd, start, length
        self._patience = patience  # of all locks: one on all slots stands in the way of each

    def __enter__(self) -> Self:
        deadline = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self._length, self._start)
                return self
            except BlockingIOError:
                now = time.monotonic()
                deadline = deadline or now + LOCK_S
                if now < self._patience.none_until:
                    return self
                if now >= deadline:
                    self._patience.none_until = now + STUCK_S
                    return self
                time.sleep(_PAUSE_S)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, self._length, self._start)
