"""Transformers beside the engine: its failures take nothing from our figures."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.gpu import engine
from benchmarks.gpu.part import Event, Job, Part
from benchmarks.shapes import GPU_SHAPES, SHAPES

EIGHT, ONE = GPU_SHAPES["8B"], GPU_SHAPES["1B"]


class Timed:
    """An engine whose steps take 10 ms, or transformers: 30 ms, or `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls, self._error = 0, error

    def decode(self, *_: Any) -> float:
        return 0.01

    prefill = decode

    def measure(self, *_: int) -> tuple[float, str]:
        self.calls += 1
        if self._error is not None:
            raise self._error
        return 0.03, "static"


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_ours_is_measured_with_transformers_in_turn_or_without_where_it_fails(what: str) -> None:
    def measure(error: Exception | None) -> tuple[dict[str, Any], int, list[Event]]:
        """Cells of 64 sequences or tokens, calls of transformers, and what was sent meanwhile."""
        events: list[Event] = []
        job = Job("engine", "", "cpu", 60.0, copy_bytes_per_s=3e12, matmul_flops=7e14)
        measuring, rival = (
            engine.Measuring(Part(job, events.append), EIGHT, engine.BF16),
            Timed(error),
        )
        measuring.rival = cast(Any, rival)
        return getattr(measuring, what)(Timed(), 64), rival.calls, events

    cells, calls, events = measure(None)
    assert cells["x transformers"] == pytest.approx(3.0) and cells["its cache"] == "static"
    assert calls == 3 and not events
    cells, calls, (note,) = measure(TypeError("no such argument"))
    assert next(iter(cells.values())) == 10.0 and "x transformers" not in cells
    assert calls == 1 and note.text.endswith("no transformers: TypeError: no such argument")
    with pytest.raises(RuntimeError, match="illegal"):  # the GPU takes no more work
        measure(RuntimeError("CUDA error: an illegal memory access was encountered"))


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
