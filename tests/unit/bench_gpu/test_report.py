"""Tables, verdicts and failures as text and as JSON; floors by hand; the command line."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from benchmarks.gpu import engine, kernels, report, run
from benchmarks.gpu.part import Event, Job
from benchmarks.gpu.report import TARGETS, Target
from benchmarks.shapes import GPU_SHAPES, SHAPES

EIGHT, ONE = GPU_SHAPES["8B"], GPU_SHAPES["1B"]
HEAD: dict[str, Any] = {"date": "2000-01-01", "seconds": 12.3, "smoke": False}
EVENTS = [
    Event("row", "machine", "device", {"name": "a GPU", "memory": "80 GiB"}),
    Event("row", "ceilings", "measured", {"copy GB/s": 3000.0, "matmul TFLOP/s": 700.5}),
    Event("row", "decode", "batch 1", {"tokens/s": 131.49, "of floor": 0.9123, "by": "static"}),
    Event("row", "decode", "batch 64", {"tokens/s": 5123.4}),
    Event("note", "decode", text="fp8 is left out"),
    Event("failed", "decode", "batch 256", text="RuntimeError: no"),
]


def test_text_has_a_table_for_each_kind_of_row_and_then_what_failed() -> None:
    head = {**HEAD, "logs": {"machine": [], "engine": ["Traceback", "RuntimeError: no"]}}
    lines = list(report.text_of(EVENTS, head))
    assert lines[0] == "bench gpu, 2000-01-01, 12 s" and "  name: a GPU" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("decode"))
    assert lines[at].split() == ["decode", "tokens/s", "of", "floor", "by"]
    assert lines[at + 1].split() == ["batch", "1", "131", "91.2%", "static"]
    assert lines[at + 2].split() == ["batch", "64", "5,123", "-", "-"]
    assert lines[at + 3 : at + 5] == ["  fp8 is left out", "  batch 256: FAILED: RuntimeError: no"]
    at = lines.index("\nfailed: 1")
    assert lines[at + 1] == "  decode, batch 256: RuntimeError: no"
    told = ["\nthe end of what engine printed:", "  Traceback", "  RuntimeError: no"]
    assert lines[at + 2 : at + 5] == told


def test_targets_come_last_with_their_verdicts() -> None:
    one, last = TARGETS[3], TARGETS[-1]
    rows = [Event("row", one.table, one.row, {one.cell: 0.91}),
            Event("row", last.table, last.row, {last.cell: 4.2})]  # fmt: skip
    *lines, counts = list(report.text_of([*EVENTS, *rows], HEAD))[-len(TARGETS) - 1 :]
    assert counts == f"targets: 1 met, 1 missed, {len(TARGETS) - 2} not measured"
    assert lines[3].split()[-4:] == [">=", "80.0%", "91.0%", "met"]
    assert lines[-1].split()[-4:] == ["<=", "3", "4.2", "missed"]


def test_progress_has_a_row_s_first_figure_and_its_shares() -> None:
    lines = [report.line_of(event) for event in (EVENTS[0], EVENTS[2], *EVENTS[4:])]
    assert lines == [
        "  machine: device", "  decode: batch 1 - 131 tokens/s, 91.2% of floor",
        "  decode: fp8 is left out", "  decode: batch 256: FAILED: RuntimeError: no",
    ]  # fmt: skip


def test_json_has_everything_and_a_dry_run_judges_nothing() -> None:
    found = json.loads(json.dumps(report.json_of(EVENTS, HEAD)))
    assert found["schema"] == "baton.bench.gpu/1" and found["date"] == "2000-01-01"
    assert found["tables"]["decode"][0] == {
        "name": "batch 1", "tokens/s": 131.49, "of floor": 0.9123, "by": "static",
    }  # fmt: skip
    assert found["notes"] == [{"table": "decode", "text": "fp8 is left out"}]
    assert found["failed"][0]["error"] == "RuntimeError: no"
    assert len(found["targets"]) == len(TARGETS)
    dry = {**HEAD, "smoke": True}
    assert report.json_of(EVENTS, dry)["targets"] == []
    text = "\n".join(report.text_of(EVENTS, dry))
    assert report.DRY in text and TARGETS[0].text not in text


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
        rows |= {(table, engine.title_of(EIGHT, engine.BF16, size)) for size in sizes}
    assert {(target.table, target.row) for target in TARGETS} <= rows


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [(0.8, False, "met"), (0.79, False, "missed"), (0.8, True, "met"), (0.81, True, "missed"),
     (float("nan"), False, "missed"), (None, True, "not measured")],
)  # fmt: skip
def test_a_verdict(value: float | None, at_most: bool, verdict: str) -> None:
    assert Target("any", "table", "row", "cell", 0.8, at_most).verdict(value) == verdict


def test_floors() -> None:
    assert (EIGHT.num_parameters, ONE.num_parameters) == (8_030_261_248, 1_235_814_400)
    assert not set(SHAPES) & set(GPU_SHAPES)
    embedding, norms = 128256 * 4096, (2 * 32 + 1) * 4096
    # A step reads all weights but the embedding, unless that is also the output layer.
    assert engine.weight_bytes(EIGHT) == 2 * (EIGHT.num_parameters - embedding - norms)
    assert engine.weight_bytes(ONE) == 2 * (ONE.num_parameters - (2 * 16 + 1) * 2048)
    assert engine.kv_bytes(EIGHT) == 128 << 10
    assert engine.kv_bytes(EIGHT, engine.FP8) == 2 * 32 * 8 * (128 + 4)
    matrices = 2 * 10 * (EIGHT.num_parameters - 2 * embedding - norms)
    attention = 32 * 4 * 32 * 128 * (10 * 11 / 2)
    assert engine.prefill_flops(EIGHT, 10) == matrices + attention + 2 * embedding


def test_the_last_part_may_run_over_as_the_others_may(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[Job, float]] = []
    monkeypatch.setattr(run, "run_part", lambda job, log, grace: jobs.append((job, grace)) or [])
    list(run.run(Job("", "cpu", 60.0), dict.fromkeys(("speed", "engine"))))  # type: ignore[arg-type]
    assert all(grace_s > 10 and job.seconds > 15 for job, grace_s in jobs)
    last, grace_s = jobs[-1]
    assert last.seconds + grace_s == pytest.approx(60.0, abs=2.0)


def test_a_device_has_a_number() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    run.add_options(parser)
    for text, device in (("cuda", "cuda:0"), ("cuda:3", "cuda:3")):
        assert parser.parse_args(["--device", text]).device == device
    for text in ("cpu", "cuda:x", "gpu"):
        with pytest.raises(argparse.ArgumentError, match="--smoke is a dry run"):
            parser.parse_args(["--device", text])
