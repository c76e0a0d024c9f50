"""Log lines for people and for machines."""

import json
import logging
import sys

from baton import log_format
from baton.log_format import MAX_CHARS, RateLimit, about, audit, cause_in, error_line


def line(form, text="request %s: %s", args=("r1", 'a "b"\nc'), **fields):
    record = logging.LogRecord("router.x", logging.WARNING, "f.py", 1, text, args, None)
    vars(record).update(fields, created=1795194305.25, msecs=250.0)
    return log_format.formatter(form).format(record)


def test_a_line_for_machines_is_one_object():
    text = line("json", **about(trace_id="ab" * 16, request_id="r1", handoff_id=""))
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2026-11-20T17:05:05.250Z", "level": "warning", "logger": "router.x",
        "message": 'request r1: a "b"\\nc', "trace_id": "ab" * 16, "request_id": "r1",
    }  # fmt: skip
    try:
        raise ValueError("broken")
    except ValueError:
        text = line("json", exc_info=sys.exc_info())
    assert "\n" not in text and "ValueError: broken" in json.loads(text)["error"]


def test_a_fatal_error_is_a_line_of_the_log_that_names_its_cause():
    found = json.loads(error_line("port 1 is\nin use", "json"))
    assert found.items() >= {"level": "error", "message": "port 1 is\\nin use"}.items()
    assert error_line("port 1 is in use", "text") == "baton: error: port 1 is in use"
    for form in ("text", "json"):
        assert cause_in(error_line("port 1 is in use", form)) == "port 1 is in use"
    for other in ("Killed", "{broken", '{"a": 1}', "[]"):
        assert cause_in(other) == other


def test_a_line_for_people_ends_with_its_trace():
    assert line("text", "done", ()).endswith("WARNING router.x: done")
    assert line("text", "done", (), **about(trace_id="abc")).endswith("x: done [trace abc]")


def test_fields_are_members_of_a_line(caplog):
    with caplog.at_level("INFO", "baton.audit"):
        audit("role changed", worker="a\nb", times=2)
    (record,) = caplog.records
    found = json.loads(log_format.formatter("json").format(record))
    assert found.items() >= {"message": "role changed", "worker": "a\\nb", "times": 2}.items()
    text = log_format.formatter("text").format(record)
    assert text.endswith("INFO baton.audit: role changed worker=a\\nb times=2")


FORGED = "x\n2026-11-27 03:00:00,000 INFO baton: all is well\x1b[2J\u202e\x9b1m\u2028 \ud800 ä"


def test_what_others_send_makes_no_line_and_commands_no_terminal():
    try:
        raise ValueError(FORGED)
    except ValueError:
        failed = sys.exc_info()
    for form in ("text", "json"):
        forged = line(form, args=(FORGED, FORGED), exc_info=failed, **about(handoff_id=FORGED))
        begins = [part for part in forged.split("\n") if not part.startswith(" ")]
        assert len(begins) == 1 and "INFO baton: all is well" in begins[0]
        assert not [c for c in forged if c != "\n" and not c.isprintable()] and "ä" in forged


def test_a_line_is_cut():
    for form in ("text", "json"):
        cut = line(form, args=("r", "x" * 70_000))
        assert len(cut) < MAX_CHARS + 300 and "(70011 characters)" in cut


def test_what_comes_again_and_again_is_one_line_in_a_while(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log_format.time, "monotonic", lambda: now[0])
    limited = RateLimit(logging.getLogger("router.x"))
    for _ in range(2000):
        limited.warning("refused %s", "a")
    now[0] += log_format.RATE_LIMIT_S
    limited.warning("refused %s", "b")
    assert [record.getMessage() for record in caplog.records] == [
        "refused a (1 more since the last line)", "refused b (2000 more since the last line)"
    ]  # fmt: skip
