"""The step profile times every part of a real engine."""

from __future__ import annotations

from pathlib import Path

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.runner import Runner
from baton.sampling import SamplingParams
from benchmarks.scenarios.step_profile import PARTS, WARM_UP, Instant, profile
from tests.unit.engine.checkpoints import make_checkpoint


def test_every_part_of_a_step_takes_time(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "LlamaForCausalLM")
    settings = EngineConfig(model=str(tmp_path), kv_blocks=64, dtype="float32", threads=1)
    loaded = build.load(settings)
    assert isinstance(loaded.runner, Runner)
    params = SamplingParams(max_tokens=WARM_UP + 5, ignore_eos=True)
    found = profile(loaded, loaded.runner.model, params, context=20, batch=3)
    assert set(found.parts) == {*PARTS, "rest", "step"}
    assert all(seconds > 0 for seconds in found.parts.values())
    assert max(found.parts.values()) == found.parts["step"]


def test_a_model_that_takes_no_time_leaves_the_engine(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "LlamaForCausalLM")
    settings = EngineConfig(model=str(tmp_path), kv_blocks=64, dtype="float32", threads=1)
    loaded = build.load(settings)
    params = SamplingParams(max_tokens=WARM_UP + 5, ignore_eos=True, temperature=1.0)
    model = Instant(loaded.model_config.vocab_size, rows=2)
    found = profile(loaded, model, params, context=20, batch=2)
    assert found.phases == {}
    assert found.parts["model"] < found.parts["step"]
