"""Shared memory of processes on one host, in a memfd: a KV pool, or exchanges between ranks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading

import torch

# From <linux/mman.h>, since Linux 5.14; Python has no names for them.
MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOUCHED_AT_ONCE = 4 << 20  # bytes; the GIL is held meanwhile


class SharedMemoryArea:
    """Memory that other processes can map by `fd`. Raises OSError if memory is short.

    tensor: all of it, uint8, zero at first · touched: whether every page is allocated."""

    on_gpu = False

    def __init__(self, nbytes: int, use: str = "kv") -> None:
        self.name = f"baton-{use}-{secrets.token_hex(16)}"
        self.nbytes = nbytes
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.touched = False

    def touch(self) -> None:
        """Allocates every page now, and not on first access. Raises OSError."""
        self.touched = populate(self._map, _MADV_POPULATE_WRITE, threading.Event())

    def close(self) -> None:
        """Closes the descriptor; the memory is freed with its last mapping and tensor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def populate(area: mmap.mmap, advice: int, stop: threading.Event) -> bool:
    """Maps every page of `area` until `stop` is set; False if stopped or not supported."""
    for start in range(0, len(area), _TOUCHED_AT_ONCE):
        if stop.is_set():
            return False
        try:
            area.madvise(advice, start, min(_TOUCHED_AT_ONCE, len(area) - start))
        except OSError as error:
            if error.errno == errno.EINVAL:  # Linux before 5.14
                return False
            raise
    return True
