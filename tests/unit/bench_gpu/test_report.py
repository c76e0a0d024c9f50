"""Tables, verdicts and failures as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.gpu import engine, kernels, report
from benchmarks.gpu.part import Event
from benchmarks.gpu.report import TARGETS
from benchmarks.shapes import GPU_SHAPES

HEAD: dict[str, Any] = {"date": "2000-01-01", "seconds": 12.3, "smoke": False}
ONE, LAST = TARGETS[3], TARGETS[-1]
EVENTS = [
    Event("row", "machine", "device", {"name": "a GPU", "memory": "80 GiB"}),
    Event("row", "ceilings", "measured", {"copy GB/s": 3000.0, "matmul TFLOP/s": 700.5}),
    Event("row", "decode", "batch 1", {"tokens/s": 131.49, "of floor": 0.9123, "by": "static"}),
    Event("row", "decode", "batch 64", {"tokens/s": 5123.4}),
    Event("note", "decode", text="fp8 is left out"),
    Event("failed", "decode", "batch 256", text="RuntimeError: no"),
    Event("row", ONE.table, ONE.row, {ONE.cell: 0.91}),
    Event("row", LAST.table, LAST.row, {LAST.cell: 4.2}),
    Event("row", TARGETS[0].table, TARGETS[0].row, {TARGETS[0].cell: float("nan")}),
]


def test_text_has_tables_then_failures_then_targets() -> None:
    head = {**HEAD, "logs": {"machine": [], "engine": ["Traceback", "RuntimeError: no"]}}
    lines = list(report.text_of(EVENTS, head))
    assert lines[0] == "bench gpu, 2000-01-01, 12 s" and "  name: a GPU" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("decode "))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["decode", "tokens/s", "of", "floor", "by"],
        ["batch", "1", "131", "91.2%", "static"],
        ["batch", "64", "5,123", "-", "-"],
    ]
    assert lines[at + 4 : at + 6] == ["  fp8 is left out", "  batch 256: FAILED: RuntimeError: no"]
    at = lines.index("\nfailed: 1")
    assert lines[at + 1 : at + 5] == [
        "  decode, batch 256: RuntimeError: no", "\nthe end of what engine printed:",
        "  Traceback", "  RuntimeError: no",
    ]  # fmt: skip
    *targets, counts = lines[-len(TARGETS) - 1 :]
    assert counts == f"targets: 1 met, 2 missed, {len(TARGETS) - 3} not measured"
    assert targets[3].split()[-4:] == [">=", "80.0%", "91.0%", "met"]
    assert targets[-1].split()[-4:] == ["<=", "3", "4.2", "missed"]
    assert [report.line_of(event) for event in (EVENTS[0], EVENTS[2], *EVENTS[4:6])] == [
        "  machine: device", "  decode: batch 1 - 131 tokens/s, 91.2% of floor",
        "  decode: fp8 is left out", "  decode: batch 256: FAILED: RuntimeError: no",
    ]  # fmt: skip


def test_json_has_everything_and_a_dry_run_judges_nothing() -> None:
    found = json.loads(json.dumps(report.json_of(EVENTS[:-1], HEAD)))
    assert found["schema"] == "baton.bench.gpu/1" and found["date"] == "2000-01-01"
    assert found["tables"]["decode"][0] == {
        "name": "batch 1", "tokens/s": 131.49, "of floor": 0.9123, "by": "static",
    }  # fmt: skip
    assert found["notes"] == [{"table": "decode", "text": "fp8 is left out"}]
    assert found["failed"][0]["error"] == "RuntimeError: no"
    assert [one["verdict"] for one in found["targets"]].count("met") == 1
    dry = {**HEAD, "smoke": True}
    assert report.json_of(EVENTS, dry)["targets"] == []
    text = "\n".join(report.text_of(EVENTS, dry))
    assert report.DRY in text and ONE.text not in text


def test_every_target_names_a_row_that_a_full_run_has() -> None:
    rows = {("transfer", "cuda_ipc"), ("handoff", "cuda_ipc")}
    for batch in kernels.BATCHES:
        for context in kernels.CONTEXTS:
            rows.add(("decode attention", kernels.decode_name("bf16", batch, context)))
    rows |= {("prefill attention", kernels.prefill_name(*prompt)) for prompt in kernels.PROMPTS}
    for table, sizes in (
        ("decode", [f"batch {batch}" for batch in engine.BATCHES]),
        ("prefill", [f"{tokens} tokens" for tokens in engine.PROMPTS]),
    ):
        titles = (engine.title_of(GPU_SHAPES["8B"], engine.BF16, size) for size in sizes)
        rows |= {(table, title) for title in titles}
    assert {(target.table, target.row) for target in TARGETS} <= rows
