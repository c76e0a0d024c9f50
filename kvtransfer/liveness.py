"""Knows when another process of this host has ended: its pidfd becomes readable."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable

from baton.errors import InvalidRequest, TransferFailed

_MAX_PID = 1 << 22  # of Linux


def check_pid(pid: int) -> None:
    """Raises InvalidRequest for a number that no process can have."""
    if not 0 < pid <= _MAX_PID:
        raise InvalidRequest(f"pid must be from 1 to {_MAX_PID}, not {pid}", "pid")


class ProcessWatch:
    """Calls `on_exit` once, on the event loop, when process `pid` has ended.

    Raises InvalidRequest for what `check_pid` refuses.
    """

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        check_pid(pid)
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


class Receiver:
    """The process whose memory a one-sided link writes into, asked before and after every put.

    Mapped memory outlives its owner: without this, bytes would go nowhere unnoticed. `process` is
    its pidfd; `close` closes that, too.
    """

    def __init__(self, transport: str, process: int) -> None:
        self._transport, self._process = transport, process
        self._aborted = self._closed = False
        self._death = select.poll()
        self._death.register(process, select.POLLIN)

    def check(self) -> None:
        """Raises TransferFailed when the link was aborted or closed, or the process has ended."""
        if self._aborted or self._closed:
            raise TransferFailed(f"{self._transport}: the link was aborted")
        if self._death.poll(0):
            raise TransferFailed(f"{self._transport}: the receiver is gone")

    def abort(self) -> None:
        """From now on every check fails; called from any thread."""
        self._aborted = True

    def close(self) -> None:
        """Frees what it holds; may be called twice."""
        if not self._closed:
            self._closed = True
            os.close(self._process)
