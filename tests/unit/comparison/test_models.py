"""Model directories: as large as the model they stand for, and readable by everybody's loaders."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from baton.engine.models.config import ModelConfig
from benchmarks import checkpoint
from benchmarks.candidates import llama_cpp_files
from benchmarks.shapes import SHAPES


@pytest.mark.parametrize(("name", "millions"), [("M", 134.5), ("L", 494.0)])
def test_shapes_have_the_size_of_the_models_they_are_named_after(
    name: str, millions: float
) -> None:
    shape = SHAPES[name]
    sizes = [math.prod(size) for _, size in checkpoint.tensors(shape)]
    assert sum(sizes) == shape.num_parameters
    assert shape.num_parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_directory_is_made_once_and_loads(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    directory = checkpoint.directory_of(shape, tmp_path)
    config = ModelConfig.load(directory)
    assert (config.num_layers, config.num_kv_heads, config.head_size) == (2, 2, 32)
    weights = load_file(directory / "model.safetensors")
    assert {name: tuple(w.shape) for name, w in weights.items()} == dict(checkpoint.tensors(shape))
    drawn = weights["model.layers.1.mlp.up_proj.weight"]
    assert drawn.dtype == torch.bfloat16
    assert drawn.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.all(weights["model.norm.weight"] == 1)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.directory_of(shape, tmp_path) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_an_interrupted_directory_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, shape: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(checkpoint, "_write_weights", full)
        checkpoint.directory_of(SHAPES["tiny"], tmp_path)
    assert not any(tmp_path.iterdir())
    assert (checkpoint.directory_of(SHAPES["tiny"], tmp_path) / "model.safetensors").exists()


def test_every_token_has_a_text_of_its_own(tmp_path: Path) -> None:
    """Else a server would hold it back, or send nothing for it."""
    directory = checkpoint.directory_of(SHAPES["tiny"], tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode([0, 17, 511]).split() == ["w0", "w11", "w1ff"]
    assert tokenizer.encode("w11 w1ff").ids == [17, 511]


def test_llama_cpp_names_every_tensor() -> None:
    names = [llama_cpp_files.name_of(name) for name, _ in checkpoint.tensors(SHAPES["L"])]
    assert len(set(names)) == len(names) == 24 * 12 + 2
    assert {"token_embd.weight", "blk.23.attn_q.bias", "blk.0.ffn_norm.weight"} <= set(names)


def test_stored_values_are_read_back_for_conversion(tmp_path: Path) -> None:
    directory = checkpoint.directory_of(SHAPES["tiny"], tmp_path)
    expected = load_file(directory / "model.safetensors")
    read = dict(llama_cpp_files._stored(directory / "model.safetensors"))
    assert read.keys() == expected.keys()
    for name, values in read.items():
        assert torch.equal(torch.from_numpy(values.copy()), expected[name].float())
