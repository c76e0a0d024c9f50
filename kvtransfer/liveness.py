"""Knows when another process of this host has ended: its pidfd becomes readable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Calls `on_exit` once, on the event loop, when process `pid` has ended."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._fd = -1
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(on_exit)
        else:
            self._loop.add_reader(self._fd, self._exited)

    def close(self) -> None:
        """Watches no more."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _exited(self) -> None:
        self.close()
        self._on_exit()
