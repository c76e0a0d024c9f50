"""Log lines for people and for machines."""

import json
import logging
import sys

from baton import log_format
from baton.log_format import about


def line(form, text="request %s: %s", args=("r1", 'a "b"\nc'), **fields):
    record = logging.LogRecord("router.x", logging.WARNING, "f.py", 1, text, args, None)
    vars(record).update(fields, created=1795194305.25, msecs=250.0)
    return log_format.formatter(form).format(record)


def test_a_line_for_machines_is_one_object():
    text = line("json", **about(trace_id="ab" * 16, request_id="r1", handoff_id=""))
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2026-11-20T17:05:05.250Z", "level": "warning", "logger": "router.x",
        "message": 'request r1: a "b"\nc', "trace_id": "ab" * 16, "request_id": "r1",
    }  # fmt: skip
    try:
        raise ValueError("broken")
    except ValueError:
        text = line("json", exc_info=sys.exc_info())
    assert "\n" not in text and "ValueError: broken" in json.loads(text)["error"]


def test_a_line_for_people_ends_with_its_trace():
    assert line("text", "done", ()).endswith("WARNING router.x: done")
    assert line("text", "done", (), **about(trace_id="abc")).endswith("x: done [trace abc]")
