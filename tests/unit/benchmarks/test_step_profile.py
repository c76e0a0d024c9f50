"""The step profile times every part of a real engine."""

from __future__ import annotations

from pathlib import Path

from baton.config import EngineConfig
from baton.engine import build
from benchmarks.scenarios.step_profile import PARTS, profile
from tests.unit.engine.checkpoints import make_checkpoint


def test_every_part_of_a_step_takes_time(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "LlamaForCausalLM")
    settings = EngineConfig(model=str(tmp_path), kv_blocks=64, dtype="float32", threads=1)
    parts, phases = profile(build.load(settings), batch=3, context=20, steps=3)
    assert set(parts) == {*PARTS, "rest", "step"}
    assert all(seconds > 0 for seconds in parts.values())
    assert max(parts.values()) == parts["step"]
    assert 0 <= sum(phases.values()) < parts["step"] * 3
