"""Starts workers and routers of test clusters as forks of one process that has imported torch.

Importing torch takes a core over a second, once for each worker of each cluster. The fork server
imports it once, and nothing that starts a thread; each child is a fork of it that runs a command as
`python -m baton ...` would, with its own environment, output and process group. Children are real
processes with real pids; when the tests end, however they do, the server ends and they with it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

PRELOADED = ("prefill_worker.worker", "decode_worker.worker", "router.main", "baton.gateway")
_MODULES = {
    "baton": "baton.__main__",
    "tests.chaos.process": "tests.chaos.process",
    "tests.cluster.other_version": "tests.cluster.other_version",
}
_MAX_MESSAGE = 1 << 17


class ForkedProcess:
    """What `ChildProcess` needs of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for the signal that killed it."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """The exit status."""
        return await asyncio.shield(self._ended)

    def send_signal(self, signum: int) -> None:
        """Sends a signal, if it still runs."""
        if self.returncode is None:
            os.kill(self.pid, signum)


class ForkServer:
    """Started with `async with`; `spawn` stands in for `asyncio.create_subprocess_exec`."""

    async def __aenter__(self) -> ForkServer:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._answers: asyncio.Queue[int] = asyncio.Queue()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        return self

    async def __aexit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
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
        if not (pid := await self._answers.get()):
            raise RuntimeError("the fork server has ended; its output says why")
        loop = asyncio.get_running_loop()
        stdout = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stdout)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(read, "rb"))
        return ForkedProcess(pid, stdout, self._ended.setdefault(pid, loop.create_future()))

    def _receive(self) -> None:
        """Messages: a started child's pid, or the pid and exit status of one that has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message = self._socket.recv(_MAX_MESSAGE)
                if not message:  # the server has ended
                    asyncio.get_running_loop().remove_reader(self._socket)
                    self._answers.put_nowait(0)
                    return
                pid, *status = json.loads(message)
                if status:
                    new = asyncio.get_running_loop().create_future
                    self._ended.setdefault(pid, new()).set_result(status[0])
                else:
                    self._ended[pid] = asyncio.get_running_loop().create_future()
                    self._answers.put_nowait(pid)


def serve(connection: socket.socket) -> None:
    """Forks on request until the other end closes; its children die with it."""
    children: set[int] = set()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the tests, which close us
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(4096)
                _reap(children, connection)
            if connection in ready:
                message, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1)
                if not message:
                    return
                (output,) = descriptors
                pid = os.fork()
                if not pid:
                    for end in (connection, wake, woken):
                        end.close()
                    _run(**json.loads(message), output=output)
                os.close(output)
                children.add(pid)
                connection.send(json.dumps([pid]).encode())


def _reap(children: set[int], connection: socket.socket) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            connection.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _run(argv: list[str], env: dict[str, str], output: int) -> None:
    """In the child: becomes the command. Never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
    import importlib

    for module in PRELOADED:
        importlib.import_module(module)
    serve(socket.socket(fileno=int(sys.argv[1])))
