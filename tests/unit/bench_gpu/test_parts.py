"""A part's process: events, bad ends, time; what is left out; a kernel that is wrong."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu import kernels, part, run
from benchmarks.gpu.part import Cells, Event, Job, Part

ROW = Event("row", "table", "a row", {"GB/s": 1.5, "text": "x", "none": None})


def child(tmp_path: Path, body: str, seconds: float = 20.0, grace_s: float = 1.0) -> list[Event]:
    """The events of a process that runs `body`, which writes events with `tell`."""
    head = (
        "import json, os, sys, time\ndef tell(**event):\n    print(json.dumps(event), flush=True)\n"
    )
    head += f"tell(**json.loads({json.dumps(asdict(ROW))!r}))\n"
    job = Job("speed", "cpu", seconds)
    row, *events = run.run_part(job, tmp_path / "log", grace_s, [sys.executable, "-c", head + body])
    assert row == ROW
    return events


def test_what_is_printed_beside_events_is_kept_apart(tmp_path: Path) -> None:
    assert not child(tmp_path, "print('noise', file=sys.stderr)\n")
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_crash_is_reported_with_its_last_lines_and_its_place(tmp_path: Path) -> None:
    doing = "tell(kind='doing', table='decode', name='batch 8')\n"
    _, failed = child(tmp_path, doing + "print('out of luck', file=sys.stderr)\nos.abort()\n")
    assert failed.text == "it ended with status -6, at decode, batch 8 | out of luck"


def test_a_failure_is_reported_once(tmp_path: Path) -> None:
    (failed,) = child(tmp_path, "tell(kind='failed', table='t')\nsys.exit(1)\n")
    assert failed == Event("failed", "t")


def test_a_silent_process_is_ended_in_time_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"""
import subprocess
deep = subprocess.Popen(["sleep", "600"])
open({str(pid)!r}, "w").write(str(deep.pid))
time.sleep(600)
"""
    (failed,) = child(tmp_path, body, seconds=2.0)
    assert failed.text == "not done 1 s after its time was over"
    gone = Path(f"/proc/{pid.read_text()}/stat")
    until = time.monotonic() + 5
    while gone.exists() and gone.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not gone.exists() or gone.read_text().split()[2] == "Z"


def test_kernels_are_interpreted_in_dry_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run.environment(Job("", "cpu", 1.0, smoke=True))["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in run.environment(Job("", "cuda:0", 1.0))


def events_of(out: io.StringIO) -> list[Event]:
    """All but what was being done."""
    found = [Event(**json.loads(line)) for line in out.getvalue().splitlines()]
    return [event for event in found if event.kind != "doing"]


def started(seconds: float = 60.0) -> tuple[Part, io.StringIO]:
    out = io.StringIO()
    return Part(Job("kernels", "cpu", seconds, smoke=True), out), out


def test_a_part_that_cannot_begin_is_its_own_failure() -> None:
    out = io.StringIO()
    assert part.run(Job("no such part", "cpu", 1.0), out) == 1
    text = "KeyError: 'no such part'"
    assert events_of(out) == [Event("failed", "no such part", "the whole part", text=text)]


def test_a_case_that_fails_leaves_the_others() -> None:
    def bad() -> Cells:
        raise ValueError("no\nmore")

    one, out = started()
    one.measure("t", [("bad", bad), ("good", lambda: {"x": 1})])
    failed, row = events_of(out)
    assert failed == Event("failed", "t", "bad", text="ValueError: no") and one.failures == 1
    assert row == Event("row", "t", "good", {"x": 1})


def test_nothing_new_begins_when_time_is_over() -> None:
    late, out = started(-1.0)
    late.measure("t", [("one", dict), ("two", dict)])
    (note,) = events_of(out)
    assert note == Event("note", "t", text="left out, because its time was over: one, two")


@pytest.mark.parametrize(
    ("text", "fatal"),
    [("CUDA error: an illegal memory access was encountered", True),
     ("Triton Error [CUDA]: an illegal memory access was encountered", True),
     ("CUDA error: device-side assert triggered", True),
     ("CUDA error: out of memory", False), ("shape mismatch", False),
     ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul", False)],
)  # fmt: skip
def test_what_leaves_a_gpu_unusable_ends_the_part(text: str, fatal: bool) -> None:
    def bad() -> Cells:
        raise RuntimeError(text)

    one, out = started()
    if fatal:
        with pytest.raises(RuntimeError, match="CUDA"):
            one.attempt("t", "case", bad)
    else:
        one.attempt("t", "case", bad)
        assert [event.kind for event in events_of(out)] == ["failed"]


def test_a_wrong_kernel_is_a_failure_and_the_others_have_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [spec for spec in kernels.specs_in(()) if spec.name in ("silu_mul", "scale_sums")]
    monkeypatch.setattr(kernels, "specs_in", lambda names: specs)
    error = kernels._error

    def wrong(part: Part, spec: kernels.KernelSpec, *rest: object) -> float:
        return 3.0 if spec.name == "silu_mul" else error(part, spec, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "_error", wrong)
    one, out = started()
    kernels.correctness(one)
    failed, *rows = events_of(out)
    assert failed.name.startswith("silu_mul") and "3.00 times" in failed.text
    names = ["scale_sums", *(f"{use} blocks" for use in ("gather", "scatter", "copy", "checksum"))]
    assert [row.name.startswith(name) for row, name in zip(rows, names, strict=True)] == [True] * 5


def test_where_no_gpu_is_the_part_says_so() -> None:
    out = io.StringIO()
    assert part.run(Job("machine", "cuda:0", 1.0), out) == 1
    assert "--smoke is a dry run without one" in events_of(out)[0].text
