"""Starts Python programs as forks of one process that has imported torch.

    with Preloaded({"baton"}):
        subprocess.Popen([sys.executable, "-m", "baton", ...])  # in 20 ms; asyncio's, too

Importing torch takes a core over a second, for each worker and each rank that a test starts. Here a
server imports it once, and nothing that starts a thread. The programs are real processes and
children of the caller, with their own environment, descriptors, process group and exit status: the
server forks twice, and the kernel gives what the fork between leaves to the caller, who is the
nearest "subreaper" meanwhile. When the caller ends, however it does, the server ends. Programs that
start others, as `baton up`, do it in the same way, from a server that was forked with them.

Run as a module, this is the server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn, Self
from unittest import mock

import psutil

IMPORTED = (
    *("prefill_worker.worker", "decode_worker.worker", "router.main", "baton.gateway.routes"),
    *("baton.cli.main", "baton.local.up", "baton.local.router_processes", "baton.client"),
    *("baton.engine.tensor_parallel", "baton.worker.remote_rank"),
)
RANKS = frozenset({"baton.engine.rank_process", "baton.worker.remote_rank"})
PROGRAMS = RANKS | {"baton", "tests.chaos", "tests.chaos.process", "tests.cluster.other_version"}
# Command lines of clusters, and of workers of several ranks.
_STARTS_PROCESSES = re.compile(r'^(?:baton (?:up|demo)|tests\.chaos )|(?:--tp[ =]|"tp":\s*)[2-9]')
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 64
_HIGH = 512  # descriptors from here on are free in a new process
_START = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = list(inspect.signature(_START).parameters)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks that a worker has started: programs, or forks, whose command is the server's."""
    names = {module.rpartition(".")[2] for module in RANKS}
    children = psutil.Process(pid).children()
    return [one for one in children if one.name() in names or RANKS & {*one.cmdline()}]


class Preloaded:
    """Within `with`, `python -m MODULE` is started as a fork for these modules."""

    def __init__(self, modules: Collection[str]) -> None:
        self.modules = frozenset(modules)
        self._lock, self._resources = threading.Lock(), contextlib.ExitStack()
        self._server: socket.socket | None = None  # from the first start on

    def __enter__(self) -> Self:
        def start(popen: Any, *arguments: Any) -> None:
            given = dict(zip(_PARAMETERS, (popen, *arguments), strict=True))
            argv = given["args"]
            ours = isinstance(argv, (list, tuple)) and tuple(argv[:2]) == (sys.executable, "-m")
            if ours and argv[2] in self.modules:
                self._start(popen, list(argv[2:]), given)
            else:
                previous(popen, *arguments)

        previous = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        patch = mock.patch.object(subprocess.Popen, "_execute_child", start)
        self._resources.enter_context(patch)
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def _start(self, popen: Any, argv: list[str], given: dict[str, Any]) -> None:
        """As `Popen` starts a program: sets its `pid`, and closes the child's ends of pipes."""
        standard = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        descriptors = {to: to if at == -1 else at for to, at in standard.items()}
        descriptors |= {fd: fd for fd in given["pass_fds"]}
        request = {
            "argv": argv, "env": dict(os.environ if given["env"] is None else given["env"]),
            "cwd": str(given["cwd"] or Path.cwd()), "group": given["process_group"],
            "session": given["start_new_session"], "descriptors": [*descriptors],
        }  # fmt: skip
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            server = self.server()
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(server, [json.dumps(request).encode()], [*descriptors.values()])
                popen.pid = int(server.recv(16))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        popen._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(given[name] for name in ends))

    def server(self) -> socket.socket:
        """The connection to the server, which is started if need be."""
        if self._server is None:
            self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}  # the programs have their own
                process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
            self._resources.callback(process.wait)
            self._resources.callback(self._server.close)
        return self._server

    def fork_server(self) -> None:
        """Makes a fork of this process, which has imported all and started no thread, the
        server."""
        self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if server := os.fork():
            theirs.close()
            self._resources.callback(os.waitpid, server, 0)
            self._resources.callback(self._server.close)
            return
        os.dup2(theirs.fileno(), _HIGH)
        os.closerange(0, _HIGH)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        theirs.detach()
        serve(socket.socket(fileno=_HIGH))


def serve(requests: socket.socket) -> NoReturn:
    """Forks for each request and runs it in the fork. Ends with the other end of the connection."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        read, write = os.pipe()
        if not (between := os.fork()):
            between = os.getpid()
            if pid := os.fork():
                os.write(write, b"%d" % pid)
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0)
            requests.detach()
            become(request, descriptors)
            run(request["argv"])
        os.waitpid(between, 0)
        requests.send(os.read(read, 16))
        for descriptor in (read, write, *descriptors):
            os.close(descriptor)


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Gives this process the descriptors, environment, folder and group that were asked for."""
    if request["session"]:
        os.setsid()
    elif request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, _HIGH) for one in descriptors]
    os.closerange(3, _HIGH)
    for one, number in zip(high, request["descriptors"], strict=True):
        os.dup2(one, number)
        os.close(one)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for its life
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    name = request["argv"][0].rpartition(".")[2].encode()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name)  # its command line stays the server's
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = list(request["argv"])


def run(argv: list[str]) -> NoReturn:
    """Runs the program and ends this process without tearing down all that was imported."""
    status: object = 0
    started = contextlib.ExitStack()
    if _STARTS_PROCESSES.search(" ".join(argv)):
        started.enter_context(Preloaded(PROGRAMS)).fork_server()
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    started.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # forks share what is there
    gc.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
