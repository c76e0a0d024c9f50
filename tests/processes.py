"""Child processes of tests: programs that run to their end, and programs that go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[1]
BATON = (sys.executable, "-m", "baton")
PYTHON = (sys.executable, "-c")
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Ended(NamedTuple):
    """A program that has ended."""

    status: int
    out: str
    err: str


def run(argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Ended:
    """Runs a program to its end; fails, and kills it, when that takes too long.

    env: variables added to this process's. Other options are those of `subprocess.run`.
    """
    pipes = {"input": "", "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(
        argv, env={**os.environ, **_VARIABLES, **(env or {})}, text=True, timeout=WAIT_S,
        check=False, **{**pipes, **options},
    )  # fmt: skip
    return Ended(done.returncode, done.stdout or "", done.stderr or "")


async def baton(*argv: str) -> Ended:
    """Runs the command `baton`."""
    return await asyncio.to_thread(run, [*BATON, *argv])


async def as_json(*argv: str) -> dict[str, Any]:
    """The object that the command `baton` prints with `--json`; it must have worked."""
    patient = ("--timeout", f"{WAIT_S:g}") if argv[0] == "status" else ()  # by default 5 s
    done = await baton(*argv, *patient, "--json")
    assert (done.status, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


@dataclass
class Running:
    """A program that goes on; `lines` is what was read of its output."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def line(self) -> str:
        """The next line; empty at the end of the output."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            raw = await self.process.stdout.readline()
        self.lines.append(raw.decode().rstrip("\n"))
        return self.lines[-1]

    async def says(self, text: str) -> str:
        """The next line with `text` in it; fails when the program ends or stays silent."""
        assert self.process.stdout is not None
        with contextlib.suppress(TimeoutError):
            while text not in await self.line():
                if self.process.stdout.at_eof():
                    break
            else:
                return self.lines[-1]
        raise AssertionError(f"it does not say {text!r}: {self.lines}")

    def write(self, text: str) -> None:
        """Writes to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())

    async def end(self, signum: int) -> int:
        """Sends a signal and waits for the end; returns the exit status."""
        self.process.send_signal(signum)
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            self.lines += (await self.process.stdout.read()).decode().splitlines()
            return await self.process.wait()


@contextlib.asynccontextmanager
async def running(
    *argv: str, env: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[Running]:
    """Starts a program; at the end, kills it if it still runs.

    env: variables added to this process's. Other options are those of
    `asyncio.create_subprocess_exec`; input and output are pipes by default.
    """
    process = await asyncio.create_subprocess_exec(
        *argv, env={**os.environ, **_VARIABLES, "PYTHONPATH": str(ROOT), **(env or {})},
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **options},
    )  # fmt: skip
    try:
        yield Running(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # children of Baton's die with it
        await process.communicate()


def own_shared_memory() -> set[str]:
    """Files of this user in /dev/shm, from after this process's start, but for sockets in use."""
    began, bound = psutil.Process().create_time(), Path("/proc/net/unix").read_text()
    names = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            stat = path.stat()
            own = stat.st_uid == os.getuid() and began <= stat.st_ctime <= time.time()
            names |= {path.name} if own and str(path) not in bound else set()
    return names


def left_behind(temporary: Path, shared_memory: Set[str]) -> list[str]:
    """What is left of processes whose TMPDIR was `temporary`, wherever they were started.

    Processes, each of which holds its ports; files; and shared memory beside `shared_memory`, which
    is waited for: another's clusters open links.
    """
    found = []
    for one in psutil.process_iter(["cmdline", "environ"]):
        if one.pid != os.getpid() and (one.info["environ"] or {}).get("TMPDIR") == str(temporary):
            found.append(f"process {one.pid} still runs: {one.info['cmdline']}")
    found += [f"{path} is still there" for path in temporary.glob("baton*")]
    ends = time.monotonic() + WAIT_S
    while (left := own_shared_memory() - shared_memory) and time.monotonic() < ends:
        time.sleep(0.1)
    return found + [f"/dev/shm/{name} is still there" for name in left]


def baton_running(*argv: str, env: Mapping[str, str]) -> AbstractAsyncContextManager[Running]:
    """Starts the command `baton`; its output is stdout and stderr."""
    return running(*BATON, *argv, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
