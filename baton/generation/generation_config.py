"""Default sampling settings from a model's generation_config.json.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.checkpoint_files import MAX_JSON_BYTES, parse_json, read_bytes
from baton.errors import CheckpointError, quoted
from baton.gguf.reader import SUFFIX, GgufFile

FILE = "generation_config.json"
DEFAULTS: Mapping[str, Any] = {"temperature": 1.0}
_LARGEST = (1 << 31) - 1
# By key of the file: our setting, and the valid values.
_KEYS: Mapping[str, tuple[str, str, Callable[[Any], bool]]] = {
    "temperature": ("temperature", "a number from 0 to 100", lambda value: 0 <= value <= 100),
    "top_p": ("top_p", "a number above 0, up to 1", lambda value: 0 < value <= 1),
    "min_p": ("min_p", "a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": (
        "repetition_penalty", "a number above 0, up to 100", lambda value: 0 < value <= 100,
    ),
    "top_k": (
        "top_k", "a whole number from 0",
        lambda value: type(value) is int and 0 <= value <= _LARGEST,
    ),
    "max_new_tokens": (
        "max_tokens", "a whole number from 1",
        lambda value: type(value) is int and 0 < value <= _LARGEST,
    ),
}  # fmt: skip

# The ends of a GGUF file's keys, after "general.sampling.".
_GGUF_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_k": "top_k",
    "repetition_penalty": "penalty_repeat",
}


def sampling_defaults(path: Path) -> Mapping[str, Any]:
    """Reads the default values of `SamplingParams` of a model directory or a GGUF file.

    With `do_sample` false sampling is greedy. Raises CheckpointError naming the file and the key.
    """
    file, values = path / FILE, dict[str, Any]()
    if path.suffix == SUFFIX:
        file, metadata = path, GgufFile.load(path).metadata
        values = {key: metadata.get(f"general.sampling.{end}") for key, end in _GGUF_KEYS.items()}
    elif path.is_dir() and file.exists():
        values = parse_json(file, read_bytes(file, MAX_JSON_BYTES))
    found = dict(DEFAULTS)
    for key, (name, supported, holds) in _KEYS.items():
        if (value := values.get(key)) is None:
            continue
        if type(value) not in (int, float) or not holds(value):
            raise CheckpointError(
                f"{file}: {key} is {quoted(value)}; supported: {supported} (with "
                "--generation-config none the router reads none of these)"
            )
        found[name] = value
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
