"""Transformers beside the engine: its failures take nothing from our figures; a step's parts."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest

from benchmarks.gpu import engine
from benchmarks.gpu.part import Job, Part
from benchmarks.shapes import GPU_SHAPES


class Ours:
    """A driver whose steps take 10 ms."""

    def decode(self, batch: int, context: int, steps: int) -> float:
        return 0.01

    def prefill(self, tokens: int) -> float:
        return 0.01


class Theirs:
    """Fails with `error`, if that is one."""

    def __init__(self, error: Exception | None) -> None:
        self.calls, self._error = 0, error

    def decode(self, *_: int) -> tuple[float, str]:
        self.calls += 1
        if self._error is not None:
            raise self._error
        return 0.03, "static"

    prefill = decode


def measure(what: str, error: Exception | None) -> tuple[dict[str, Any], Theirs, str]:
    """Cells of 64 sequences or tokens, and what was written meanwhile."""
    out, rival = io.StringIO(), Theirs(error)
    part: Any = Part(Job("engine", "cpu", 60.0, copy_bytes_per_s=3e12, matmul_flops=7e14), out)
    parts: Any = (part, GPU_SHAPES["8B"], engine.BF16, rival)
    cells = getattr(engine.Measuring(*parts), what)(Ours(), 64)
    return cells, rival, out.getvalue()


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_ours_is_measured_where_transformers_fails(what: str) -> None:
    cells, rival, written = measure(what, TypeError("no such argument"))
    assert next(iter(cells.values())) == 10.0 and "x transformers" not in cells
    assert rival.calls == 1 and written.count("transformers: TypeError: no such argument") == 1


def test_both_are_measured_in_turn() -> None:
    cells, rival, written = measure("decode", None)
    assert cells["x transformers"] == pytest.approx(3.0) and cells["its cache"] == "static"
    assert rival.calls == 3 and not written


def test_a_gpu_that_takes_no_more_work_ends_it_all() -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        measure("decode", RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(
    ("name", "short"),
    [("void at::native::vectorized_elementwise_kernel<4, at::native::Fill>(int)",
      "vectorized_elementwise_kernel"),
     ("void at::native::(anonymous namespace)::cat_batched<int>(float*)", "cat_batched"),
     ("decode_kernel", "decode_kernel"), ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH")],
)  # fmt: skip
def test_a_kernel_is_named_without_templates_and_arguments(name: str, short: str) -> None:
    assert engine.short(name) == short


def test_a_step_is_its_kernels_and_the_rest() -> None:
    times = Counter({f"k{n}": 100.0 * (20 - n) for n in range(10)})
    rows = engine.step_table(times, Counter(dict.fromkeys(times, 6)), steps=2, step_us=10_000.0)
    assert list(rows) == [*(f"k{n}" for n in range(8)), "other kernels", "idle, or waiting"]
    assert rows["k0"] == {"us a step": 1000.0, "of step": 0.1, "calls": 3.0}
    assert rows["other kernels"]["us a step"] == (1200 + 1100) / 2
    assert sum(float(cells["of step"] or 0) for cells in rows.values()) == pytest.approx(1.0)
    overlapping = engine.step_table(Counter({"k": 50.0}), Counter({"k": 1}), 1, 40.0)
    assert overlapping["idle, or waiting"]["us a step"] == 0.0
