"""A kernel that computes something else is found, and the others are told of all the same."""

from __future__ import annotations

import pytest
from torch import Tensor

from baton.engine.ops.triton.activation import silu_mul_reference
from benchmarks.gpu import correctness, row_cases
from benchmarks.gpu.job import Doing, Event, Failed, Job, Note, Row


@pytest.fixture
def job() -> Job:
    """Its time begins with the test."""
    return Job("kernels", "cpu", 60.0, smoke=True)


def found(job: Job) -> list[Event]:
    """All but what it was doing."""
    return [event for event in correctness.run(job) if not isinstance(event, Doing)]


@pytest.fixture(autouse=True)
def few(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels on rows, and of them those that are quick to interpret."""
    monkeypatch.setattr(correctness, "_ROOMS", ("row_cases",))
    everything = row_cases.cases
    monkeypatch.setattr(
        row_cases,
        "cases",
        lambda job: [(n, c) for n, c in everything(job) if n.startswith(("silu", "quantise"))],
    )


def test_kernels_that_are_right_have_a_row_each(job: Job) -> None:
    names = [event.name for event in correctness.run(job) if isinstance(event, Row)]
    assert names == [
        *(f"silu and multiply, {dtype}" for dtype in ("bf16", "f32", "f16")),
        "quantise rows, int8", "quantise rows, fp8",
    ]  # fmt: skip


def test_a_wrong_result_is_a_failure_and_the_others_go_on(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x: Tensor) -> Tensor:
        return silu_mul_reference(x) * 1.1

    monkeypatch.setattr(row_cases, "silu_mul", wrong)
    events = list(correctness.run(job))
    failed = [event for event in events if isinstance(event, Failed)]
    assert [one.name for one in failed] == [
        f"silu and multiply, {dtype}" for dtype in ("bf16", "f32", "f16")
    ]
    assert "error 1.0e-01" in failed[1].error
    assert [event.name for event in events if isinstance(event, Row)] == [
        "quantise rows, int8", "quantise rows, fp8",
    ]  # fmt: skip


def test_a_room_that_cannot_be_imported_leaves_the_others(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "_ROOMS", ("no_such_room", "row_cases"))
    first, *others = found(job)
    assert isinstance(first, Failed) and first.name == "no_such_room"
    assert len(others) == 5 and all(isinstance(event, Row) for event in others)


def test_what_there_was_no_time_for_is_named() -> None:
    (note,) = correctness.run(Job("kernels", "cpu", -1.0, smoke=True))
    assert isinstance(note, Note) and note.text.endswith("quantise rows, int8, quantise rows, fp8")
