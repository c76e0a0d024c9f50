"""Connections are told apart by who opened them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.chaos.sockets import owner


def test_a_connection_belongs_to_the_process_that_opened_it() -> None:
    dial = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as mine,
            subprocess.Popen(
                [sys.executable, "-c", f"{dial}; print(s.getsockname()[1]); input()", str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            ) as other,
        ):
            assert other.stdin is not None and other.stdout is not None
            theirs = int(other.stdout.readline())
            pids = {"other": other.pid, "me": os.getpid(), "gone": 2**22 + 1}
            assert owner(mine.getsockname()[1], pids) == "me"
            assert owner(theirs, pids) == "other"
            assert owner(theirs, {"me": os.getpid()}) == "somebody"
            other.stdin.write("\n")
