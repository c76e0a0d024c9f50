"""What a person sees while parts run: a line for each figure, and at a terminal what is next."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from benchmarks.gpu import report
from benchmarks.gpu.job import Doing, Event, Failed, Note, Row

_CLEAR = "\r\x1b[2K"  # of a terminal's line: back to its begin, and empty


class Progress:
    """Tells of one run on `out`; lines begin with the seconds since it began."""

    def __init__(self, out: TextIO = sys.stderr, columns: int = 100) -> None:
        self._out, self._columns = out, columns
        self._terminal = out.isatty()
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        """A line that stays."""
        clear = _CLEAR if self._terminal else ""
        print(f"{clear}{self._seconds()}  {line}", file=self._out, flush=True)

    def show(self, event: Event) -> None:
        """What came of a part. What is done now is shown at a terminal only, until more comes."""
        if isinstance(event, Doing):
            if self._terminal:
                line = f"{self._seconds()}  {event.table}: {event.name} …"
                print(_CLEAR + line[: self._columns - 1], end="", file=self._out, flush=True)
        elif isinstance(event, Row):
            self.say(f"  {event.table}: {event.name}{report.brief(event)}")
        elif isinstance(event, Failed):
            self.say(f"  {event.table}: {event.name}: FAILED: {event.error}")
        elif isinstance(event, Note):
            self.say(f"  {event.table}: {event.text}")

    def end(self) -> None:
        """Nothing more comes."""
        if self._terminal:
            print(_CLEAR, end="", file=self._out, flush=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:5.0f} s"
