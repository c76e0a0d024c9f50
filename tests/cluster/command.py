"""The `baton` command as a user runs it: a process of its own, its output and exit status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.waiting import WAIT_S

BATON = (sys.executable, "-m", "baton")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Ended(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str


async def baton(*argv: str, timeout_s: float = WAIT_S) -> Ended:
    """Runs a command to its end; fails, and kills it, when that takes too long."""
    done = await asyncio.to_thread(
        subprocess.run, [*BATON, *argv], env={**os.environ, **ONE_THREAD}, timeout=timeout_s,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


async def as_json(*argv: str) -> dict[str, Any]:
    """The object that a command prints with `--json`; it must have worked."""
    done = await baton(*argv, "--json")
    assert (done.status, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


@dataclass
class Running:
    """A command that goes on; `lines` is its output so far, stdout and stderr."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    async def says(self, text: str, timeout_s: float = WAIT_S) -> str:
        """The next line with `text` in it; fails when it ends or stays silent."""
        assert self.process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while raw := await self.process.stdout.readline():
                    self.lines.append(raw.decode().rstrip("\n"))
                    if text in self.lines[-1]:
                        return self.lines[-1]
        raise AssertionError(f"it does not say {text!r}: {self.lines}")

    async def end(self, signum: int, timeout_s: float = WAIT_S) -> int:
        """Sends a signal; the exit status."""
        self.process.send_signal(signum)
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            self.lines += (await self.process.stdout.read()).decode().splitlines()
            return await self.process.wait()


@contextlib.asynccontextmanager
async def running(*argv: str, env: Mapping[str, str]) -> AsyncIterator[Running]:
    """Starts a command and, whatever happens, kills it in the end, and its children with it."""
    process = await asyncio.create_subprocess_exec(
        *(*BATON, *argv), env={**os.environ, **ONE_THREAD, **env}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield Running(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)  # its children die with it
        await process.communicate()
