"""Our end of the conversation with a candidate; `benchmarks.candidates.answering` is the other
one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from baton.local.child import tied

ROOT = Path(__file__).parents[2]
_END_S = 10.0
_CHUNK = 65536
_TOLD_LINES = 5


class Missing(Exception):
    """The candidate's library is not installed."""


class Failed(Exception):
    """The candidate could not do it; it may be able to do other things."""


class Lost(Failed):
    """The candidate's process has ended, or does not answer."""


class Conversation:
    """A candidate's process. What it prints beside its answers goes to `log`."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._rest = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                tied(argv),
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,  # ctrl-C is ours; what it starts is ended with it
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def ready(self, timeout_s: float) -> dict[str, str]:
        """What it says of itself once it is loaded. Raises Missing, Failed or Lost."""
        answer = self._read(timeout_s)
        if "missing" in answer:
            raise Missing(answer["missing"])
        told: dict[str, str] = self._checked(answer)["ready"]
        return told

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> tuple[float, str]:
        """(seconds, note) of one piece of work. Raises Failed or Lost."""
        try:
            _pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            raise Lost(self._last_words()) from None
        answer = self._checked(self._read(timeout_s))
        return float(answer["seconds"]), str(answer.get("note", ""))

    def close(self) -> None:
        """Ends the process: with its input, or by force."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                _pipe(pipe).close()
            except BrokenPipeError:
                continue
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @staticmethod
    def _checked(answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise Failed(str(answer["error"]))
        return answer

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next line."""
        out, until = _pipe(self._process.stdout), time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            readable, _, _ = select.select([out], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                self._kill()
                raise Lost(f"no answer within {timeout_s:g} s")
            if not (chunk := os.read(out.fileno(), _CHUNK)):
                raise Lost(self._last_words())
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """Why it may have ended."""
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        return ending(status, self._log)


def ending(status: int, log: Path) -> str:
    """How a process ended, with the last lines of what it printed."""
    lines = log.read_text(errors="replace").splitlines()[-_TOLD_LINES:]
    return " | ".join([f"it ended with status {status}", *lines])


def _pipe(pipe: Any) -> BinaryIO:
    assert pipe is not None
    found: BinaryIO = pipe
    return found
