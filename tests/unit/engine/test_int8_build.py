"""What 8-bit settings build: weights quantised as they come, pools, descriptors, refusals."""

import itertools
import weakref
from dataclasses import fields

import pytest
import torch

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.models.config import ModelConfig
from baton.engine.weights.quantize import SCALE_BYTES, Int8Weight
from baton.engine.weights.weights import load_weights, random_weights
from baton.errors import ConfigError
from tests.unit.engine.checkpoints import SMALL, make_checkpoint
from tests.unit.engine.small_models import MATRICES, qwen_config

CPU = torch.device("cpu")
SETTINGS = {
    "dtype": ("float32", "bfloat16"),
    "quantization": ("none", "int8"),
    "kv_dtype": ("auto", "int8"),
}


def both(directory, dtype):
    config = ModelConfig.load(directory)
    full = load_weights(directory, config, dtype, CPU)
    return full, load_weights(directory, config, dtype, CPU, prepare=Int8Weight.of)


def check_same(found, wanted):
    if isinstance(found, Int8Weight):
        assert wanted is not None
        expected = Int8Weight.of(wanted)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.scales, expected.scales)
    else:
        assert (found is None and wanted is None) or torch.equal(found, wanted)


def check_quantised(full, small):
    for wanted, found in zip(full.layers, small.layers, strict=True):
        for one in fields(wanted):
            assert isinstance(getattr(found, one.name), Int8Weight) == (one.name in MATRICES)
            check_same(getattr(found, one.name), getattr(wanted, one.name))
    assert isinstance(small.lm_head, Int8Weight)
    check_same(small.lm_head, full.lm_head)
    assert torch.equal(small.embedding, full.embedding)
    assert torch.equal(small.final_norm, full.final_norm)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_and_lm_head_are_int8_and_nothing_else(tmp_path, dtype, tied):
    make_checkpoint(tmp_path, "Qwen2ForCausalLM", tie_word_embeddings=tied)
    check_quantised(*both(tmp_path, dtype))


def test_random_weights_are_the_same_ones_quantised():
    config = qwen_config(tie_embeddings=True)
    full = random_weights(config, torch.bfloat16, CPU, seed=5)
    check_quantised(
        full, random_weights(config, torch.bfloat16, CPU, seed=5, prepare=Int8Weight.of)
    )


@pytest.mark.parametrize("drawn", [False, True])
def test_one_matrix_at_a_time_is_there_in_full(tmp_path, drawn, monkeypatch):
    make_checkpoint(tmp_path)
    config = ModelConfig.load(tmp_path)
    original, before = Int8Weight.of, []

    def of(weight):
        assert [one for one in before if one() is not None] == []
        before.append(weakref.ref(weight))
        return original(weight)

    monkeypatch.setattr(Int8Weight, "of", of)
    if drawn:
        random_weights(config, torch.float32, CPU, 0, prepare=Int8Weight.of)
    else:
        load_weights(tmp_path, config, torch.float32, CPU, prepare=Int8Weight.of)
    assert len(before) == 4 * config.num_layers + 1


def descriptors(directory):
    found = {}
    for values in itertools.product(*SETTINGS.values()):
        settings = dict(zip(SETTINGS, values, strict=True))
        config = EngineConfig(str(directory), kv_blocks=8, kernels="torch", **settings)
        found[values] = build.load(config).descriptor
    return found


def test_workers_that_compute_otherwise_are_never_paired(tmp_path):
    make_checkpoint(tmp_path)
    found = descriptors(tmp_path)
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], (one, other)
    assert len({descriptor.model_fingerprint for descriptor in found.values()}) == 1
    plain = found["bfloat16", "none", "auto"]
    assert (plain.dtype, plain.compute_dtype, plain.quantization) == ("bfloat16", "", "")
    small = found["bfloat16", "int8", "int8"]
    assert (small.dtype, small.compute_dtype, small.quantization) == ("int8", "bfloat16", "int8")
    assert small.head_size == plain.head_size == SMALL["head_dim"]


def test_the_pool_has_room_for_the_scales(tmp_path):
    make_checkpoint(tmp_path)
    loaded = build.load(EngineConfig(str(tmp_path), kv_blocks=8, kv_dtype="int8"))
    assert loaded.runner.pool.dtype == torch.int8
    assert loaded.runner.pool.shape == (8, 2, 2, 2, 16, SMALL["head_dim"] + SCALE_BYTES)
    loaded.runner.pool.fill_(-1)  # as bytes from a broken transfer: scales that are no numbers
    loaded.runner.scrub([2, 5])
    assert loaded.runner.pool.any(dim=5).flatten(1).all(dim=1).tolist() == [
        block not in (2, 5) for block in range(8)
    ]
    assert not loaded.runner.pool[[2, 5]].any()


@pytest.mark.parametrize(
    ("setting", "option"), [("quantization", "--quantization"), ("kv_dtype", "--kv-dtype")]
)
def test_a_cpu_refuses_fp8_with_the_fix(setting, option, tmp_path):
    make_checkpoint(tmp_path)
    settings = EngineConfig(str(tmp_path), kv_blocks=8, device="cpu", **{setting: "fp8"})
    with pytest.raises(ConfigError, match=f"{option} fp8 .*: use int8, or add --device cuda"):
        build.load(settings)


def test_a_cpu_refuses_tritons_kernels_with_the_fix(tmp_path):
    make_checkpoint(tmp_path)
    settings = EngineConfig(str(tmp_path), kv_blocks=8, device="cpu", kernels="triton")
    with pytest.raises(
        ConfigError, match=r"--kernels triton .* leave it out, or add --device cuda"
    ):
        build.load(settings)
