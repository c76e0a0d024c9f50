"""How log lines look: for people, or one JSON object a line for machines.

A line about a request passes its ids, `log.warning(text, extra=about(...))`; both forms show them,
so that a line leads to its trace.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping

FIELDS = ("trace_id", "request_id", "handoff_id")


def about(*, trace_id: str = "", request_id: str = "", handoff_id: str = "") -> Mapping[str, str]:
    """What a line is about, as `extra`; what is empty is left out."""
    known = {"trace_id": trace_id, "request_id": request_id, "handoff_id": handoff_id}
    return {name: value for name, value in known.items() if value}


class TextLines(logging.Formatter):
    """Time, level, logger, message, and the trace's id where it is known."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without what a raised error adds below it."""
        trace_id = getattr(record, "trace_id", "")
        return super().formatMessage(record) + (f" [trace {trace_id}]" if trace_id else "")


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, ids, a raised error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def formatter(form: str) -> logging.Formatter:
    """Of `--log-format`."""
    return JsonLines() if form == "json" else TextLines()
