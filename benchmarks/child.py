"""Programs of benchmarks that write JSON lines: engines, the GPU's parts. Needs only Python."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from baton.local.child import tied

ROOT = Path(__file__).parents[1]
TAIL_LINES = 20  # of a log: a cause is often above the last ones
_ENDING_S = 60.0  # for a killed process, and for one that has closed its output, to end


class Failed(Exception):
    """A program could not do it; it may be able to do other things."""


def exit_text(status: int, log: Path) -> str:
    """How a process ended, with the last lines of what it printed."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return " | ".join([f"it ended with status {status}", *lines])


class Child:
    """A program with its children. What it prints beside its messages goes to `log`."""

    def __init__(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._log, self._unread = log, b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                tied(argv), cwd=ROOT, env={**os.environ, **(env or {})}, bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                process_group=0,  # ctrl-C is ours, and its children end with it
            )  # fmt: skip
        self.pid = self._process.pid

    def send(self, message: Any) -> None:
        """Writes a line; that the program has ended shows when it is read."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def read(self, timeout_s: float) -> Any:
        """The next message. Raises EOFError where it ended, TimeoutError where it is silent."""
        assert self._process.stdout is not None
        end, out = time.monotonic() + timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._unread:  # a part of a line is silence, too
            if not select.select([out], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            if not (more := os.read(out, 1 << 16)):
                raise EOFError
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises Failed where it is an error, late or none: a late one ends."""
        try:
            message: dict[str, Any] = self.read(timeout_s)
        except TimeoutError as error:
            self.kill()
            raise Failed(str(error)) from None
        except EOFError:
            raise Failed(exit_text(self.wait(), self._log)) from None
        if "error" in message:
            raise Failed(message["error"])
        return message

    def wait(self) -> int:
        """Its exit status, once its output has ended; it is killed if it does not end in time."""
        try:
            return self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def kill(self) -> None:
        """Ends it and what it started. A driver can hold a process beyond that: it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def messages() -> Callable[[Any], None]:
    """In the program: what writes its messages. From now on all else that is printed is its log."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return write
