"""Starts workers and routers of test clusters as forks of one process that has imported torch.

Importing torch takes a core over a second, once for each worker of each cluster. Python's fork
server imports it once, and nothing that starts a thread; each child is a fork of it that runs a
command as `python -m baton ...` would, with its own environment, output and process group. Children
are real processes with real pids; when the tests end, however they do, the server ends and they
with it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

PRELOADED = ["prefill_worker.worker", "decode_worker.worker", "router.main", "baton.gateway"]
_MODULES = {
    "baton": "baton.__main__",
    "tests.chaos.process": "tests.chaos.process",
    "tests.cluster.other_version": "tests.cluster.other_version",
}


@dataclass
class ForkedProcess:
    """What `ChildProcess` needs of an `asyncio.subprocess.Process`."""

    process: Any
    stdout: asyncio.StreamReader
    ended: asyncio.Event

    @property
    def pid(self) -> int:
        """The real one."""
        return int(self.process.pid)

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for the signal that killed it."""
        return self.process.exitcode if self.ended.is_set() else None

    async def wait(self) -> int | None:
        """The exit status."""
        await self.ended.wait()
        return self.returncode


class ForkServer:
    """Used with `with`; `spawn` stands in for `asyncio.create_subprocess_exec`."""

    def __enter__(self) -> ForkServer:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # children have their own
            forkserver.ensure_running()
        return self

    def __exit__(self, *error: object) -> None:
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()

    async def spawn(self, *argv: str, env: dict[str, str], **options: Any) -> Any:
        """A command of ours as a fork; any other as a process of its own."""
        if argv[:2] != (sys.executable, "-m") or argv[2] not in _MODULES:
            return await asyncio.create_subprocess_exec(*argv, env=env, **options)
        read, write = self._context.Pipe(duplex=False)
        with contextlib.ExitStack() as stack:
            for pipe in (read, write):
                stack.enter_context(pipe)
            listeners = [socket.socket(fileno=os.dup(fd)) for fd in options.pop("pass_fds", ())]
            for listener in listeners:
                stack.enter_context(listener)
            arguments = list(argv[2:]), env, write, listeners
            process = self._context.Process(target=_run, args=arguments)
            process.start()
            output = os.fdopen(os.dup(read.fileno()), "rb")
        stdout, ended = asyncio.StreamReader(), asyncio.Event()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), output)

        def end() -> None:
            loop.remove_reader(process.sentinel)
            process.join()
            ended.set()

        loop.add_reader(process.sentinel, end)
        return ForkedProcess(process, stdout, ended)


def _run(
    argv: list[str], env: dict[str, str], output: Connection, listeners: Sequence[socket.socket]
) -> None:
    """In the child: becomes the command."""
    os.setpgid(0, 0)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    kept = [listener.detach() for listener in listeners]
    for descriptor in set(range(3, 1024)) - set(kept):  # what keeps the server and pipes open
        with contextlib.suppress(OSError):
            os.close(descriptor)
    if kept:
        argv[argv.index("--listeners") + 1] = ",".join(map(str, kept))
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for its life
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    if "--die-with-parent" in argv:
        argv[argv.index("--die-with-parent") + 1] = str(os.getppid())
    sys.argv = argv
    try:
        runpy.run_module(_MODULES[argv[0]], run_name="__main__", alter_sys=False)
    finally:
        atexit._run_exitfuncs()
