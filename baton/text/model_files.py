"""What a model directory says about text, read from its files and checked; no tokenizer is built.

Workers need only the fingerprint, so this module stays cheap and imports no library. A directory is
not trusted: only regular files are read, and no more of them than any real model has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from baton.checkpoint_files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, parse_json, read_bytes
from baton.errors import CheckpointError, quoted

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_GENERATION_CONFIG_FILE = "generation_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_MAX_COUNT = (1 << 31) - 1


class TemplateSource(NamedTuple):
    """A chat template's text and the file it is in."""

    text: str
    file: Path


@dataclass(frozen=True)
class TextFiles:
    """The text side of one model; a count is 0, and a text None, where no file gives it.

    `special_tokens` maps names as chat templates use them ("bos_token") to their text.
    """

    tokenizer_json: str | None
    chat_template: TemplateSource | None
    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_context: int

    @classmethod
    def read(cls, path: Path) -> TextFiles:
        """Reads a directory or a bare config file; raises CheckpointError naming a broken file."""
        config_file = path if path.is_file() else path / CONFIG_FILE  # beside a file is nothing
        generation_file = path / _GENERATION_CONFIG_FILE
        config = _read_json(config_file)
        tokenizer_config = _read_json(path / _TOKENIZER_CONFIG_FILE)
        return cls(
            tokenizer_json=_read_text(path / TOKENIZER_FILE, MAX_TOKENIZER_BYTES),
            chat_template=_chat_template(path, tokenizer_config),
            special_tokens=_special_tokens(tokenizer_config),
            eos_token_ids=_eos_token_ids(generation_file, _read_json(generation_file))
            or _eos_token_ids(config_file, config),
            vocab_size=_count(config_file, config, "vocab_size"),
            max_context=_count(config_file, config, "max_position_embeddings"),
        )

    @property
    def fingerprint(self) -> str:
        """Equal for two processes exactly when ids and text mean the same to both (hex)."""
        parts: list[Any] = [
            self.tokenizer_json,
            self.chat_template and self.chat_template.text,
            sorted(self.special_tokens.items()),
            sorted(self.eos_token_ids),
            self.vocab_size,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def text_fingerprint(path: Path) -> str:
    """The fingerprint of a model directory or config file, without building its tokenizer.

    Raises CheckpointError naming the file that cannot be read.
    """
    return TextFiles.read(path).fingerprint


def _read_text(file: Path, most: int) -> str | None:
    """The file's text, None when there is no such file."""
    try:
        return read_bytes(file, most).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The file's object, empty when there is no such file."""
    try:
        return parse_json(file, read_bytes(file, MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}


def _count(file: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if value is not None and not _is_count(value):
        raise CheckpointError(f"{file}: {key} must be a whole number, not {quoted(value)}")
    return value or 0


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _eos_token_ids(file: Path, config: Mapping[str, Any]) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_count, ids)):
        raise CheckpointError(f"{file}: eos_token_id must be token ids, not {quoted(value)}")
    return frozenset(ids)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> Mapping[str, str]:
    """Named special tokens; older files give the text, newer ones an object around it."""
    tokens = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return MappingProxyType(tokens)


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> TemplateSource | None:
    """The template file wins over the config, whose value may be a list of named templates."""
    separate = _read_text(directory / _TEMPLATE_FILE, MAX_JSON_BYTES)
    if separate is not None:
        return TemplateSource(separate, directory / _TEMPLATE_FILE)
    file = directory / _TOKENIZER_CONFIG_FILE
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckpointError(f"{file}: chat_template must be text, not {type(value).__name__}")
    return TemplateSource(value, file)
