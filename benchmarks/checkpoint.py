"""Model directories of random weights: one per shape, made once, kept outside the tree.

The files are those of a downloaded model, so that everybody loads them in the usual way: config,
bfloat16 weights, and a tokenizer whose every token is one short word, so that a server's text
arrives token by token. Needs numpy.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.shapes import Shape

_SEED = 0
_SPREAD = 0.02  # standard deviation of weights, as transformers initialises them
_MADE = 2  # raised when the files change: a directory of another number is not used
WORD = "w{:x}"


def default_cache() -> Path:
    """Where directories are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "baton" / "bench"


def directory_of(shape: Shape, cache: Path) -> Path:
    """The directory of `shape`, made if it is not there."""
    directory = cache / f"{shape.name}-{_MADE}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    # Made beside it and renamed: one that was interrupted is never taken for whole.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _write_json(made / "config.json", shape.config())
        _write_json(made / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
        _write_tokenizer(made, shape.vocab)
        _write_weights(made / "model.safetensors", shape)
        made.rename(directory)
    return directory


def words(vocab: int) -> list[str]:
    """The text of each token: none is a beginning of a character, a control or a space."""
    return [WORD.format(index) for index in range(vocab)]


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each weight, as Hugging Face transformers names them."""
    hidden, kv = shape.hidden, shape.kv_heads * shape.head_size
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{at}.self_attn.{name}_proj.weight", (size, hidden)
            if shape.biased:
                yield f"{at}.self_attn.{name}_proj.bias", (size,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name in ("gate", "up"):
            yield f"{at}.mlp.{name}_proj.weight", (shape.intermediate, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, shape.intermediate)
    yield "model.norm.weight", (hidden,)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path, vocab: int) -> None:
    """Words between spaces, each a token."""
    _write_json(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: index for index, word in enumerate(words(vocab))},
                "unk_token": WORD.format(0),
            },
        },
    )
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": WORD.format(0),
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
        },
    )


def _write_weights(path: Path, shape: Shape) -> None:
    """A safetensors file: length of the header, header in JSON, then the tensors one by one."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors(shape):
        begin, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    dice = np.random.default_rng(_SEED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in tensors(shape):
            file.write(_bits(name, size, dice).tobytes())


def _bits(name: str, size: tuple[int, ...], dice: np.random.Generator) -> npt.NDArray[np.uint16]:
    """Values of one tensor in bfloat16: norms are ones, all else is drawn."""
    if name.endswith("norm.weight"):
        values = np.ones(size, dtype=np.float32)
    else:
        values = dice.standard_normal(size, dtype=np.float32) * np.float32(_SPREAD)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
