"""Transformers beside the engine: its failures take nothing from our figures; a step's parts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.gpu import engine
from benchmarks.gpu.part import Event, Job, Part
from benchmarks.shapes import GPU_SHAPES, SHAPES

EIGHT, ONE = GPU_SHAPES["8B"], GPU_SHAPES["1B"]


class Ours:
    """A driver whose steps take 10 ms."""

    def decode(self, *_: Any) -> float:
        return 0.01

    prefill = decode


class Theirs:
    """Fails with `error`, if that is one."""

    def __init__(self, error: Exception | None) -> None:
        self.calls, self._error = 0, error

    def measure(self, *_: int) -> tuple[float, str]:
        self.calls += 1
        if self._error is not None:
            raise self._error
        return 0.03, "static"


def measure(what: str, error: Exception | None) -> tuple[dict[str, Any], Theirs, list[Event]]:
    """Cells of 64 sequences or tokens, and what was sent meanwhile."""
    events: list[Event] = []
    part = Part(
        Job("engine", "", "cpu", 60.0, copy_bytes_per_s=3e12, matmul_flops=7e14), events.append
    )
    one = engine.Measuring(part, EIGHT, engine.BF16)
    rival: Any = Theirs(error)
    one.rival = rival
    return getattr(one, what)(Ours(), 64), rival, events


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_ours_is_measured_where_transformers_fails(what: str) -> None:
    cells, rival, (note,) = measure(what, TypeError("no such argument"))
    assert next(iter(cells.values())) == 10.0 and "x transformers" not in cells
    assert rival.calls == 1 and note.text.endswith("no transformers: TypeError: no such argument")


def test_both_are_measured_in_turn() -> None:
    cells, rival, events = measure("decode", None)
    assert cells["x transformers"] == pytest.approx(3.0) and cells["its cache"] == "static"
    assert rival.calls == 3 and not events
    with pytest.raises(RuntimeError, match="illegal"):  # the GPU takes no more work
        measure("decode", RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_step_is_its_kernels_and_the_rest() -> None:
    for name, short in (
        ("void at::native::vectorized_kernel<4, at::native::Fill>(int)", "vectorized_kernel"),
        ("void at::native::(anonymous namespace)::cat_batched<int>(float*)", "cat_batched"),
        ("decode_kernel", "decode_kernel"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
    ):
        assert engine.short(name) == short
    times = Counter({f"k{n}": 100.0 * (20 - n) for n in range(10)})
    rows = engine.step_table(times, Counter(dict.fromkeys(times, 6)), steps=2, step_us=10_000.0)
    assert list(rows) == [*(f"k{n}" for n in range(8)), "other kernels", "idle, or waiting"]
    assert rows["k0"] == {"us a step": 1000.0, "of step": 0.1, "calls": 3.0}
    assert rows["other kernels"]["us a step"] == (1200 + 1100) / 2
    assert sum(float(cells["of step"] or 0) for cells in rows.values()) == pytest.approx(1.0)
    overlapping = engine.step_table(Counter({"k": 50.0}), Counter({"k": 1}), 1, 40.0)
    assert overlapping["idle, or waiting"]["us a step"] == 0.0


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
