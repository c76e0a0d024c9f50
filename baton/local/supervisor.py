"""One child process of a local cluster, and the supervisor that keeps it running.

Children are in their own process group, so that ctrl-C in a terminal reaches the parent alone and
they can be stopped in order. Nothing here knows what a child does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from baton.errors import Unavailable

ERROR = "baton: error: "  # how our commands begin their last line
LOG_LINES = 500
_MAX_LINE_BYTES = 16 << 10
_OUTPUT_GRACE_S = 1.0
_FIRST_DELAY_S = 0.5
_LAST_DELAY_S = 10.0
_HEALTHY_S = 10.0  # a process that was ready for this long starts again as if for the first time


class ChildProcess:
    """A command that can be started again after it ended. `log` keeps the last lines of all runs.

    `on_line` is called with each line of its output (stdout and stderr together).
    """

    spawn = staticmethod(asyncio.create_subprocess_exec)  # what starts a run

    def __init__(
        self,
        name: str,
        role: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self.role = role
        self.argv = list(argv)
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.starts = 0
        self.started_at = 0.0  # time.monotonic()
        self._env = dict(env or {})
        self._on_line = on_line
        self._killed = False
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the latest run; 0 before the first."""
        return self._process.pid if self._process else 0

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for the signal that killed it."""
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        """Whether it was started and has neither ended nor been sent SIGKILL."""
        return self._process is not None and self.exit_status is None and not self._killed

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def ending(self) -> str:
        """How it ended: "decode-0 exited with status 1"."""
        status = self.exit_status
        assert status is not None, f"{self.name} still runs"
        if status < 0:
            return f"{self.name} was killed by {signal.Signals(-status).name}"
        return f"{self.name} exited with status {status}"

    @property
    def failure(self) -> str:
        """`ending` and, when it failed by itself, its last line, which says why."""
        last = self.log[-1].removeprefix(ERROR) if self.log else ""
        return f"{self.ending}: {last}" if (self.exit_status or 0) > 0 and last else self.ending

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(list(self.log)[-lines:])

    async def start(self) -> None:
        """Starts a run; the one before must have ended."""
        assert self._process is None or self._process.returncode is not None, "it runs already"
        self._process = await self.spawn(
            *self.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env},
            process_group=0,
        )
        self._killed = False
        self.starts += 1
        self.started_at = time.monotonic()
        self._reader = asyncio.create_task(self._read(), name=f"output of {self.name}")

    async def wait(self) -> int:
        """The exit status, once the process ended and its output is in `log`."""
        assert self._process is not None and self._reader is not None
        status = await self._process.wait()
        # A grandchild may hold the pipe open for longer than the child lived.
        await asyncio.wait([self._reader], timeout=_OUTPUT_GRACE_S)
        self._reader.cancel()
        return status

    def signal(self, signum: int) -> None:
        """Sends a signal, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._killed = self._killed or signum == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    async def stop(self, timeout_s: float) -> int:
        """SIGTERM, then after `timeout_s` SIGKILL for its whole process group; the exit status."""
        assert self._process is not None
        if self._process.returncode is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # a process stopped with SIGSTOP could not end itself
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                self.log.append(f"(did not end within {timeout_s:g} s of SIGTERM: killed)")
                self.kill()
        return await self.wait()

    def kill(self) -> None:
        """SIGKILL to the process and to what it started."""
        if self._process is not None and self._process.returncode is None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._keep(lines)
        self._keep([rest] if rest else [])

    def _keep(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            text = line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip()
            self.log.append(text)
            self._on_line(text)


async def cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancels a task and returns when it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def restart_delay_s(failures: int) -> float:
    """Seconds before a process that failed for the nth time in a row is started again."""
    return min(_FIRST_DELAY_S * 2.0 ** min(failures - 1, 30), _LAST_DELAY_S)


class Supervisor:
    """Keeps one process running.

    `until_ready` returns, once the process serves, the text to log about it. After an end that was
    not requested `on_exit` decides whether the process is started again; that is then done after a
    delay that doubles until the process has been ready for a while.
    """

    def __init__(
        self,
        process: ChildProcess,
        until_ready: Callable[[ChildProcess], Awaitable[str]],
        on_exit: Callable[[ChildProcess], bool],
        say: Callable[[str], None],
    ) -> None:
        self.process = process
        self._until_ready = until_ready
        self._on_exit = on_exit
        self._say = say
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
        return self._ready.is_set() and self.process.running

    async def start(self) -> None:
        """Starts the process, which does not run, and keeps it running from now on."""
        await cancelled(self._task)
        self._returns = True
        self._ready.clear()
        await self.process.start()
        name = f"supervisor of {self.process.name}"
        self._task = asyncio.create_task(self._supervise(), name=name)

    async def restart(self, timeout_s: float) -> int:
        """Ends the process with SIGTERM, after `timeout_s` with SIGKILL, and starts it again.

        Returns how the old run ended: 0 after a drain.
        """
        await cancelled(self._task)  # this end is requested
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
            raise Unavailable(self.process.failure)

    async def release(self) -> None:
        """Stops supervising: the end of the process has no effect from now on."""
        self._returns = False
        await cancelled(self._task)

    async def _supervise(self) -> None:
        failures = 0
        while True:
            noting = asyncio.create_task(self._note_ready())
            try:
                await self.process.wait()
            finally:
                await cancelled(noting)
            # Counted from ready, not from the start: a large model may take minutes to load.
            healthy = self._ready.is_set() and time.monotonic() - self._ready_at >= _HEALTHY_S
            failures = 1 if healthy else failures + 1
            self._ready.clear()
            if not self._on_exit(self.process):
                self._returns = False
                return
            delay_s = restart_delay_s(failures)
            self._say(f"{self.process.failure}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await self.process.start()

    async def _note_ready(self) -> None:
        what = await self._until_ready(self.process)
        self._ready_at = time.monotonic()
        self._ready.set()
        self._say(f"{self.process.name} {what}")
