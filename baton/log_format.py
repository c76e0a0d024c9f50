"""How log lines look: for people, or one JSON object a line for machines.

A line about a request passes its ids, `log.warning(text, extra=about(...))`; both forms show them,
so that a line leads to its trace.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping

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


class _TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without what a raised error adds below it, and the trace's id if known."""
        trace_id = getattr(record, "trace_id", "")
        return super().formatMessage(record) + (f" [trace {trace_id}]" if trace_id else "")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Time (UTC), level, logger, message, ids, a raised error's traceback."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in _IDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
