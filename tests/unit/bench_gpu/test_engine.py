"""Transformers beside the engine: what it fails with costs our own figures nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.gpu import engine
from benchmarks.gpu.driving import Driver
from benchmarks.gpu.job import Ceilings, Job, Note
from benchmarks.gpu.our_engine import BF16
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

    def decode(self, batch: int, context: int, steps: int) -> tuple[float, str]:
        return self.prefill(batch)

    def prefill(self, tokens: int) -> tuple[float, str]:
        self.calls += 1
        if self._error is not None:
            raise self._error
        return 0.03, "static"


def measuring(error: Exception | None) -> tuple[engine._Measuring, Theirs]:
    job = Job("engine", "cpu", 60.0, ceilings=Ceilings(3e12, 7e14))
    rival = Theirs(error)
    parts: Any = (job, GPU_SHAPES["8B"], BF16, None, rival)
    return engine._Measuring(*parts), rival


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_ours_is_measured_where_transformers_fails(what: str) -> None:
    one, rival = measuring(TypeError("no such argument"))
    cells = getattr(one, what)(cast("Driver", Ours()), 64)
    assert next(iter(cells.values())) == 10.0 and "x transformers" not in cells
    assert rival.calls == 1
    (note,) = one.told("decode")
    assert isinstance(note, Note) and "transformers: TypeError: no such argument" in note.text
    assert not list(one.told("decode"))


def test_both_are_measured_in_turn() -> None:
    one, rival = measuring(None)
    cells = one.decode(cast("Driver", Ours()), 64)
    assert cells["x transformers"] == pytest.approx(3.0) and cells["its cache"] == "static"
    assert rival.calls == 3 and not list(one.told("decode"))


def test_a_gpu_that_takes_no_more_work_ends_it_all() -> None:
    one, _ = measuring(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        one.decode(cast("Driver", Ours()), 8)
