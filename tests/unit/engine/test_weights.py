"""Weights arrive whole and fused, or the error names the file and the tensor."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.models.config import ModelConfig
from baton.engine.weights.checkpoint import INDEX_FILE, SINGLE_FILE
from baton.engine.weights.weights import Weights, load_weights, random_weights
from baton.errors import CheckpointError
from tests.unit.engine.checkpoints import make_checkpoint

CPU = torch.device("cpu")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(directory, ModelConfig.load(directory), dtype, CPU)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    file = directory / SINGLE_FILE
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    return file


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    return str(caught.value)


def tensors_of(weights: Weights) -> list[Tensor]:
    layers = [getattr(layer, field.name) for layer in weights.layers for field in fields(layer)]
    found = [weights.embedding, weights.final_norm, weights.lm_head, *layers]
    return [tensor for tensor in found if tensor is not None]


def test_parts_are_fused_in_order(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "Qwen2ForCausalLM")
    layer, reference = load(tmp_path).layers[1], model.model.layers[1]
    attention, mlp = reference.self_attn, reference.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(layer.qkv, torch.cat([p.weight for p in projections]))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([p.bias for p in projections]))
    assert torch.equal(layer.gate_up, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert torch.equal(layer.down, mlp.down_proj.weight)
    assert layer.o_bias is None


def test_shards_give_the_same_and_progress_counts_bytes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one")
    make_checkpoint(tmp_path / "many", max_shard_size="50KB")
    config = ModelConfig.load(tmp_path / "many")
    seen: list[tuple[int, int]] = []
    many = load_weights(tmp_path / "many", config, torch.float32, CPU, lambda *at: seen.append(at))
    one = load(tmp_path / "one")
    for a, b in zip(tensors_of(one), tensors_of(many), strict=True):
        assert torch.equal(a, b)
    done, totals = zip(*seen, strict=True)
    assert len(seen) == 3 + 9 * config.num_layers
    assert set(totals) == {4 * config.num_parameters} == {done[-1]}
    steps = [after - before for before, after in itertools.pairwise((0, *done))]
    assert steps[0] == 4 * config.vocab_size * config.hidden_size
    assert min(steps) == 4 * config.hidden_size


def test_progress_counts_what_files_hold_not_what_becomes_of_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.bfloat16)
    config = ModelConfig.load(tmp_path)
    seen: list[tuple[int, int]] = []
    load_weights(tmp_path, config, torch.float32, CPU, lambda *at: seen.append(at))
    assert seen[-1] == (2 * config.num_parameters, 2 * config.num_parameters)


def test_converts_and_outlives_the_files(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, dtype=torch.float16)
    weights = load(tmp_path, torch.bfloat16)
    shutil.rmtree(tmp_path)
    assert {tensor.dtype for tensor in tensors_of(weights)} == {torch.bfloat16}
    assert torch.equal(weights.lm_head, model.lm_head.weight.bfloat16())


def test_tied_embeddings_share_one_tensor_and_a_copy_is_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(3)}))
    weights = load(tmp_path)
    assert weights.lm_head is weights.embedding


def test_old_rotary_tables_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda t: t.update({name: torch.zeros(8)}))
    load(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, lambda t: t.__delitem__(K_PROJ))
    message = refused(tmp_path)
    assert str(tmp_path) in message
    assert f"lacks tensor {K_PROJ}" in message


def test_missing_lm_head_is_named_unless_tied(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, lambda t: t.__delitem__("lm_head.weight"))
    assert "lacks tensor lm_head.weight" in refused(tmp_path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = rewrite(tmp_path, lambda t: t.update({K_PROJ: torch.zeros(31, 64)}))
    message = refused(tmp_path)
    assert str(file) in message
    assert f"{K_PROJ} has shape [31, 64]" in message
    assert "[32, 64]" in message


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.q_proj.bias"
    file = rewrite(tmp_path, lambda t: t.update({name: torch.zeros(64)}))
    message = refused(tmp_path)
    assert str(file) in message
    assert name in message


def test_unsupported_element_type_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = rewrite(tmp_path, lambda t: t.update({K_PROJ: torch.zeros(32, 64, dtype=torch.int8)}))
    message = refused(tmp_path)
    assert str(file) in message
    assert f"{K_PROJ} has dtype I8" in message


@pytest.mark.parametrize("keep", [0, 5, 100])
def test_cut_header_is_named(tmp_path: Path, keep: int) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is truncated or not a safetensors file" in refused(tmp_path)


def test_cut_data_is_named_with_its_tensor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-10])
    message = refused(tmp_path)
    assert f"{file} is truncated: tensor " in message


def test_garbage_header_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / SINGLE_FILE
    for header in (b"{nonsense", b"[]", b'{"x": {"dtype": "F32"}}', b'{"x": 3}'):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert str(file) in refused(tmp_path)
    file.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert str(file) in refused(tmp_path)


def test_header_that_lies_about_sizes_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / SINGLE_FILE
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    message = refused(tmp_path)
    assert str(file) in message
    assert "tensor x" in message


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} is missing" in refused(tmp_path)


def test_shard_without_a_promised_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="100KB")
    index = tmp_path / INDEX_FILE
    content = json.loads(index.read_text())
    shard = content["weight_map"][K_PROJ]
    tensors = load_file(tmp_path / shard)
    tensors.pop(K_PROJ)
    save_file(tensors or {"model.norm.weight": torch.zeros(64)}, tmp_path / shard)
    message = refused(tmp_path)
    assert str(tmp_path / shard) in message
    assert f"lacks tensor {K_PROJ}" in message


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/hostname", "", "..", "x.bin"])
def test_index_may_not_point_outside(tmp_path: Path, shard: str) -> None:
    make_checkpoint(tmp_path, max_shard_size="100KB")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {K_PROJ: shard}}))
    assert str(tmp_path / INDEX_FILE) in refused(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_broken_index_is_named(tmp_path: Path, content: str) -> None:
    make_checkpoint(tmp_path, max_shard_size="100KB")
    (tmp_path / INDEX_FILE).write_text(content)
    assert str(tmp_path / INDEX_FILE) in refused(tmp_path)


def test_pickles_are_refused_with_the_mend(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / SINGLE_FILE).rename(tmp_path / "pytorch_model.bin")
    message = refused(tmp_path)
    assert "pytorch_model.bin" in message
    assert "convert" in message
    assert "safetensors" in message


def test_no_weights_at_all(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    assert f"{tmp_path} has neither {SINGLE_FILE}" in refused(tmp_path)
    config = ModelConfig.load(tmp_path)
    with pytest.raises(CheckpointError, match="not a model directory"):
        load_weights(tmp_path / "config.json", config, torch.float32, CPU)


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    config = ModelConfig.load(tmp_path)
    first, same, other = (random_weights(config, torch.bfloat16, CPU, seed) for seed in (1, 1, 2))
    for a, b in zip(tensors_of(first), tensors_of(same), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.layers[0].qkv, other.layers[0].qkv)
    assert sum(t.numel() for t in tensors_of(first)) == config.num_parameters


def test_other_devices_weights_never_lie_on_the_host(tmp_path: Path) -> None:
    """Tried with a device that keeps shapes only."""
    make_checkpoint(tmp_path, "Qwen2ForCausalLM")
    config, device = ModelConfig.load(tmp_path), torch.device("meta")
    drawn = random_weights(config, torch.bfloat16, device, 1)
    stored = load_weights(tmp_path, config, torch.bfloat16, device)
    for weights in (drawn, stored):
        assert {tensor.device for tensor in tensors_of(weights)} == {device}
        assert {tensor.dtype for tensor in tensors_of(weights)} == {torch.bfloat16}
        assert sum(t.numel() for t in tensors_of(weights)) == config.num_parameters
