"""Reads and checks the text files of a model directory, without building a tokenizer.

Workers need only the fingerprint, so this module imports no library. Directories are untrusted:
only regular files of limited sizes are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.checkpoint_files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, parse_json, read_bytes
from baton.errors import CheckpointError, quoted
from baton.gguf import reader as gguf
from baton.gguf.tokenizer import eos_token_ids, special_tokens, tokenizer_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_GENERATION_CONFIG_FILE = "generation_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_PROCESSOR_TEMPLATE_FILE = "chat_template.json"  # of older multimodal models
_MORE_TEMPLATES = "additional_chat_templates"  # a folder with NAME.jinja files
_TEMPLATES = (DEFAULT_TEMPLATE, TOOL_TEMPLATE) = ("default", "tool_use")
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_NAMED_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_COUNT = (1 << 31) - 1


@dataclass(frozen=True)
class TextFiles:
    """The text files of a model; counts are 0 and texts None if no file has them.

    `special_tokens` maps names of chat templates ("bos_token") to texts.
    """

    tokenizer_json: str | None
    # Text and file of each template, by name ("default", "tool_use").
    chat_templates: Mapping[str, tuple[str, Path]]
    special_tokens: Mapping[str, str]
    # Arguments of `AddedToken` for tokens that tokenizer.json lacks or has with other flags.
    added_tokens: tuple[Mapping[str, Any], ...]
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_context: int
    config_file: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)  # empty for a GGUF file

    @classmethod
    def read(cls, path: Path) -> TextFiles:
        """Reads a directory, a config file or a GGUF file.

        Raises CheckpointError naming a broken file.
        """
        if path.suffix == gguf.SUFFIX:
            return cls._read_gguf(path)
        config_file = path if path.is_file() else path / CONFIG_FILE  # a config file stands alone
        generation_file = path / _GENERATION_CONFIG_FILE
        config = _read_json(config_file)
        if isinstance(text := config.get("text_config"), dict):  # of a multimodal model
            config |= {key: value for key, value in text.items() if value is not None}
        tokenizer_config = _read_json(path / _TOKENIZER_CONFIG_FILE)
        tokenizer_json = _read_text(path / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
        return cls(
            tokenizer_json=tokenizer_json,
            chat_templates=_chat_templates(path, tokenizer_config),
            special_tokens=_special_tokens(tokenizer_config),
            added_tokens=_added_tokens(path, tokenizer_json or "", tokenizer_config),
            eos_token_ids=_eos_token_ids(generation_file, _read_json(generation_file))
            or _eos_token_ids(config_file, config),
            vocab_size=_count(config_file, config, "vocab_size"),
            max_context=_count(config_file, config, "max_position_embeddings"),
            config_file=config_file,
            config=config,
        )

    @classmethod
    def _read_gguf(cls, path: Path) -> TextFiles:
        file = gguf.GgufFile.load(path)
        keys = {DEFAULT_TEMPLATE: "tokenizer.chat_template"}
        keys[TOOL_TEMPLATE] = f"{keys[DEFAULT_TEMPLATE]}.{TOOL_TEMPLATE}"
        return cls(
            tokenizer_json=tokenizer_json(path),
            chat_templates=MappingProxyType(
                {name: (file.text(key), path) for name, key in keys.items() if key in file.metadata}
            ),
            special_tokens=MappingProxyType(special_tokens(file)),
            added_tokens=(),
            eos_token_ids=eos_token_ids(file),
            vocab_size=file.vocab_size,
            max_context=file.number(f"{file.architecture}.context_length"),
        )

    @property
    def fingerprint(self) -> str:
        """A hex digest; equal for two processes if and only if ids and texts are."""
        parts: list[Any] = [
            self.tokenizer_json,
            *(self.chat_templates.get(DEFAULT_TEMPLATE) or (None,))[:1],
            sorted(self.special_tokens.items()),
            sorted(self.eos_token_ids),
            self.vocab_size,
        ]
        # Rare fields are left out if unset, so that fingerprints of other models did not change.
        if tools := self.chat_templates.get(TOOL_TEMPLATE):
            parts.append(tools[0])
        if self.added_tokens:
            parts.append(self.added_tokens)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def text_fingerprint(path: Path) -> str:
    """The fingerprint of a model directory, a config file or a GGUF file.

    Raises CheckpointError naming a file that cannot be read.
    """
    return TextFiles.read(path).fingerprint


def has_same_tokens(path: Path, other: Path) -> bool:
    """Whether two models have the same texts by token id, or one of them has no tokenizer.

    How texts are split may differ, and chat templates. Raises CheckpointError.
    """
    one, two = TextFiles.read(path), TextFiles.read(other)
    if one.tokenizer_json is None or two.tokenizer_json is None:
        return True
    same_file = one.tokenizer_json == two.tokenizer_json
    return same_file or _tokens(path, one.tokenizer_json) == _tokens(other, two.tokenizer_json)


def _tokens(path: Path, tokenizer_json: str) -> dict[str, int]:
    """Ids by text, of the vocabulary and the added tokens of a tokenizer.json."""
    file = path / TOKENIZER_FILE
    try:
        content = parse_json(file, tokenizer_json)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # a Unigram model's, with scores
            vocabulary = {text: at for at, (text, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return {**vocabulary, **added}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: there is no vocabulary that can be read") from error


def _read_text(file: Path, most: int) -> str | None:
    """The file's text; None if it does not exist."""
    try:
        return read_bytes(file, most).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The file's JSON object; empty if it does not exist."""
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
    """Named special tokens, each a text or, in newer files, an object with it."""
    tokens = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return MappingProxyType(tokens)


def _added_tokens(
    directory: Path, tokenizer_json: str, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """Tokens that tokenizer_config.json adds, in transformers' order and with its defaults.

    First `added_tokens_decoder` by id, then named special tokens, then extra ones.
    """
    file, known = directory / _TOKENIZER_CONFIG_FILE, dict[str, Mapping[str, Any]]()
    if found := _ADDED_TOKENS.search(tokenizer_json):
        try:
            listed, _ = json.JSONDecoder().raw_decode(tokenizer_json, found.end())
        except (ValueError, RecursionError):
            return ()  # the library reports the error
        known = {str(token.get("content")): token for token in listed if isinstance(token, dict)}
    decoder = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    if not (isinstance(decoder, dict) and all(map(str.isdecimal, decoder))):
        raise CheckpointError(f"{file}: added_tokens_decoder must have tokens by id")
    if not isinstance(extra, list | tuple | dict):
        raise CheckpointError(f"{file}: {quoted(extra)} are no special tokens")
    names = sorted((name for name in config if name.endswith("_token")), key=_rank)
    named = [config[name] for name in names]
    if isinstance(extra, dict):
        named, extra = [*named, *extra.values()], ()
    added = dict[str, Mapping[str, Any]]()
    for value in (decoder[key] for key in sorted(decoder, key=int)):
        token = _added_token(file, value)
        if token is None:
            raise CheckpointError(f"{file}: added_tokens_decoder must have tokens as objects")
        if any(token[flag] != known.get(token["content"], {}).get(flag) for flag in _TOKEN_FLAGS):
            added[token["content"]] = token
    for is_named, value in (*((True, one) for one in named), *((False, one) for one in extra)):
        described = {"content": value, "special": True} if isinstance(value, str) else value
        if token := _added_token(file, described):
            token["special"] = token["special"] or is_named
            there = added.get(token["content"]) or known.get(token["content"])
            if there is None or (token["special"] and not there.get("special")):
                flags = {**token, **added.get(token["content"], {}), "special": token["special"]}
                added[token["content"]] = flags
    return tuple(added.values())


def _rank(name: str) -> int:
    """The position of a named token in transformers' order; others come last."""
    return _NAMED_TOKENS.index(name) if name in _NAMED_TOKENS else len(_NAMED_TOKENS)


def _added_token(file: Path, value: Any) -> dict[str, Any] | None:
    """The arguments of `AddedToken`; None for a value that is not a token, such as null."""
    if not isinstance(value, dict):
        return None
    token = {"content": value.get("content"), **{flag: value.get(flag) for flag in _TOKEN_FLAGS}}
    if token["normalized"] is None:
        token["normalized"] = not token["special"]
    flags = {flag: bool(token[flag]) for flag in _TOKEN_FLAGS}
    if not isinstance(token["content"], str) or any(
        token[flag] not in (None, True, False) for flag in _TOKEN_FLAGS
    ):
        raise CheckpointError(f"{file}: {quoted(value)} is not a token")
    return {"content": token["content"], **flags}


def _chat_templates(
    directory: Path, tokenizer_config: Mapping[str, Any]
) -> Mapping[str, tuple[str, Path]]:
    """Templates by name; files take precedence over those of the config."""
    found = dict[str, tuple[str, Path]]()
    files = [(name, directory / _MORE_TEMPLATES / f"{name}.jinja") for name in _TEMPLATES]
    for name, file in (*files, (DEFAULT_TEMPLATE, directory / _TEMPLATE_FILE)):
        if (text := _read_text(file, MAX_JSON_BYTES)) is not None:
            found[name] = text, file
    if found:
        return MappingProxyType(found)
    file, value = directory / _TOKENIZER_CONFIG_FILE, tokenizer_config.get("chat_template")
    if value is None:
        file = directory / _PROCESSOR_TEMPLATE_FILE
        value = _read_json(file).get("chat_template")
    entries = value if isinstance(value, list) else [{"name": DEFAULT_TEMPLATE, "template": value}]
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("name") not in _TEMPLATES:
            continue
        if (text := entry.get("template")) is None:
            continue
        if not isinstance(text, str):
            kind = type(text).__name__
            raise CheckpointError(f"{file}: chat_template must be text, not {kind}")
        found[entry["name"]] = text, file
    return MappingProxyType(found)
