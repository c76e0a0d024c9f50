"""Memory for messages on their way, lent to one transfer at a time and shared by all links."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Staging:
    """Lends pairs of buffers of `pool_device`, at most `max_lent` at a time, and keeps them.

    So that many links cost no more memory than the transfers that run at once. Any thread.
    """

    def __init__(self, max_lent: int = 8) -> None:
        self._max_lent = max_lent
        self._lent = 0
        self._kept: list[torch.Tensor] = []  # uint8 [2, bytes]
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, num_bytes: int, device: torch.device, deadline: float) -> Iterator[torch.Tensor]:
        """Two buffers: uint8 `[2, num_bytes or more]`, until then `time.monotonic()`'s `deadline`.

        After a failure they are not lent again: a message that comes too late might still be
        written into them. Raises RuntimeError when none came back in time.
        """
        with self._changed:
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._lent < self._max_lent, max(left, 0.0)):
                raise RuntimeError("no staging memory became free in time")
            self._lent += 1
            buffers = self._take(num_bytes, device)
        try:
            if buffers is None:
                buffers = torch.empty((2, num_bytes), dtype=torch.uint8, device=device)
            yield buffers
            with self._changed:
                self._kept.append(buffers)
        finally:
            with self._changed:
                self._lent -= 1
                self._changed.notify()

    def _take(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        for n, buffers in enumerate(self._kept):
            if buffers.shape[1] >= num_bytes and buffers.device == device:
                return self._kept.pop(n)
        return None
