"""`baton bench engine`: rates of prompts and steps of a model that is loaded here."""

import pytest

from baton.bench.engine import measure
from baton.config import EngineConfig
from baton.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint


def test_rates_of_prompts_by_length_and_of_steps_by_batch(tmp_path):
    make_checkpoint(tmp_path)
    settings = EngineConfig(model=str(tmp_path), kernels="torch", max_batch=6, kv_blocks=40)
    shown = []
    found = measure(settings, 40, shown.append)
    assert (found["model"], found["device"]) == (tmp_path.name, "cpu")
    assert [rate["prompt_tokens"] for rate in found["prefill"]] == [128]  # contexts end at 512
    assert [rate["batch"] for rate in found["decode"]] == [1, 2, 4, 6]
    for rate in found["prefill"]:
        assert rate["tokens_per_s"] == pytest.approx(128e3 / rate["ms"])
    for rate in found["decode"]:
        assert rate["tokens_per_s"] == pytest.approx(1e3 * rate["batch"] / rate["step_ms"])
    assert len(shown) == 5


def test_a_context_that_does_not_fit_is_refused(tmp_path):
    make_checkpoint(tmp_path)
    settings = EngineConfig(model=str(tmp_path), kernels="torch", kv_blocks=4)
    with pytest.raises(ConfigError, match="--context 500 does not fit: contexts end at 63"):
        measure(settings, 500, print)
