"""`make fuzz` finds what breaks a promise, and nothing in the parsers for a second of inputs."""

import time

import pytest

from tests.fuzz import __main__ as fuzzing


def test_a_second_of_inputs_breaks_no_parser(tmp_path):
    fuzz = fuzzing.Fuzz(7, time.monotonic() + 1.0)
    fuzz.parsers(tmp_path)
    assert fuzz.broken == []
    assert len(fuzz.tried) == 8 and min(fuzz.tried.values()) > 10


@pytest.mark.parametrize("breaks", [ZeroDivisionError("oops"), None])
def test_what_breaks_a_promise_is_found_with_its_input(tmp_path, monkeypatch, breaks):
    def parse(data):
        if breaks:
            raise breaks
        time.sleep(0.02)

    monkeypatch.setattr(fuzzing, "parse_chat", parse)
    monkeypatch.setattr(fuzzing, "MAX_PARSE_S", 0.01)
    fuzz = fuzzing.Fuzz(7, time.monotonic() + 0.5)
    fuzz.parsers(tmp_path)
    found = [line for line in fuzz.broken if line.startswith("chat: ")]
    assert found and ("oops" if breaks else "took 0.0 s") in found[0] and "input: b'" in found[0]
