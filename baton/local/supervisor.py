"""Keeps one process of a local cluster running: starts it again when it ends, or on request.

It knows when its process is ready, because somebody tells it how to see that; not what it does.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

from baton.errors import Unavailable
from baton.local.process import ChildProcess

ERROR = "baton: error: "  # how our commands begin their last line
_FIRST_DELAY_S = 0.5
_LAST_DELAY_S = 10.0
_HEALTHY_S = 10.0  # a process that was ready for this long starts again as if for the first time


def restart_delay_s(failures: int) -> float:
    """Seconds before a process that failed for the nth time in a row is started again."""
    return min(_FIRST_DELAY_S * 2.0 ** min(failures - 1, 30), _LAST_DELAY_S)


class Keeper:
    """One process that is to run.

    `until_ready` returns, once the process serves, what is to be said of it. An end that nobody
    asked for is told to `accident`, which says whether the process is started again; that is then
    done after a delay that doubles until the process has been ready for a while.
    """

    def __init__(
        self,
        process: ChildProcess,
        until_ready: Callable[[ChildProcess], Awaitable[str]],
        accident: Callable[[ChildProcess], bool],
        say: Callable[[str], None],
    ) -> None:
        self.process = process
        self._until_ready = until_ready
        self._accident = accident
        self._say = say
        self._failures = 0
        self._ready = asyncio.Event()
        self._ready_at = 0.0
        self._returns = False
        self._task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> bool:
        """Whether the process runs or is going to."""
        return self.process.running or self._returns

    @property
    def is_ready(self) -> bool:
        """Whether the process serves."""
        return self._ready.is_set() and self.process.running

    async def start(self) -> None:
        """Starts the process, which does not run, and keeps it running from now on."""
        await self._look_away()
        self._returns = True
        await self._start_run()
        name = f"keeper of {self.process.name}"
        self._task = asyncio.create_task(self._keep(), name=name)

    async def restart(self, timeout_s: float) -> int:
        """Ends the process with SIGTERM, after `timeout_s` with SIGKILL, and starts it again.

        Returns how the old run ended: 0 after a drain.
        """
        await self._look_away()  # this end is no accident
        self._returns = True
        status = await self.process.stop(timeout_s)
        await self.start()
        return status

    async def ready(self) -> None:
        """Returns once the process is ready; Unavailable if it ended and is not started again."""
        assert self._task is not None, "it was never started"
        if not self.is_ready:
            self._ready.clear()  # it has been killed, and this is not yet noted
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._ready.is_set():
            raise Unavailable(what_happened(self.process))

    async def let_go(self) -> None:
        """From now on the end of the process is somebody else's."""
        self._returns = False
        await self._look_away()

    async def _look_away(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await self._follow_run()
            if not self._accident(self.process):
                self._returns = False
                return
            delay_s = restart_delay_s(self._failures)
            self._say(f"{what_happened(self.process)}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await self._start_run()

    async def _start_run(self) -> None:
        self._ready.clear()
        await self.process.start()

    async def _follow_run(self) -> None:
        """Returns when the process has ended."""
        noting = asyncio.create_task(self._note_ready())
        try:
            await self.process.wait()
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)
        # Counted from ready, not from the start: a large model may take minutes to load.
        healthy = self._ready.is_set() and time.monotonic() - self._ready_at >= _HEALTHY_S
        self._failures = 1 if healthy else self._failures + 1
        self._ready.clear()

    async def _note_ready(self) -> None:
        what = await self._until_ready(self.process)
        self._ready_at = time.monotonic()
        self._ready.set()
        self._say(f"{self.process.name} {what}")


def ending(process: ChildProcess) -> str:
    """How a process ended."""
    status = process.exit_status
    assert status is not None, f"{process.name} still runs"
    if status < 0:
        return f"{process.name} was killed by {signal.Signals(-status).name}"
    return f"{process.name} exited with status {status}"


def what_happened(process: ChildProcess) -> str:
    """How a process ended and, when it failed by itself, its last line, where errors say why."""
    last = process.log[-1].removeprefix(ERROR) if process.log else ""
    failed = process.exit_status is not None and process.exit_status > 0
    return f"{ending(process)}: {last}" if failed and last else ending(process)


def last_words(process: ChildProcess, shown: bool) -> str:
    """Why a process ended: our own error, else its last lines, unless they were `shown` already."""
    last = process.log[-1] if process.log else ""
    if last.startswith(ERROR):
        return f": {last.removeprefix(ERROR)}"
    if shown:
        return "; what it wrote is above" if last else " and wrote nothing"
    return f". Its last lines:\n{process.log_tail() or '(it wrote nothing)'}"
