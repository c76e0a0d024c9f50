"""Supervises processes: start, restarts with back-off, rolling restart, stop.

A subclass defines which processes there are and when one serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

from baton.errors import BatonError, DeadlineExceeded, Unavailable
from baton.local.process import ChildProcess
from baton.net.tasks import cancelled, wait_at_most

INTERRUPTED = 130
_STOP_GRACE_S = 3.0  # beyond the drain time, before SIGKILL
_RESTART_GRACE_S = 15.0  # the same where no user waits at a terminal
_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 10.0
_HEALTHY_S = 10.0  # a process that was ready for this long starts again as if for the first time

Say = Callable[[str], None]


class Supervisor(ABC):
    """Starts, supervises, restarts and stops processes.

    `async with` enters when all serve and leaves nothing behind. At a rolling restart a process
    ends once its successor serves. `say` gets a line for each event; `shows_output`: the processes'
    output is shown, too.
    """

    def __init__(
        self, *, say: Say, shows_output: bool, restart: bool, drain_s: float, start_timeout_s: float
    ) -> None:
        self.processes: dict[str, ChildProcess] = {}
        self._say = say
        self._shows_output = shows_output
        self._restart = restart
        self._drain_s = drain_s
        self._start_timeout_s = start_timeout_s
        self._supervisors: dict[str, asyncio.Task[None]] = {}  # the restart loop of each process
        self._passing: set[ChildProcess] = set()  # starting successors and leaving predecessors
        self._changed = asyncio.Event()  # a process became ready, or ended
        self._starting = True  # a process that ends now makes the whole start fail
        self._stack = AsyncExitStack()  # resources of the processes, closed after their end
        self._stop: asyncio.Task[None] | None = None

    @abstractmethod
    async def _start(self) -> None:
        """Starts all processes and waits until they serve."""

    @abstractmethod
    async def _serves(self, process: ChildProcess) -> str:
        """Waits until this run of a process serves; returns a text about it."""

    @abstractmethod
    async def _is_back(self, process: ChildProcess) -> None:
        """Waits until the other processes use a restarted one."""

    def _has_room_for_two(self, process: ChildProcess) -> bool:
        """Whether its successor can run at the same time."""
        return True

    def _leave_s(self, process: ChildProcess) -> float:
        """Seconds that a process whose successor serves gets, after SIGUSR1, to finish its requests
        before it is drained; 0 if it does not support the signal."""
        return 0.0

    def _groups(self) -> Sequence[Sequence[ChildProcess]]:
        """All processes, in groups that are stopped in this order."""
        return [self._all]

    @property
    def _all(self) -> list[ChildProcess]:
        return [*self.processes.values(), *self._passing]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
            self._starting = False
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        self.processes[name].signal(signum)

    async def start_again(self, name: str) -> None:
        """Starts a process that does not run, and supervises it again.

        Raises Unavailable if it cannot be started; if it has run before, it is retried later.
        """
        process = self.processes[name]
        if name in self._supervisors:
            await cancelled(self._supervisors[name])
        process.wanted = True
        try:
            await process.start()
        finally:
            if process.starts:
                self._supervise_from_now(process)

    def _supervise_from_now(self, process: ChildProcess) -> None:
        supervising = self._supervise(process)
        self._supervisors[process.name] = asyncio.create_task(
            supervising, name=f"supervisor of {process.name}"
        )

    async def restart(self, name: str) -> int:
        """Replaces a process by a successor; returns its exit status, 0 after a drain.

        The old one ends once the successor serves and the other processes use it. Without room for
        both, it is drained first. Raises DeadlineExceeded or Unavailable if the successor does not
        serve; the old one then continues, if it has not been drained.
        """
        process = self.processes[name]
        if process.running and self._has_room_for_two(process):
            return await self._replace(process)
        return await self._start_over(process)

    async def _replace(self, old: ChildProcess) -> int:
        name, new = old.name, old.successor()
        self._say(f"{name} restarting: another process is started beside pid {old.pid}…")
        self._passing.add(new)
        try:
            await new.start()
            await self._found(new)
        except BaseException as error:
            if new.exit_status is None and new.pid:
                new.kill()
                await new.wait()
            self._passing.discard(new)
            if not isinstance(error, BatonError):
                raise
            stays = f"{name} continues (pid {old.pid}): its successor did not start"
            raise type(error)(f"{stays}: {error}") from error
        await cancelled(self._supervisors[name])  # its end is intended
        self._passing ^= {new, old}
        self.processes[name], new.wanted, new.ready_at = new, True, time.monotonic()
        self._supervise_from_now(new)
        if leave_s := self._leave_s(old):
            old.signal(signal.SIGUSR1)
            await wait_at_most(leave_s, old.wait())
        status = await old.stop(self._drain_s + _RESTART_GRACE_S)
        self._passing.discard(old)
        self._tell_of_drain(name, status)
        return status

    async def _found(self, process: ChildProcess) -> None:
        """Waits until a started process serves and the other processes use it."""

        async def served() -> None:
            await self._serves(process)
            await self._is_back(process)

        serving, ending = asyncio.create_task(served()), asyncio.create_task(process.wait())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise Unavailable(process.failure)
            serving.result()
        except TimeoutError:
            text = f"{process.name} does not serve after {self._start_timeout_s:g} s"
            raise DeadlineExceeded(text) from None
        finally:
            await cancelled(serving, ending)

    def _tell_of_drain(self, name: str, status: int) -> None:
        if status:
            self._say(f"warning: {name} did not drain: it ended with status {status}")

    async def _start_over(self, process: ChildProcess) -> int:
        name, ran = process.name, process.running
        self._say(f"{name} restarting…" if ran else f"{name} starting again…")
        await cancelled(self._supervisors[name])  # this end is intended
        status = await process.stop(self._drain_s + _RESTART_GRACE_S)
        await self.start_again(name)
        if ran:
            self._tell_of_drain(name, status)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until(lambda: process.is_ready or not process.wanted)
                if not process.wanted:
                    raise Unavailable(process.failure)
                await self._is_back(process)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name} is not back after {self._start_timeout_s:g} s"
            ) from None
        return status

    async def rolling_restart(self) -> dict[str, int]:
        """Restarts all processes one by one; see `restart`."""
        return {name: await self.restart(name) for name in list(self.processes)}

    async def stop(self) -> None:
        """Stops the processes in order, in bounded time. Safe to repeat.

        If the caller is cancelled, the processes are killed.
        """
        if self._stop is None:
            self._stop = asyncio.create_task(self._stop_all())
        try:
            await asyncio.shield(self._stop)
        except asyncio.CancelledError:
            self.kill_all()
            await self._stop
            raise

    def kill_all(self) -> None:
        """Sends SIGKILL to every running process, so that a `stop` in progress ends at once."""
        for process in self._all:
            process.kill()

    async def _launch(self, process: ChildProcess) -> None:
        self.processes[process.name] = process
        await self.start_again(process.name)

    async def _supervise(self, process: ChildProcess) -> None:
        """Restarts it whenever it ends, after a delay that doubles until it stays healthy."""
        failures = 0
        while True:
            noting = asyncio.create_task(self._note_ready(process))
            try:
                await process.wait()
            finally:
                await cancelled(noting)
            # Counted from readiness, not from the start: a large model may take minutes to load.
            healthy = process.ready_at and time.monotonic() - process.ready_at >= _HEALTHY_S
            failures = 1 if healthy else failures + 1
            process.wanted = self._restart and not self._starting
            self._changed.set()
            if self._starting:
                return
            if not process.wanted:
                self._say(process.failure)
                return
            why, starts = process.failure, process.starts
            while process.starts == starts:
                delay_s = restart_delay_s(failures)
                self._say(f"{why}; starting it again in {delay_s:g} s")
                await asyncio.sleep(delay_s)
                try:
                    await process.start()
                except Unavailable as error:
                    failures, why = failures + 1, str(error)

    async def _note_ready(self, process: ChildProcess) -> None:
        try:
            what = await self._serves(process)
        except BatonError as error:
            self._say(f"{process.name}: readiness is unknown: {error}")
            raise
        process.ready_at = time.monotonic()
        self._changed.set()
        self._say(f"{process.name} {what}")

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Waits for a condition; raises Unavailable if a process ends while the cluster starts."""
        while True:
            failed = next((p for p in self.processes.values() if not p.wanted), None)
            if failed and self._starting:
                # Its output is not repeated if it was shown.
                log = "" if self._shows_output else f"; its last lines:\n{failed.log_tail()}"
                raise Unavailable(failed.failure + log)
            if is_so():
                return
            self._changed.clear()
            await self._changed.wait()

    def _wanted(self) -> list[ChildProcess]:
        return [process for process in self.processes.values() if process.wanted]

    async def _stop_all(self) -> None:
        await cancelled(*self._supervisors.values())
        timeout_s = self._drain_s + _STOP_GRACE_S
        try:
            for group in self._groups():
                await asyncio.gather(*(p.stop(timeout_s) for p in group if p.starts))
        finally:
            self.kill_all()
            await self._stack.aclose()


def restart_delay_s(failures: int) -> float:
    """Seconds before a process is restarted after this number of failures in a row."""
    return min(_FIRST_DELAY_S * 2.0 ** min(failures - 1, 30), _LAST_DELAY_S)


def say(text: str) -> None:
    """Prints a line for the user."""
    with contextlib.suppress(OSError):  # the cluster continues without a reader
        print(text, flush=True)


def echo(name: str, line: str) -> None:
    """Prints a process's log line on stderr, with its name if it has one."""
    with contextlib.suppress(OSError):
        print(f"[{name}] {line}" if name else line, file=sys.stderr, flush=True)


def cancel_on_signals(say: Say = say) -> Callable[[], None]:
    """Makes SIGINT and SIGTERM cancel the current task, which ends its `async with` blocks.

    Returns what they call.
    """
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.cancelling():
            say(("\n" if sys.stdout.isatty() else "") + "stopping…")  # not after the terminal's ^C
        task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, cancel)
    return cancel


async def run(start: Callable[[AsyncExitStack], Awaitable[Supervisor]], say: Say = say) -> int:
    """Runs a supervisor until SIGINT or SIGTERM, then stops it; a second signal kills it.

    SIGHUP restarts all processes in turn, or stops them if the terminal was closed. The exit status
    is 0 if all served. Raises ConfigError or Unavailable if they cannot start.
    """
    had_terminal = _has_terminal()
    cancel = cancel_on_signals(say)
    restart, task = asyncio.Event(), asyncio.current_task()
    assert task is not None

    def hang_up() -> None:
        if not had_terminal or _has_terminal():
            restart.set()
        elif not task.cancelling():  # a second cancellation would kill what still drains
            cancel()  # ctrl-C is no longer possible

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    was_ready = False
    with contextlib.suppress(asyncio.CancelledError):
        async with AsyncExitStack() as stack:
            processes = await start(stack)
            was_ready = True
            await _restart_on(restart, processes, say)
    return 0 if was_ready else INTERRUPTED


async def _restart_on(requested: asyncio.Event, processes: Supervisor, say: Say) -> None:
    """Restarts all processes in turn whenever that is requested."""
    while True:
        await requested.wait()
        say(f"SIGHUP: restarting {', '.join(processes.processes)}, one after the other")
        try:
            await processes.rolling_restart()
            say("all processes have been restarted")
        except BatonError as error:
            say(f"the restart was abandoned: {error}")
        requested.clear()  # a signal during the restart needs no further one


def _has_terminal() -> bool:
    return any(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
