"""Rounds and tables: who is asked when, what a failure costs, medians and paired ratios."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine import table
from benchmarks.engine.conversation import Failed
from benchmarks.engine.work import Measured, Work, measure, steps_of, works

ONE, MANY, PROMPT = works([1, 8], 512, [64])


def test_rates_count_what_is_produced_or_taken_in() -> None:
    assert (ONE.tokens, MANY.tokens, PROMPT.tokens) == (48, 8 * 48, 64)
    assert MANY.request() == {"do": "decode", "batch": 8, "context": 512, "steps": 48}
    assert PROMPT.request() == {"do": "prefill", "tokens": 64}


def test_steps_are_fewer_for_larger_batches() -> None:
    assert [steps_of(batch) for batch in (1, 8, 16, 32, 64)] == [48, 48, 24, 12, 12]


class Asked:
    """Notes who was asked what; `fails` names (candidate, work) that fail from the n-th time on."""

    def __init__(self, fails: dict[tuple[str, Work], int] | None = None) -> None:
        self.order: list[tuple[str, Work]] = []
        self._fails = fails or {}

    def __call__(self, name: str, work: Work) -> tuple[float, str]:
        self.order.append((name, work))
        times = self.order.count((name, work))
        if times >= self._fails.get((name, work), 1000):
            raise Failed("it did not work")
        return work.tokens / (100.0 * times), "a way" if name == "b" else ""


def test_neighbours_are_asked_next_to_each_other_and_who_begins_changes() -> None:
    asked = Asked()
    measure(["a", "b", "c"], [ONE, PROMPT], 2, asked, lambda line: None)
    assert ["".join(name for name, _ in asked.order[i : i + 3]) for i in range(0, 18, 3)] == [
        "abc", "abc",  # the warm-up
        "bca", "bca",
        "cab", "cab",
    ]  # fmt: skip
    assert [work for _, work in asked.order[:6]] == [ONE] * 3 + [PROMPT] * 3


def test_the_warm_up_is_in_no_figure() -> None:
    measured = measure(["a", "b"], [ONE], 2, Asked(), lambda line: None)
    assert measured.rates["a"][ONE] == {1: 200.0, 2: 300.0}
    assert measured.notes == {"b": {ONE: "a way"}}


def test_what_failed_is_not_asked_again_and_the_rest_goes_on() -> None:
    asked = Asked({("a", ONE): 1, ("b", PROMPT): 3})
    measured = measure(["a", "b"], [ONE, PROMPT], 3, asked, lambda line: None)
    assert asked.order.count(("a", ONE)) == 1
    assert asked.order.count(("a", PROMPT)) == 4
    assert asked.order.count(("b", PROMPT)) == 3
    assert measured.failures == {
        "a": {ONE: "it did not work"},
        "b": {PROMPT: "it did not work"},
    }
    assert measured.rates["a"] == {PROMPT: {1: 200.0, 2: 300.0, 3: 400.0}}
    assert measured.rates["b"][PROMPT] == {1: 200.0}


def found() -> Measured:
    return Measured(
        rates={
            "ours": {ONE: {1: 30.0, 2: 40.0, 3: 20.0}},
            "theirs": {ONE: {1: 10.0, 2: 20.0}, PROMPT: {1: 5.0}},
        },
        notes={"theirs": {ONE: "slowly"}},
        failures={"ours": {PROMPT: "broke"}},
    )


def test_a_ratio_is_taken_round_by_round() -> None:
    """Of 30/10 and 40/20: not of the medians; the third round has no pair."""
    assert table.ratio(found(), "ours", "theirs", ONE) == {
        "median": 2.5, "min": 2.0, "max": 3.0, "rounds": 2,
    }  # fmt: skip
    assert table.ratio(found(), "ours", "theirs", PROMPT) is None
    assert table.rate(found(), "ours", ONE) == {
        "median": 30.0, "min": 20.0, "max": 40.0, "rounds": 3,
    }  # fmt: skip


def test_the_table_shows_medians_ratios_and_failures() -> None:
    pairs = [("ours", "theirs"), ("ours", "absent")]
    lines = list(table.text_of(found(), [ONE, PROMPT], pairs))
    assert [" ".join(line.split()) for line in lines] == [
        "tokens/s: median (min-max) batch 1 prompt 64",
        "ours 30 (20-40) -",
        "theirs 15 (10-20) 5 (5-5)",
        "",
        "ratio within a round batch 1 prompt 64",
        "ours / theirs 2.50 (2.00-3.00) -",
        "ours, prompt 64: failed: broke",
        "theirs: batch 1: slowly",
    ]


def test_json_has_every_round() -> None:
    told = json.loads(json.dumps(table.json_of(found(), [ONE, PROMPT], [("ours", "theirs")])))
    assert told["candidates"][0]["rounds"] == {"batch 1": [30.0, 40.0, 20.0], "prompt 64": []}
    assert told["candidates"][0]["failures"] == {"prompt 64": "broke"}
    assert told["ratios"][0]["first_over_second"]["batch 1"]["median"] == pytest.approx(2.5)
