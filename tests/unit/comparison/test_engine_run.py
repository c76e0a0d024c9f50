"""A real run of Baton's candidate on a tiny model, beside one that is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.engine import candidates, run
from bench.engine.candidates import Entry, Rivals
from bench.shapes import SHAPES

ABSENT = """
from bench.candidates.answering import main
def load(setup):
    import surely_nobody_has_this_library
main(load)
"""


def settings(tmp_path: Path, *names: str, rivals: Rivals | None = None) -> run.Settings:
    return run.Settings(
        shape=SHAPES["tiny"],
        candidates=names,
        rivals=rivals or Rivals(),
        cache=tmp_path / "cache",
        cpus=(min(os.sched_getaffinity(0)),),
        threads=1,
        rounds=2,
        batches=(1, 3),
        context=40,
        prompts=(70,),
        kernels="torch",
    )


@pytest.mark.timeout(300)
def test_baton_is_measured_and_who_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_candidate.py").write_text(ABSENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    absent = Entry("vllm-bf16", "absent_candidate", is_ours=False)
    monkeypatch.setitem(candidates.ENTRIES, "vllm-bf16", absent)
    said: list[str] = []
    report = run.run(settings(tmp_path, "vllm-bf16", "baton-float32"), said.append)
    (baton,) = report["candidates"]
    assert baton["name"] == "baton-float32" and not baton["failures"]
    assert {label: len(rates) for label, rates in baton["rounds"].items()} == {
        "batch 1": 2, "batch 3": 2, "prompt 70": 2,
    }  # fmt: skip
    assert all(rate > 0 for rates in baton["rounds"].values() for rate in rates)
    assert report["about"]["baton-float32"]["model"] == "Model"
    told = "not installed: No module named 'surely_nobody_has_this_library'; docs/comparison.md"
    assert report["absent"]["vllm-bf16"].startswith(told)
    assert any(told in line for line in run.head_of(report))
    assert any("round 2 of 2: prompt 70" in line for line in said)


def test_nobody_to_measure_is_an_error(tmp_path: Path) -> None:
    nowhere = Rivals(venv=tmp_path / "no-such-environment")
    with pytest.raises(SystemExit, match="no candidate"):
        run.run(settings(tmp_path, "vllm-bf16", rivals=nowhere), lambda line: None)


def test_threads_are_told_before_anything_is_imported(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    rivals = Rivals(venv=tmp_path, llama_cpp=tmp_path / "llama")
    chosen = settings(tmp_path, rivals=rivals)
    entries = candidates.ENTRIES
    assert run.environment(chosen, entries["baton-bf16"])["OMP_NUM_THREADS"] == "1"
    assert "LD_PRELOAD" not in run.environment(chosen, entries["llama.cpp-bf16"])
    vllm = run.environment(chosen, entries["vllm-bf16"])
    assert vllm["LD_PRELOAD"].startswith(str(tmp_path / "lib" / "libiomp5.so"))
    assert vllm["LLAMA_CPP_LIB_PATH"] == str(tmp_path / "llama")


def test_every_pair_names_candidates_there_are() -> None:
    assert {name for pair in candidates.PAIRS for name in pair} <= candidates.ENTRIES.keys()
    assert set(candidates.DEFAULT) <= candidates.ENTRIES.keys()
