"""How log lines look: for people, or one JSON object a line for machines.

A line about a request passes its ids, `log.warning(text, extra=about(...))`; both forms show them,
so that a line leads to its trace. What a line shows may be of a caller or another process: it is
one line of bounded length, whatever that holds, and what a bad peer can cause again and again goes
through a `RateLimit`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

MAX_CHARS = 4000  # of a message; a traceback's end has four times as many
RATE_LIMIT_S = 10.0
_IDS = ("trace_id", "request_id", "handoff_id")


def about(*, trace_id: str = "", request_id: str = "", handoff_id: str = "") -> Mapping[str, str]:
    """What a line is about, as `extra`; what is empty is left out."""
    known = {"trace_id": trace_id, "request_id": request_id, "handoff_id": handoff_id}
    return {name: value for name, value in known.items() if value}


def formatter(form: str) -> logging.Formatter:
    """Of `--log-format`."""
    if form == "json":
        return _JsonLines()
    return _TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")


def one_line(text: str, most: int = MAX_CHARS) -> str:
    """`text` cut and with escapes for what is not printable, as line breaks and terminal codes."""
    if len(text) > most:
        text = f"{text[:most]}… ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RateLimit:
    """Logs one line in `RATE_LIMIT_S`, with the number of those that were left out before it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._log_after = 0.0
        self._unlogged = 0

    def warning(self, text: str, *args: object) -> None:
        """As a logger's, without `extra`."""
        self.line(logging.WARNING, text, *args)

    def line(
        self, level: int, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """As a logger's `log`."""
        self._unlogged += 1
        if (now := time.monotonic()) >= self._log_after:
            text = f"{text} (%d such since the last line)"
            self._log.log(level, text, *args, self._unlogged, extra=extra)
            self._log_after, self._unlogged = now + RATE_LIMIT_S, 0


class _Lines(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        """The traceback's end, whose lines do not look like lines of the log."""
        text = super().formatException(ei)[-4 * MAX_CHARS :]
        return "\n".join(f"    {one_line(line)}" for line in text.split("\n"))


class _TextLines(_Lines):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without what a raised error adds below it, and the trace's id if known."""
        record.message = one_line(record.message)
        trace_id = one_line(getattr(record, "trace_id", ""))
        return super().formatMessage(record) + (f" [trace {trace_id}]" if trace_id else "")


class _JsonLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        """Time (UTC), level, logger, message, ids, a raised error's traceback."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(record.getMessage()),
            **{name: one_line(getattr(record, name)) for name in _IDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
