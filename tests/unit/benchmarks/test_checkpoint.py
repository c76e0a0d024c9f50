"""Model directories: as large as the model they stand for, and readable by everybody's loaders."""

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from baton.engine.models.model_config import ModelConfig
from benchmarks import checkpoint
from benchmarks.shapes import SHAPES


def test_a_directory_is_made_once_or_not_at_all_and_loads(tmp_path, monkeypatch):
    def full(path, shape):
        raise OSError("no space left")

    shape = SHAPES["tiny"]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(checkpoint, "write_model", full)
        checkpoint.directory_of(shape, tmp_path)
    assert not any(tmp_path.iterdir())
    directory = checkpoint.directory_of(shape, tmp_path)
    config = ModelConfig.load(directory)
    assert (config.num_layers, config.num_kv_heads, config.head_size) == (2, 2, 32)
    weights = load_file(directory / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == shape.num_parameters
    one = weights["model.layers.1.mlp.up_proj.weight"]
    assert one.dtype == torch.bfloat16
    assert one.float().std().item() == pytest.approx(0.02, rel=0.02)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_model", full)  # it is there already
        assert checkpoint.directory_of(shape, tmp_path) == directory
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    # Every token has a text of its own, else a server would hold it back or send nothing for it.
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode([0, 17, 511]).split() == ["w0", "w11", "w1ff"]
    assert tokenizer.encode("w11 w1ff").ids == [17, 511]


def test_shapes_have_the_size_of_the_models_they_are_named_after():
    millions = [SHAPES[name].num_parameters / 1e6 for name in "MLE"]
    assert millions == pytest.approx([134.5, 494.0, 1334.6], abs=0.1)
