"""What is shown while parts run, at a terminal and in a file."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import process, run
from benchmarks.gpu.job import Doing, Event, Failed, Job, Note, Row
from benchmarks.gpu.progress import Progress

EVENTS: list[Event] = [
    Doing("decode", "batch 1"),
    Row("decode", "batch 1", {"ms a step": 7.5, "tokens/s": 133, "of floor": 0.81}),
    Doing("decode", "batch 8"),
    Failed("decode", "batch 8", "RuntimeError: no"),
    Note("decode", "the rest is left out"),
]


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO) -> str:
    progress = Progress(out, columns=30)
    for event in EVENTS:
        progress.show(event)
    progress.end()
    return out.getvalue()


def test_a_file_gets_what_was_found_one_line_each() -> None:
    lines = [re.sub(r"^ *\d+ s  ", "", line) for line in shown(io.StringIO()).splitlines()]
    assert lines == [
        "  decode: batch 1 - 7.5 ms a step, 81.0% of floor",
        "  decode: batch 8: FAILED: RuntimeError: no",
        "  decode: the rest is left out",
    ]


def test_a_terminal_also_gets_what_is_done_now_until_more_comes() -> None:
    text = shown(Terminal())
    first, *_ = text.split("\n")
    clear = "\r\x1b[2K"
    now, found = first.split(clear)[1:]
    assert now.endswith("  decode: batch 1 …") and len(now) < 30
    assert found.endswith("81.0% of floor")
    assert text.endswith(clear) and text.count("\n") == 3


def settings(*parts: str) -> run.Settings:
    return run.Settings(parts, 1.0, ("1B",), "cpu", smoke=True, quick=False)


def test_what_is_done_is_shown_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events(job: Job, log: Path, grace_s: float) -> Iterator[Event]:
        yield from EVENTS

    monkeypatch.setattr(process, "run", events)
    out = Terminal()
    kept = list(run.run(settings("speed"), tmp_path, Progress(out)))
    assert kept == [event for event in EVENTS if not isinstance(event, Doing)]
    assert "batch 1 …" in out.getvalue()


def test_the_last_part_may_run_over_as_the_others_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[tuple[Job, float]] = []

    def events(job: Job, log: Path, grace_s: float) -> Iterator[Event]:
        jobs.append((job, grace_s))
        yield from ()

    monkeypatch.setattr(process, "run", events)
    list(run.run(settings("speed", "engine"), tmp_path, Progress(io.StringIO())))
    for job, grace_s in jobs:
        assert grace_s > 10 and job.seconds > 15
    last, grace_s = jobs[-1]
    assert last.seconds + grace_s == pytest.approx(60.0, abs=2.0)


@pytest.mark.parametrize(("text", "device"), [("cuda", "cuda:0"), ("cuda:3", "cuda:3")])
def test_a_device_has_a_number(text: str, device: str) -> None:
    parser = argparse.ArgumentParser()
    run.add_options(parser)
    assert parser.parse_args(["--device", text]).device == device


@pytest.mark.parametrize("text", ["cpu", "cuda:x", "gpu"])
def test_other_devices_are_refused(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    run.add_options(parser)
    with pytest.raises(argparse.ArgumentError, match="--smoke is a dry run"):
        parser.parse_args(["--device", text])
