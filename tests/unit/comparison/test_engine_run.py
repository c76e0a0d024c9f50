"""A real run of Baton's candidate on a tiny model, beside one that is not installed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.engine import candidates, run
from benchmarks.engine.candidates import Entry, Rivals
from benchmarks.engine.conversation import ROOT
from benchmarks.shapes import SHAPES

ABSENT = """
from benchmarks.candidates.answering import main
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


SLOW = """
import signal, subprocess, time
from benchmarks.candidates.answering import main
class Slow:
    def about(self): return {}
    def decode(self, batch, context, steps):
        subprocess.run(["sleep", "60"])
def load(setup):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a library in the middle of its work does
    return Slow()
main(load)
"""
BENCH = """
import runpy, sys
from benchmarks import checkpoint
from benchmarks.engine import candidates
checkpoint.directory_of = lambda shape, cache: cache
candidates.ENTRIES["baton-float32"] = candidates.Entry("baton-float32", "slow_candidate")
sys.argv = ["benchmarks", "engine", "--shape", "tiny", "--candidates", "baton-float32"]
runpy.run_module("benchmarks", run_name="__main__")
"""


def running(folder: Path) -> dict[int, str]:
    """What runs with `folder` in its environment: command lines by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_its_candidates_end_with_it(tmp_path: Path, signum: signal.Signals) -> None:
    """At once and without a traceback, whatever they are doing, and what they started too.

    Who is killed can end nothing: then the kernel ends the candidates themselves.
    """
    (tmp_path / "slow_candidate.py").write_text(SLOW)
    path = f"{tmp_path}:{ROOT}"
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert bench.stderr is not None
    try:
        assert any("warm-up: batch 1" in line for line in bench.stderr), "it ended"
        until(lambda: any("sleep" in line for line in running(tmp_path).values()))
        os.killpg(bench.pid, signum)  # as a terminal does
        assert bench.wait(5) == (130 if signum != signal.SIGKILL else -signum)
        assert "Traceback" not in bench.stderr.read()
        name = "slow_candidate" if signum == signal.SIGKILL else ""
        until(lambda: not any(name in line for line in running(tmp_path).values()))
    finally:
        for pid in running(tmp_path):
            os.kill(pid, signal.SIGKILL)
        bench.communicate()


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
