"""A child process that can be started repeatedly: its output and how it ends.

Children are in their own process group, so that ctrl-C in a terminal reaches only the parent, which
stops them in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from baton.errors import ConfigError, Unavailable
from baton.local.ports import Listener
from baton.log_format import cause_in

_LOG_LINES = 500
_MAX_LINE_BYTES = 16 << 10
_OUTPUT_GRACE_S = 1.0


@dataclass(eq=False)
class ChildProcess:
    """A command that can be restarted. `log` keeps the last lines of all runs.

    on_line: called with each line of its output (stdout and stderr together).
    listeners: ports that it shares with its successor.
    wanted, ready_at: set by the owner: whether it runs or will be restarted, and since when this
        run serves.
    """

    name: str
    role: str
    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's
    on_line: Callable[[str], None] = lambda line: None
    listeners: Sequence[Listener] = ()
    log: deque[str] = field(init=False, default_factory=lambda: deque(maxlen=_LOG_LINES))
    starts: int = field(init=False, default=0)
    started_at: float = field(init=False, default=0.0)  # time.monotonic()
    wanted: bool = field(init=False, default=False)
    ready_at: float = field(init=False, default=0.0)  # time.monotonic(); 0: not yet
    _killed: bool = field(init=False, default=False)
    _listens: bool = field(init=False, default=False)
    _process: asyncio.subprocess.Process | None = field(init=False, default=None)
    _reader: asyncio.Task[None] | None = field(init=False, default=None)

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
    def is_ready(self) -> bool:
        return self.ready_at > 0 and self.running

    @property
    def command(self) -> list[str]:
        """The command line without the descriptors of its listeners."""
        return self.argv

    def successor(self) -> Self:
        """A process of the same command that will replace this one; it continues the log and the
        number of starts."""
        new = replace(self)
        new.log, new.starts = self.log, self.starts
        return new

    def on_end(self) -> None:
        """Called when a run has ended."""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def failure(self) -> str:
        """How it ended; if it failed by itself, with its last line, which states the cause."""
        status = self.exit_status
        assert status is not None, f"{self.name} still runs"
        if status < 0:
            return f"{self.name} was killed by {signal.Signals(-status).name}"
        why = f": {cause_in(self.log[-1])}" if status and self.log else ""
        return f"{self.name} exited with status {status}{why}"

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(list(self.log)[-lines:])

    async def start(self) -> None:
        """Starts a run; the previous one must have ended. Raises Unavailable if that fails."""
        assert self._process is None or self._process.returncode is not None, "it runs already"
        try:
            descriptors = [listener.take() for listener in self.listeners]
        except ConfigError as error:
            raise Unavailable(f"{self.name} cannot be started: {error}") from error
        self._listens = True
        numbers = ",".join(map(str, descriptors))
        listeners = ["--listeners", numbers] if descriptors else []
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                *listeners,
                pass_fds=descriptors,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                process_group=0,
            )
        except OSError as error:  # the program is missing, or the system has no resources
            self._give_back()
            raise Unavailable(f"{self.name} cannot be started: {error}") from error
        self._killed, self.ready_at = False, 0.0
        self.starts += 1
        self.started_at = time.monotonic()
        self._reader = asyncio.create_task(self._read(), name=f"output of {self.name}")

    async def wait(self) -> int:
        """Waits for the end of the process and its output; returns the exit status."""
        assert self._process is not None and self._reader is not None
        status = await self._process.wait()
        self._give_back()
        self.on_end()
        # A grandchild may hold the pipe open after the child has ended.
        await asyncio.wait([self._reader], timeout=_OUTPUT_GRACE_S)
        self._reader.cancel()
        return status

    def signal(self, signum: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._killed = self._killed or signum == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signum)  # asyncio's method may reap it before `wait`

    async def stop(self, timeout_s: float) -> int:
        """Sends SIGTERM, after `timeout_s` SIGKILL to its group; returns the exit status."""
        assert self._process is not None
        if self._process.returncode is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # a process stopped by SIGSTOP does not see SIGTERM
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                self.log.append(f"(did not end within {timeout_s:g} s of SIGTERM: killed)")
                self.kill()
        return await self.wait()

    def _give_back(self) -> None:
        if self._listens:
            self._listens = False
            for listener in self.listeners:
                listener.give_back()

    def kill(self) -> None:
        """Sends SIGKILL to the process and its children."""
        if self._process is not None and self._process.returncode is None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        rest, ended = b"", False
        while not ended:
            chunk = await self._process.stdout.read(1 << 16)
            ended = not chunk
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES or (rest and ended):
                lines, rest = [*lines, rest], b""
            for line in lines:
                text = line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip()
                self.log.append(text)
                self.on_line(text)
