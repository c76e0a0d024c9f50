"""A part's process: events, bad ends, time; and what of its cases is left out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import job as jobs
from benchmarks.gpu import part, process
from benchmarks.gpu.job import Ceilings, Doing, Event, Failed, Job, Note, Row, Unusable

ROW = Row("table", "a row", {"GB/s": 1.5, "text": "x", "none": None})


@pytest.fixture
def job() -> Job:
    """Its time begins with the test."""
    return Job("machine", "cpu", 20.0, smoke=True, ceilings=Ceilings(1.0, 2.0))


def child(tmp_path: Path, body: str, seconds: float = 20.0, grace_s: float = 1.0) -> list[Event]:
    """The events of a process that runs `body`, which may print events as `tell`."""
    head = "import os, signal, sys, time\nfrom benchmarks.gpu.job import *\n"
    tell = "def tell(event):\n    print(to_line(event), flush=True)\n"
    job = Job("speed", "cpu", seconds)
    argv = [sys.executable, "-c", head + tell + body]
    return list(process.run(job, tmp_path / "log", grace_s, argv))


def test_a_job_arrives_as_it_was_sent_and_its_time_begins_then(job: Job) -> None:
    arrived = Job.from_json(job.to_json())
    assert arrived == job and 19 < arrived.left_s <= 20


@pytest.mark.parametrize("event", [ROW, Failed("t", "n", "e"), Note("t", "text"), Doing("t", "n")])
def test_events_travel_as_lines(event: Event) -> None:
    assert "\n" not in jobs.to_line(event)
    assert jobs.from_line(jobs.to_line(event)) == event


def test_events_come_and_what_is_printed_beside_them_is_kept_apart(tmp_path: Path) -> None:
    found = child(tmp_path, f"tell({ROW!r})\nprint('noise', file=sys.stderr)\n")
    assert found == [ROW]
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_crash_is_told_with_its_last_words(tmp_path: Path) -> None:
    body = f"tell({ROW!r})\nprint('out of luck', file=sys.stderr)\nos.abort()\n"
    row, failed = child(tmp_path, body)
    assert row == ROW and isinstance(failed, Failed)
    assert failed.error.startswith("it ended with status -6 | out of luck")


def test_a_bad_end_says_what_was_done_then(tmp_path: Path) -> None:
    body = f"tell({Doing('decode', 'batch 8')!r})\n"
    _, crashed = child(tmp_path, body + "os.abort()\n")
    _, late = child(tmp_path, body + "time.sleep(600)\n", seconds=0.5, grace_s=1.0)
    assert isinstance(crashed, Failed) and isinstance(late, Failed)
    assert "status -6, at decode, batch 8" in crashed.error
    assert late.error == "not done 1 s after its time was over, at decode, batch 8"


def test_a_failure_that_was_told_is_not_told_twice(tmp_path: Path) -> None:
    told = Failed("t", "n", "e")
    assert child(tmp_path, f"tell({told!r})\nsys.exit(1)\n") == [told]


def test_a_silent_process_is_ended_in_time_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"""
import subprocess
deep = subprocess.Popen(["sleep", "600"])
open({str(pid)!r}, "w").write(str(deep.pid))
tell({ROW!r})
time.sleep(600)
"""
    began = time.monotonic()
    row, failed = child(tmp_path, body, seconds=3.0, grace_s=0.5)
    assert row == ROW and isinstance(failed, Failed) and "not done" in failed.error
    assert time.monotonic() - began < 15
    gone = Path(f"/proc/{pid.read_text()}/stat")
    until = time.monotonic() + 5
    while gone.exists() and gone.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not gone.exists() or gone.read_text().split()[2] == "Z"


def test_kernels_are_interpreted_in_dry_runs_only(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert process.environment(job)["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in process.environment(Job("speed", "cuda:0", 1.0))


def test_a_part_that_cannot_begin_is_its_own_failure() -> None:
    (failed,) = part.events_of(Job("no such part", "cpu", 1.0))
    assert failed == Failed("no such part", "the whole part", "KeyError: 'no such part'")


def test_a_case_that_fails_leaves_the_others(job: Job) -> None:
    def bad() -> dict[str, jobs.Cell]:
        raise ValueError("no\nmore")

    found = list(jobs.in_time(job, "t", [("bad", bad), ("good", lambda: {"x": 1})]))
    assert found == [
        Doing("t", "bad"), Failed("t", "bad", "ValueError: no"),
        Doing("t", "good"), Row("t", "good", {"x": 1}),
    ]  # fmt: skip


def test_nothing_new_begins_when_time_is_over() -> None:
    late = Job("speed", "cpu", -1.0)
    (note,) = jobs.in_time(late, "t", [("one", dict), ("two", dict)])
    assert note == Note("t", "left out, because its time was over: one, two")


@pytest.mark.parametrize(
    ("text", "fatal"),
    [("CUDA error: an illegal memory access was encountered", True),
     ("Triton Error [CUDA]: an illegal memory access was encountered", True),
     ("CUDA error: device-side assert triggered", True),
     ("CUDA error: out of memory", False), ("shape mismatch", False),
     ("CUDA error: operation not permitted when stream is capturing", False),
     ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul", False)],
)  # fmt: skip
def test_what_leaves_a_gpu_unusable_ends_the_part(text: str, fatal: bool) -> None:
    def bad() -> dict[str, jobs.Cell]:
        raise RuntimeError(text)

    if fatal:
        with pytest.raises(Unusable, match=r"^case: RuntimeError: .*CUDA"):
            jobs.attempt("t", "case", bad)
    else:
        assert jobs.attempt("t", "case", bad) == Failed("t", "case", f"RuntimeError: {text}")


def test_what_ends_events_early_is_a_failure_of_theirs_alone() -> None:
    def events() -> Iterator[Event]:
        yield ROW
        raise KeyError("gone")

    assert list(jobs.guarded("t", "n", events)) == [ROW, Failed("t", "n", "KeyError: 'gone'")]


def test_what_leaves_a_gpu_unusable_is_nobodys_alone() -> None:
    def events() -> Iterator[Event]:
        yield ROW
        raise Unusable("gone")

    with pytest.raises(Unusable):
        list(jobs.guarded("t", "n", events))
