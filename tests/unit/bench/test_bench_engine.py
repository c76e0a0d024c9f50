"""`baton bench engine`: rates of prompts and steps of a model that is loaded here."""

import pytest

from baton.bench.engine import measure
from baton.config import EngineConfig
from baton.engine import build
from baton.errors import ConfigError
from baton.simulator import measure as simulator
from tests.unit.engine.checkpoints import make_checkpoint

WINDOWED = {"num_hidden_layers": 6, "sliding_window": 400, "query_pre_attn_scalar": 16}


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


def test_batches_fit_into_the_cache_of_all_groups_of_layers(tmp_path):
    """Each of 6 groups has 5 blocks of the 62 tokens that a sequence has in the end."""
    make_checkpoint(tmp_path, "Gemma3ForCausalLM", **WINDOWED)
    settings = EngineConfig(model=str(tmp_path), kernels="torch", max_batch=6, kv_blocks=99)
    found = measure(settings, 40, lambda rate: None)
    assert [rate["batch"] for rate in found["decode"]] == [1, 2, 4]


def test_a_simulations_batches_fit_into_the_cache_of_all_groups_of_layers(tmp_path):
    make_checkpoint(tmp_path, "Gemma3ForCausalLM", **WINDOWED)
    shown = []
    settings = EngineConfig(model=str(tmp_path), kernels="torch", max_batch=16, kv_blocks=300)
    simulator.measure(settings, shown.append)
    decodes = [" ".join(text.split()[:5]) for text in shown if text.startswith("decode")]
    assert [text for text in decodes if text.endswith(" 128")] == [
        "decode batch 1, context 128", "decode batch 4, context 128"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "measures", [lambda settings: measure(settings, 40, print),
                 lambda settings: simulator.measure(settings, print)]
)  # fmt: skip
@pytest.mark.parametrize(
    ("option", "given"),
    [("--speculate", {"speculate": 4}), ("--speculative-model", {"speculative_model": "draft"})],
)
def test_speculation_is_refused_before_anything_is_loaded(measures, option, given, monkeypatch):
    monkeypatch.setattr(build, "load", lambda settings: pytest.fail("the model is loaded"))
    with pytest.raises(ConfigError, match=f"{option}: .*`baton bench serve`"):
        measures(EngineConfig(model="none", **given))
