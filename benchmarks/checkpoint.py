"""Model directories of random weights: one per shape, made once, kept outside the tree.

The files are those of a downloaded model, so that every engine loads them in the usual way: config,
bfloat16 weights, and a tokenizer whose every token is one short word, so that a server's text
arrives token by token. Needs transformers.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape

_SEED = 0
_VERSION = 3  # raised when the files change: a directory of another number is not used


def default_cache() -> Path:
    """Where directories are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "baton" / "bench"


def directory_of(shape: Shape, cache: Path) -> Path:
    """The directory of `shape`, made if it is not there."""
    directory = cache / f"{shape.name}-{_VERSION}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    # Made beside it and renamed: one that was interrupted is never taken for whole.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "model"
        write_model(made, shape)
        made.rename(directory)
    return directory


def word(token_id: int) -> str:
    """The text of a token: none is a beginning of a character, a control or a space."""
    return f"w{token_id:x}"


def write_model(directory: Path, shape: Shape) -> None:
    """Config and weights, initialised as transformers does, and the tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(_SEED)
    config = shape.config()
    auto: Any = AutoModelForCausalLM
    settings = {name: value for name, value in config.items() if "dtype" not in name}
    auto.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16).save_pretrained(
        directory
    )
    # Exactly the shape's own config: what transformers adds to it differs between versions.
    _write_json(directory / "config.json", config)
    vocab = {word(token_id): token_id for token_id in range(shape.vocab)}
    words = Tokenizer(models.WordLevel(vocab, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": word(0),
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
