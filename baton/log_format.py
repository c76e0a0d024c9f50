"""Formats of log lines: text, or one JSON object a line.

A line about a request has its ids, `log.warning(text, extra=about(...))`, which lead to its trace.
Lines for programs, as the access log's and `audit`'s, have fields: `log.info(text, extra={"fields":
...})`, which are members of a JSON line, and NAME=VALUE in a text.
Lines may quote callers and other processes: they are escaped, of bounded length, and those that a
peer can cause repeatedly go through a `RateLimit`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

MAX_CHARS = 4000  # of a message; four times as many of a traceback
RATE_LIMIT_S = 10.0
ERROR = "baton: error: "
_IDS = ("trace_id", "request_id", "handoff_id")


def about(*, trace_id: str = "", request_id: str = "", handoff_id: str = "") -> Mapping[str, str]:
    """Ids of a line, for `extra`; empty ones are omitted."""
    known = {"trace_id": trace_id, "request_id": request_id, "handoff_id": handoff_id}
    return {name: value for name, value in known.items() if value}


_AUDIT = logging.getLogger("baton.audit")


def audit(action: str, **fields: object) -> None:
    """Logs what an operator or a tenant has changed to `baton.audit`."""
    _AUDIT.info("%s", action, extra={"fields": fields})


def formatter(form: str) -> logging.Formatter:
    """The formatter of `--log-format`."""
    if form == "json":
        return _JsonLines()
    return _TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")


def error_line(message: str, form: str) -> str:
    """The last line of a command that cannot go on, in the format of its log."""
    if form != "json":
        return f"{ERROR}{message}"
    record = {"name": "baton", "levelno": logging.ERROR, "levelname": "ERROR", "msg": message}
    return formatter(form).format(logging.makeLogRecord(record))


def cause_in(error_line: str) -> str:
    """The message of an `error_line`; any other line as it is."""
    if error_line.startswith("{"):
        with contextlib.suppress(ValueError, KeyError):
            return str(json.loads(error_line)["message"])
    return error_line.removeprefix(ERROR)


def one_line(text: str, most: int = MAX_CHARS) -> str:
    """`text`, truncated, with escapes for unprintable characters as line breaks."""
    if len(text) > most:
        text = f"{text[:most]}… ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RateLimit:
    """Logs at most one line in `RATE_LIMIT_S`, with the number of suppressed lines."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._log_after = 0.0
        self._unlogged = 0

    def warning(self, text: str, *args: object) -> None:
        """Logs a warning, as `Logger.warning` without `extra` does."""
        self.line(logging.WARNING, text, *args)

    def line(
        self, level: int, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Logs a line, as `Logger.log` does."""
        self._unlogged += 1
        if (now := time.monotonic()) >= self._log_after:
            text = f"{text} (%d more since the last line)"
            self._log.log(level, text, *args, self._unlogged, extra=extra)
            self._log_after, self._unlogged = now + RATE_LIMIT_S, 0


class _Lines(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        """The end of a traceback, indented so that its lines do not look like log lines."""
        text = super().formatException(ei)[-4 * MAX_CHARS :]
        return "\n".join(f"    {one_line(line)}" for line in text.split("\n"))


class _TextLines(_Lines):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message, with the trace id if known."""
        record.message = one_line(record.message)
        trace_id = one_line(getattr(record, "trace_id", ""))
        fields = "".join(
            f" {name}={one_line(str(value))}" for name, value in _fields(record).items()
        )
        return super().formatMessage(record) + fields + (f" [trace {trace_id}]" if trace_id else "")


class _JsonLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        """An object with time (UTC), level, logger, message, ids and traceback."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(record.getMessage()),
            **{name: one_line(getattr(record, name)) for name in _IDS if hasattr(record, name)},
            **{
                name: one_line(value) if isinstance(value, str) else value
                for name, value in _fields(record).items()
            },
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, "fields", {})
    return found
