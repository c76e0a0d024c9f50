"""Tables, verdicts and failures as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.job import Ceilings, Event, Failed, Note, Row
from benchmarks.gpu.run import ceilings_of
from benchmarks.gpu.targets import TARGETS

HEAD: dict[str, Any] = {"date": "2000-01-01", "seconds": 12.3, "smoke": False}
EVENTS: list[Event] = [
    Row("machine", "device", {"name": "a GPU", "memory": "80 GiB"}),
    Row("ceilings", "measured", {"copy GB/s": 3000.0, "matmul TFLOP/s": 700.5}),
    Row("decode", "batch 1", {"tokens/s": 131.49, "of floor": 0.9123, "its cache": "static"}),
    Row("decode", "batch 64", {"tokens/s": 5123.4, "error": 0.00123}),
    Note("decode", "fp8 is left out"),
    Failed("decode", "batch 256", "RuntimeError: no"),
]


def test_text_has_a_table_for_each_kind_of_row_and_ends_with_what_failed() -> None:
    lines = list(report.text_of(EVENTS, HEAD))
    assert lines[0] == "bench gpu, 2000-01-01, 12 s"
    assert "  name: a GPU" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("decode"))
    assert lines[at].split() == ["decode", "tokens/s", "of", "floor", "its", "cache", "error"]
    assert lines[at + 1].split() == ["batch", "1", "131", "91.2%", "static", "-"]
    assert lines[at + 2].split() == ["batch", "64", "5,123", "-", "-", "1.2e-03"]
    assert lines[at + 3 : at + 5] == ["  fp8 is left out", "  batch 256: FAILED: RuntimeError: no"]
    at = lines.index("failed: 1")
    assert lines[at + 1] == "  decode, batch 256: RuntimeError: no"


def test_targets_come_last_with_what_became_of_them() -> None:
    wanted = TARGETS[3]
    row = Row(wanted.table, wanted.row, {wanted.cell: 0.91})
    missed = Row(TARGETS[-1].table, TARGETS[-1].row, {TARGETS[-1].cell: 4.2})
    *lines, last = list(report.text_of([*EVENTS, row, missed], HEAD))[-len(TARGETS) - 1 :]
    assert last == f"targets: 1 met, 1 missed, {len(TARGETS) - 2} not measured"
    assert [line.split()[-4:] for line in (lines[3], lines[-1])] == [
        [">=", "80.0%", "91.0%", "met"], ["<=", "3", "4.2", "missed"],
    ]  # fmt: skip
    assert lines[0].startswith(TARGETS[0].text) and lines[0].endswith("-  not measured")


def test_a_row_in_brief_has_its_first_figure_and_its_shares() -> None:
    assert report.brief(EVENTS[0]) == ""  # type: ignore[arg-type]
    assert report.brief(EVENTS[2]) == " - 131 tokens/s, 91.2% of floor"  # type: ignore[arg-type]


def test_what_parts_printed_follows_failures() -> None:
    head = {**HEAD, "logs": {"machine": [], "engine": ["Traceback", "RuntimeError: no"]}}
    lines = list(report.text_of(EVENTS, head))
    at = lines.index("failed: 1")
    assert lines[at + 2 : at + 5] == [
        "\nthe end of what engine printed:",
        "  Traceback",
        "  RuntimeError: no",
    ]
    assert not any("machine printed" in line for line in lines)


def test_a_dry_run_says_so_and_judges_nothing() -> None:
    head = {**HEAD, "smoke": True}
    text = "\n".join(report.text_of(EVENTS, head))
    assert report.DRY in text and TARGETS[0].text not in text
    assert report.json_of(EVENTS, head)["targets"] == []


def test_json_has_everything() -> None:
    found = json.loads(json.dumps(report.json_of(EVENTS, HEAD)))
    assert found["schema"] == "baton.bench.gpu/1" and found["date"] == "2000-01-01"
    assert found["tables"]["decode"][0] == {
        "name": "batch 1", "tokens/s": 131.49, "of floor": 0.9123, "its cache": "static",
    }  # fmt: skip
    assert found["notes"] == [{"table": "decode", "text": "fp8 is left out"}]
    assert found["failed"] == [
        {"table": "decode", "name": "batch 256", "error": "RuntimeError: no"}
    ]
    assert len(found["targets"]) == len(TARGETS)


def test_ceilings_are_those_that_the_machine_part_told() -> None:
    assert [ceilings_of(event) for event in EVENTS[:3]] == [None, Ceilings(3e12, 700.5e12), None]
