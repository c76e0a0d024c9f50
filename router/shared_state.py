"""State shared by the processes of one router: their status, and the usage of tenants' limits.

It is a memfd that their parent creates and that they open through /proc, so nothing remains of it
however they end. What two processes may write is read and written under a lock on its bytes
(`fcntl`), which the kernel releases when its holder dies. A process that is stopped while it holds
one (for some microseconds) delays the others by LOCK_S once in STUCK_S; they go on without it.
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
_ROW = 1 << 20  # bytes for a process's status; unused pages cost nothing
_LENGTH = 4  # bytes before a status: its length
MAX_TENANTS = 4096
_DIGEST = 16  # bytes of a tenant's digest; zeros in a slot that was never used
_BUCKETS, _DOUBLE = 4, 8


class LimitUsage:
    """The usage of one tenant's limits; read and written under `lock`.

    `requests` and `tokens` are states of `router.admission.rate_limit.TokenBucket`.
    """

    def __init__(
        self,
        values: memoryview[float] | None = None,
        process: int = 0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Without arguments it belongs to this process alone; zeros mean that nothing is used."""
        if values is None:
            values = memoryview(bytearray((_BUCKETS + 1) * _DOUBLE)).cast("d")
        self.requests, self.tokens = values[0:2], values[2:_BUCKETS]
        self._running, self._process = values[_BUCKETS:], process  # of each process
        self.lock = lock or contextlib.nullcontext()

    @property
    def running(self) -> int:
        """Running requests in all processes."""
        return int(sum(self._running))

    @property
    def running_here(self) -> int:
        """Running requests in this process."""
        return int(self._running[self._process])

    def add_running(self, count: int) -> None:
        """Adds to the running requests in this process; `count` may be negative."""
        self._running[self._process] += count


class SharedState:
    """The shared memory of one router's processes, opened by one of them or by their parent."""

    def __init__(self, path: str | Path, processes: int, process: int = 0) -> None:
        """`processes`: their number; `process`: the index of this one. Raises OSError.

        `path`: the parent's `path`; empty in the parent. There is room for twice as many, so that
        each process can run beside its successor.
        """
        self._process, self._half = process, processes
        self._processes = processes = 2 * processes
        # A tenant's buckets, then for each process its running requests, then for each process 1
        # if it uses the tenant.
        self._slot = _DIGEST + (_BUCKETS + 2 * processes) * _DOUBLE
        self._tenants = processes * _ROW  # offset of their slots
        size = self._tenants + MAX_TENANTS * self._slot
        if path:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        else:
            self._fd = os.memfd_create("baton-router", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        self._stuck = _StuckHolder()

    @property
    def path(self) -> str:
        """Path for processes of the same user while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def usage(self, tenant: str) -> LimitUsage:
        """The usage of a tenant's limits, valid until `release`. Raises ConfigError for too many
        tenants."""
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
            return LimitUsage(counts, self._process, self._lock(start, self._slot))

    def release(self, tenant: str) -> None:
        """Ends this process's use of a tenant, which must have no running requests here."""
        with self._table_lock:
            if (start := self._find(_digest(tenant))) is not None:
                self._values(start)[_BUCKETS + self._processes + self._process] = 0.0

    def _find(self, digest: bytes) -> int | None:
        """Offset of a tenant's slot, or of a free one, or of one whose tenant no process uses any
        more; None if there is none."""
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
        return _Lock(self._fd, start, length, self._stuck)

    def publish(self, status: fleet_pb2.GetStatusResponse) -> None:
        """Publishes this process's status to the others."""
        text = status.SerializeToString()
        self._write(self._process, text if len(text) <= _ROW - _LENGTH else b"")

    def status(self, process: int) -> fleet_pb2.GetStatusResponse | None:
        """The last status that a process published; None before the first, after its end, and if
        it was stopped while it wrote."""
        start = process * _ROW
        with self._lock(start, _ROW):
            length = int.from_bytes(self._memory[start : start + _LENGTH], "little")
            text = self._memory[start + _LENGTH : start + _LENGTH + length]
        with contextlib.suppress(DecodeError):
            return fleet_pb2.GetStatusResponse.FromString(text) if text else None
        return None

    def siblings(self) -> list[fleet_pb2.RouterStatus]:
        """The last published status of each other process."""
        others = (n for n in range(self._processes) if n != self._process)
        return [status.router for n in others if (status := self.status(n))]

    def successor(self, process: int) -> int:
        """The index of the process that replaces this one, while both run."""
        return (process + self._half) % self._processes

    def forget(self, process: int) -> None:
        """Clears the state of a process that has ended; called by the parent."""
        self._write(process, b"")
        with self._table_lock:
            for number in range(MAX_TENANTS):
                values = self._values(self._tenants + number * self._slot)
                values[_BUCKETS + process] = values[_BUCKETS + self._processes + process] = 0.0

    def close(self) -> None:
        """Closes the memory; called by the parent, which uses no limits."""
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
class _StuckHolder:
    """The time until which no lock is waited for, because a holder seems to be stopped."""

    skip_until: float = 0.0  # time.monotonic()


class _Lock:
    """A lock on bytes of a file, against other processes."""

    def __init__(self, fd: int, start: int, length: int, stuck: _StuckHolder) -> None:
        self._fd, self._start, self._length = fd, start, length
        self._stuck = stuck  # shared by all locks: one on all slots blocks each of them

    def __enter__(self) -> Self:
        deadline = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self._length, self._start)
                return self
            except BlockingIOError:
                now = time.monotonic()
                deadline = deadline or now + LOCK_S
                if now < self._stuck.skip_until:
                    return self
                if now >= deadline:
                    self._stuck.skip_until = now + STUCK_S
                    return self
                time.sleep(_PAUSE_S)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, self._length, self._start)
