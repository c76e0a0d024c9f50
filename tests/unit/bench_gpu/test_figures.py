"""Floors, transformers beside the engine, and the report: tables, verdicts, failures."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.gpu import engine, kernels, run
from benchmarks.gpu.part import Part
from benchmarks.gpu.run import TARGETS
from benchmarks.shapes import GPU_SHAPES, SHAPES

EIGHT, ONE = GPU_SHAPES["8B"], GPU_SHAPES["1B"]


class Timed:
    """An engine whose steps take 10 ms, or transformers: 30 ms, or `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls, self._error = 0, error

    def decode(self, batch: int, context: int, *steps: int) -> Any:
        self.calls += 1
        if self._error is not None:
            raise self._error
        return 0.01 if len(steps) == 2 else (0.03 * steps[0], "static")

    def prefill(self, tokens: int) -> Any:
        return self.decode(1, tokens, 1)


class Ours(Timed):
    def prefill(self, tokens: int) -> float:
        return 0.01


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_ours_is_measured_with_transformers_in_turn_or_without_where_it_fails(what: str) -> None:
    def measure(error: Exception | None) -> tuple[dict[str, Any], int, list[dict[str, Any]]]:
        """Cells of 64 sequences or tokens, calls of transformers, and what was sent meanwhile."""
        sent: list[dict[str, Any]] = []
        part = Part(sent.append, "cpu", 60.0, copy_bytes_per_s=3e12, matmul_flops=7e14)
        measuring, rival = engine.Measuring(part, EIGHT, engine.BF16), Timed(error)
        measuring.rival = cast(Any, rival)
        return getattr(measuring, what)(Ours(), 64), rival.calls, sent

    cells, calls, sent = measure(None)
    assert cells["x transformers"] == pytest.approx(3.0) and cells["its cache"] == "static"
    assert calls == 3 and not sent
    cells, calls, (note,) = measure(TypeError("no such argument"))
    assert next(iter(cells.values())) == 10.0 and "x transformers" not in cells
    assert calls == 1 and note["note"].endswith("no transformers: TypeError: no such argument")
    with pytest.raises(RuntimeError, match="illegal"):  # the GPU takes no more work
        measure(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_floors() -> None:
    assert (EIGHT.num_parameters, ONE.num_parameters) == (8_030_261_248, 1_235_814_400)
    assert not set(SHAPES) & set(GPU_SHAPES)
    embedding, norms = 128256 * 4096, (2 * 32 + 1) * 4096
    # A step reads all weights but the embedding, unless that is also the output layer.
    assert engine.weight_bytes(EIGHT) == 2 * (EIGHT.num_parameters - embedding - norms)
    assert engine.weight_bytes(ONE) == 2 * (ONE.num_parameters - (2 * 16 + 1) * 2048)
    assert engine.BF16.layout(EIGHT).bytes_per_token == 128 << 10
    assert engine.FP8.layout(EIGHT).bytes_per_token == 2 * 32 * 8 * (128 + 4)
    matrices = 2 * 10 * (EIGHT.num_parameters - 2 * embedding - norms)
    attention = 32 * 4 * 32 * 128 * (10 * 11 / 2)
    assert engine.prefill_flops(EIGHT, 10) == matrices + attention + 2 * embedding


def test_the_report_has_tables_then_failures_then_targets() -> None:
    one, last = TARGETS[3], TARGETS[-1]
    report: dict[str, Any] = {
        "date": "2000-01-01", "seconds": 12.3, "smoke": False, "tables": {}, "notes": [],
        "failed": [],
    }  # fmt: skip
    for table, name, cells in (
        ("machine", "device", {"name of it": "a GPU", "memory": "80 GiB"}),
        ("ceilings", "measured", {"copy GB/s": 3000.0, "matmul TFLOP/s": 700.5}),
        ("decode", "batch 1", {"tokens/s": 131.49, "of floor": 0.9123, "by": "static"}),
        ("decode", "batch 64", {"tokens/s": 5123.4}),
        (one.table, one.row, {one.cell: 0.91}),
        (last.table, last.row, {last.cell: 4.2}),
        (TARGETS[0].table, TARGETS[0].row, {TARGETS[0].cell: float("nan")}),
    ):
        run.add(report, {"table": table, "name": name, "cells": cells})
    run.add(report, {"table": "decode", "note": "fp8 is left out"})
    error = {"error": "RuntimeError: no", "trace": ["Traceback", "RuntimeError: no"]}
    run.add(report, {"table": "decode", "name": "batch 256", **error})
    report["targets"] = run.verdicts(report["tables"])
    lines = list(run.text_of(report))
    assert lines[0] == "bench gpu, 2000-01-01, 12 s" and "  memory: 80 GiB" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("decode "))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["decode", "tokens/s", "of", "floor", "by"],
        ["batch", "1", "131", "91.2%", "static"],
        ["batch", "64", "5,123", "-", "-"],
    ]
    assert lines[at + 4] == "  fp8 is left out"
    at = lines.index("\nfailed: 1")
    assert lines[at + 1 : at + 3] == ["  decode, batch 256: RuntimeError: no", "    Traceback"]
    *targets, counts = lines[-len(TARGETS) - 1 :]
    assert counts == f"targets: 1 met, 2 missed, {len(TARGETS) - 3} not measured"
    assert targets[3].split()[-4:] == [">=", "80.0%", "91.0%", "met"]
    assert targets[-1].split()[-4:] == ["<=", "3", "4.2", "missed"]
    dry = "\n".join(run.text_of({**report, "smoke": True, "targets": []}))
    assert run.DRY in dry and one.text not in dry


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
        titles = (engine.title_of(EIGHT, engine.BF16, size) for size in sizes)
        rows |= {(table, title) for title in titles}
    assert {(target.table, target.row) for target in TARGETS} <= rows
