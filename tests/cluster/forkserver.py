"""Starts workers and routers of test clusters as forks of one process that has imported torch.

Importing torch takes a core over a second, once for each worker of each cluster. The fork server
imports it once, and nothing that starts a thread; each child is a fork of it that runs a command as
`python -m baton ...` would, with its own environment, output and process group. Children are real
processes with real pids; when the tests end, however they do, the server ends and they with it.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any

PRELOADED = ("prefill_worker.worker", "decode_worker.worker", "router.main", "baton.gateway")
_MODULES = {
    "baton": "baton.__main__",
    "tests.chaos.process": "tests.chaos.process",
    "tests.cluster.other_version": "tests.cluster.other_version",
}
_MAX_MESSAGE = 1 << 17


@dataclass
class ForkedProcess:
    """What `ChildProcess` needs of an `asyncio.subprocess.Process`."""

    pid: int
    stdout: asyncio.StreamReader
    ended: asyncio.Future[int]

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for the signal that killed it."""
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        """The exit status."""
        return await asyncio.shield(self.ended)

    def send_signal(self, signum: int) -> None:
        """Sends a signal, if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, signum)


class ForkServer:
    """Started with `async with`; `spawn` stands in for `asyncio.create_subprocess_exec`."""

    async def __aenter__(self) -> ForkServer:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._started: asyncio.Queue[int] = asyncio.Queue()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        await self._process.wait()

    async def spawn(self, *argv: str, env: dict[str, str], **options: Any) -> Any:
        """A command of ours as a fork; any other as a process of its own."""
        if argv[:2] != (sys.executable, "-m") or argv[2] not in _MODULES:
            return await asyncio.create_subprocess_exec(*argv, env=env, **options)
        read, write = os.pipe()
        request = json.dumps({"argv": argv[2:], "env": env}).encode()
        assert len(request) < _MAX_MESSAGE
        try:
            socket.send_fds(self._socket, [request], [write])
        finally:
            os.close(write)
        if not (pid := await self._started.get()):
            raise RuntimeError("the fork server has ended; its output says why")
        stdout = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stdout)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(read, "rb"))
        return ForkedProcess(pid, stdout, self._ended[pid])

    async def _read(self) -> None:
        """Messages: a started child's pid, or the pid and exit status of one that has ended."""
        loop = asyncio.get_running_loop()
        while message := await loop.sock_recv(self._socket, _MAX_MESSAGE):
            pid, *status = json.loads(message)
            if status:
                self._ended[pid].set_result(status[0])
            else:
                self._ended[pid] = loop.create_future()
                self._started.put_nowait(pid)
        self._started.put_nowait(0)  # the server has ended


def serve(connection: socket.socket) -> None:
    """Forks on request until the other end closes; its children die with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the tests, which close us
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if pid := key.data:
                selector.unregister(key.fd)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.send(json.dumps([pid, status]).encode())
                continue
            message, outputs, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1)
            if not message:
                return
            if not (pid := os.fork()):
                for other in list(selector.get_map().values()):
                    os.close(other.fd)
                selector.close()
                _run(**json.loads(message), output=outputs[0])
            os.close(outputs[0])
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            connection.send(json.dumps([pid]).encode())


def _run(argv: list[str], env: dict[str, str], output: int) -> None:
    """In the child: becomes the command. Never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for its life
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        if "--die-with-parent" in argv:
            argv[argv.index("--die-with-parent") + 1] = str(os.getppid())
        sys.argv = argv
        try:
            runpy.run_module(_MODULES[argv[0]], run_name="__main__", alter_sys=False)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    serve(socket.socket(fileno=int(sys.argv[1])))
