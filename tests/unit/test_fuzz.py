"""`make fuzz` finds what breaks a promise, and nothing in the parsers for some inputs."""

import time

import pytest

from tests.fuzz import __main__ as fuzzing


class Fuzz(fuzzing.Fuzz):
    """Tries some inputs of each kind."""

    goes_on = property(lambda self: self.tried["etcd"] < 40)


def test_some_inputs_break_no_parser(tmp_path):
    fuzz = Fuzz(7, 0.0)
    fuzz.parsers(tmp_path)
    assert fuzz.broken == []
    assert len(fuzz.tried) == 10 and set(fuzz.tried.values()) == {40}


@pytest.mark.parametrize("breaks", [ZeroDivisionError("oops"), None])
def test_what_breaks_a_promise_is_found_with_its_input(tmp_path, monkeypatch, breaks):
    def parse(data):
        began = time.thread_time()
        if breaks:
            raise breaks
        while time.thread_time() < began + 0.02:
            pass

    monkeypatch.setattr(fuzzing, "parse_chat", parse)
    monkeypatch.setattr(fuzzing, "MAX_PARSE_S", 0.01)
    fuzz = Fuzz(7, 0.0)
    fuzz.parsers(tmp_path)
    found = [line for line in fuzz.broken if line.startswith("chat: ")]
    assert found and ("oops" if breaks else "took 0.0 s") in found[0] and "input: b'" in found[0]
