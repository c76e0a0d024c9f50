"""The conversation with a candidate: answers, what is not installed, what fails, what is silent."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.candidates.answering import Setup, Timed, answer
from benchmarks.engine.conversation import ROOT, Conversation, Failed, Lost, Missing

Talk = Callable[[str], Conversation]
SETUP = Setup("/nowhere", 512, 1, (0,), 4, 80, 64, {"dtype": "float32"})
DECODE = {"do": "decode", "batch": 2, "context": 16, "steps": 3}
WORKING = """
class Counting:
    def about(self):
        print("a library that prints")
        return {"version": "7", "batch": str(self.setup.max_batch)}
    def decode(self, batch, context, steps):
        if batch > self.setup.max_batch:
            raise ValueError("too large\\nwith details")
        return Timed(batch * steps / 10, "by counting")
    def prefill(self, tokens):
        return Timed(tokens / 100)

def load(setup):
    candidate = Counting()
    candidate.setup = setup
    return candidate
"""


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    """Starts a candidate whose `load` a test writes."""
    begun: list[Conversation] = []

    def start(body: str) -> Conversation:
        cpu = min(os.sched_getaffinity(0))
        setup = Setup(**{**SETUP.__dict__, "cpus": (cpu,)})
        program = tmp_path / "program.py"
        head = "from benchmarks.candidates.answering import Timed, main\n"
        program.write_text(f"{head}{body}\nmain(load)\n")
        argv = [sys.executable, str(program), setup.to_json()]
        begun.append(Conversation(argv, {"PYTHONPATH": str(ROOT)}, tmp_path / "log"))
        return begun[-1]

    yield start
    for one in begun:
        one.close()


def test_a_setup_arrives_as_it_was_sent() -> None:
    assert Setup.from_json(SETUP.to_json()) == SETUP


def test_prompts_are_the_same_for_the_same_seed_and_lie_in_the_vocabulary() -> None:
    prompt = SETUP.prompt(300, 3)
    assert prompt == SETUP.prompt(300, 3) != SETUP.prompt(300, 4)
    # Those of decoding sequences, and those of prompts that no cache has.
    seeds = [base + number for base in (0, 1 << 32) for number in range(40)]
    assert len({tuple(SETUP.prompt(20, seed)) for seed in seeds}) == len(seeds)
    assert len(prompt) == 300 and min(prompt) >= 10 and max(prompt) < SETUP.vocab


def test_a_candidate_answers_and_what_it_prints_is_no_answer(talk: Talk, tmp_path: Path) -> None:
    one = talk(WORKING)
    assert one.ready(30) == {"version": "7", "batch": "4"}
    assert one.ask(DECODE, 30) == (0.6, "by counting")
    assert one.ask({"do": "prefill", "tokens": 50}, 30) == (0.5, "")
    assert "a library that prints" in (tmp_path / "log").read_text()


def test_a_failure_is_told_in_a_line_and_the_next_thing_is_answered(talk: Talk) -> None:
    one = talk(WORKING)
    one.ready(30)
    with pytest.raises(Failed, match=r"^ValueError: too large$"):
        one.ask({**DECODE, "batch": 5}, 30)
    with pytest.raises(Failed, match="unknown: nothing"):
        one.ask({"do": "nothing"}, 30)
    assert one.ask(DECODE, 30)[0] == 0.6


def test_what_is_not_installed_is_missing(talk: Talk) -> None:
    one = talk("def load(setup):\n    import surely_nobody_has_this_library\n")
    with pytest.raises(Missing, match="surely_nobody_has_this_library"):
        one.ready(30)


def test_a_load_that_fails_is_a_failure(talk: Talk) -> None:
    one = talk("def load(setup):\n    raise MemoryError('no room')\n")
    with pytest.raises(Failed, match="MemoryError: no room"):
        one.ready(30)


def test_a_process_that_ends_is_lost_with_its_last_words(talk: Talk) -> None:
    one = talk("import sys\nprint('out of luck', file=sys.stderr)\nsys.exit(3)\n")
    with pytest.raises(Lost, match=r"ended with status 3 \| out of luck"):
        one.ready(30)


def test_a_silent_process_is_lost_in_time(talk: Talk) -> None:
    one = talk("import time\ntime.sleep(600)\n")
    with pytest.raises(Lost, match=r"no answer within 0\.2 s"):
        one.ready(0.2)


def test_an_answer_is_what_the_candidate_timed() -> None:
    class One:
        def about(self) -> dict[str, str]:
            return {}

        def decode(self, batch: int, context: int, steps: int) -> Timed:
            return Timed(float(batch + context + steps))

        def prefill(self, tokens: int) -> Timed:
            return Timed(float(tokens), "in one piece")

    assert answer(One(), DECODE) == {"seconds": 21.0, "note": ""}
    assert answer(One(), {"do": "prefill", "tokens": 4}) == {
        "seconds": 4.0,
        "note": "in one piece",
    }
