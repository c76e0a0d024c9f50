"""A LoRA adapter gives what the model with its update added to the weights gives."""

import json

import pytest
import torch
from safetensors.torch import save_file

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.checkpoint.tensors import LORA_CONFIG, LORA_FILE, fingerprint
from baton.engine.models.loader import load_weights
from baton.engine.models.model_config import ModelConfig
from baton.errors import CheckpointError, ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.paged import PagedRun
from tests.unit.engine.quantized_checkpoints import make_quantized
from tests.unit.engine.small_models import KERNELS, feed, make
from tests.unit.engine.test_quantized_checkpoints import FORMATS

CPU = torch.device("cpu")
TOKENS = torch.randint(2, 300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
PREFIX = "base_model.model."


def make_adapter(directory, model, *, tensors=None, modules=(Q, DOWN), rank=4, **config):
    """An adapter in PEFT's format, as it saves one, and the updates `B @ A` of its modules."""
    generator = torch.Generator().manual_seed(rank)
    updates, stored = {}, {}
    for module in modules:
        outputs, inputs = model.get_submodule(module).weight.shape
        a = 0.3 * torch.randn(rank, inputs, generator=generator)
        b = 0.3 * torch.randn(outputs, rank, generator=generator)
        stored |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
        updates[module] = b @ a
    directory.mkdir()
    save_file(tensors if tensors is not None else stored, directory / LORA_FILE)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, "bias": "none", **config}
    (directory / LORA_CONFIG).write_text(json.dumps(fields))
    return updates


def load(tmp_path):
    config = ModelConfig.load(tmp_path / "base")
    adapter = tmp_path / "adapter"
    return config, load_weights(tmp_path / "base", config, torch.float32, CPU, lora=adapter)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({}, (3, 3)),
        ({"use_rslora": True, "modules_to_save": None, "use_dora": False}, (6, 6)),
        ({"alpha_pattern": {r"layers\.1\..*": 20, "_proj": 1}}, (3, 5)),
    ],
    ids=["alpha by rank", "stabilized", "patterns"],
)
def test_an_adapted_model_has_the_logits_of_the_merged_one(tmp_path, kernels, options, scales):
    reference = make_checkpoint(tmp_path / "base", "Qwen2ForCausalLM")
    updates = make_adapter(tmp_path / "adapter", reference, **options)
    for (module, update), scale in zip(updates.items(), scales, strict=True):
        reference.get_submodule(module).weight.data += scale * update
    model = make(kernels, *load(tmp_path), torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    run = PagedRun(model)
    torch.testing.assert_close(feed(run, run.add(TOKENS), 17), expected, atol=2e-4, rtol=1e-4)


def test_adapters_are_part_of_what_workers_must_share(tmp_path):
    model = make_checkpoint(tmp_path / "base")
    for name, rank, alpha in (("a", 4, 1), ("b", 4, 2), ("c", 8, 1)):
        make_adapter(tmp_path / name, model, rank=rank, lora_alpha=alpha)
    found = {fingerprint(tmp_path / "base", None, tmp_path / name) for name in "abc"}
    assert len(found | {fingerprint(tmp_path / "base")}) == 4
    settings = EngineConfig(model=str(tmp_path / "base"), lora=tmp_path / "a", device="cpu")
    loaded = build.load(settings)
    assert loaded.descriptor.model_fingerprint in found


def one(module, half, *shape):
    return {f"{PREFIX}{module}.lora_{half}.weight": torch.zeros(shape)}


WRONG = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: LORA"),
    "more than sums": ({"use_dora": True}, "use_dora is True; supported: False; merge it with"),
    "another base": (
        {"init_lora_weights": "pissa_niter_16"},
        "init_lora_weights is 'pissa_niter_16'",
    ),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "no alpha": ({"lora_alpha": "x"}, "lora_alpha is"),
    "a pattern": ({"alpha_pattern": {"(": 2}}, "alpha_pattern is"),
    "half": ({"tensors": one(Q, "A", 4, 64)}, "lacks tensor base_model.model.model.layers.0.self"),
    "an embedding": (
        {"tensors": {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(1)}},
        "is no half of a LoRA update; merge it",
    ),
    "another layer": (
        {"tensors": one("model.layers.7.mlp.up_proj", "A", 4, 64)},
        "adapts model.layers.7.mlp.up_proj.weight: no dense matrix of this model; merge it",
    ),
    "another size": (
        {"tensors": one(Q, "A", 4, 32) | one(Q, "B", 64, 4)},
        "is [64, 64], and its update [64, 4] by [4, 32]: the adapter was made for another model",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_plain_adapter_of_this_model_is_refused_by_name(tmp_path, options, message):
    model = make_checkpoint(tmp_path / "base")
    make_adapter(tmp_path / "adapter", model, **options)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["awq 32", "fp8"])
def test_quantised_matrices_take_no_adapter(tmp_path, name):
    model = make_quantized(tmp_path / "base", FORMATS[name])
    make_adapter(tmp_path / "adapter", model)
    with pytest.raises(CheckpointError, match="no dense matrix of this model; merge it"):
        load(tmp_path)


def test_made_up_weights_take_no_adapter_and_one_without_a_config_is_refused(tmp_path):
    make_checkpoint(tmp_path / "base")
    with pytest.raises(ConfigError, match="--lora adapts the weights of a checkpoint"):
        build.load(EngineConfig(random_weights=True, lora=tmp_path))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        load_weights(
            tmp_path / "base",
            ModelConfig.load(tmp_path / "base"),
            torch.float32,
            CPU,
            lora=tmp_path,
        )
