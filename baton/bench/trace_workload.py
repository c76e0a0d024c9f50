"""Reads request traces of public services in two formats, and scales them.

Mooncake (JSON Lines): equal leading `hash_ids` are equal prefixes.
Source: R. Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving".
Azure LLM inference (CSV): prompts have no common prefixes.
Source: P. Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting".
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO

from baton.bench.request import Demand
from baton.config import options
from baton.config.options import option
from baton.errors import ConfigError

_TOKENS_OF_AN_ID = 512
_OWN_SEED = 1 << 64  # above all hash ids
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Scale:
    """Scaling of a trace."""

    GROUP: ClassVar[str] = "trace"
    rate: float = option(1.0, "--rate-scale X", "factor for the arrival rate", least=1e-6, most=1e6)
    length: float = option(
        1.0, "--length-scale X", "factor for prompt and output lengths", least=1e-6, most=1e6
    )
    max_prompt: int = option(
        0, "--max-prompt TOKENS", "truncate longer prompts (default: no limit)", least=1
    )
    max_output: int = option(
        0, "--max-output TOKENS", "truncate longer outputs (default: no limit)", least=1
    )

    def __post_init__(self) -> None:
        options.check(self)


class _Row(NamedTuple):
    at_s: float
    prompt_tokens: int
    new_tokens: int
    hash_ids: Sequence[int] = ()


def demands(path: Path, scale: Scale) -> list[Demand]:
    """The trace's requests in order of time, starting at 0 s. Raises ConfigError."""
    try:
        with path.open(newline="") as file:
            rows = sorted(_read(path, file), key=lambda row: row.at_s)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no requests")
    found = []
    for i, row in enumerate(rows):
        prompt = _length(row.prompt_tokens, scale.length, scale.max_prompt)
        new_tokens = _length(row.new_tokens, scale.length, scale.max_output)
        parts = _parts(row.hash_ids, prompt, scale.length, _OWN_SEED + i)
        found.append(Demand((row.at_s - rows[0].at_s) / scale.rate, parts, new_tokens))
    return found


def _read(path: Path, file: TextIO) -> Iterator[_Row]:
    """Parses each line; the first line determines the format."""
    start = file.readline()
    file.seek(0)
    parse: Callable[[Any], _Row] = _mooncake
    lines: Iterator[Any] = iter(file)
    if not start.startswith("{"):
        rows = csv.DictReader(file)
        names = rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        lines, parse = rows, _azure
        if not set(_AZURE_COLUMNS) <= set(names):
            raise ConfigError(
                f"{path} is no trace: its first line is neither a JSON object nor the columns "
                f"{','.join(_AZURE_COLUMNS)}"
            )
    for number, line in enumerate(lines, start=1 if parse is _mooncake else 2):
        try:
            row = parse(line)
            if row.prompt_tokens < 0 or row.new_tokens < 0:
                raise ValueError("a length below 0")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}, is no request: {error!r}") from error
        yield row


def _mooncake(line: str) -> _Row:
    value = json.loads(line)
    lengths = int(value["input_length"]), int(value["output_length"])
    hash_ids = [int(hash_id) for hash_id in value.get("hash_ids") or ()]
    return _Row(float(value["timestamp"]) / 1e3, *lengths, hash_ids)


def _azure(line: dict[str, str]) -> _Row:
    text, prompt, new = (line[name] for name in _AZURE_COLUMNS)
    at = datetime.fromisoformat(text.strip())
    at = at if at.tzinfo else at.replace(tzinfo=UTC)  # whatever this machine's time zone is
    return _Row(at.timestamp(), int(prompt), int(new))


def _length(tokens: int, factor: float, most: int) -> int:
    scaled = max(1, round(tokens * factor))
    return min(scaled, most) if most else scaled


def _parts(
    hash_ids: Sequence[int], total: int, factor: float, own_seed: int
) -> tuple[tuple[int, int], ...]:
    """A part for each hash id, and one for the rest of the prompt."""
    parts: list[tuple[int, int]] = []
    begin = 0
    for i, hash_id in enumerate(hash_ids, start=1):
        # Ends are rounded, not sizes, so that rounding errors do not add up.
        end = min(round(i * _TOKENS_OF_AN_ID * factor), total)
        if end > begin:
            parts.append((hash_id, end - begin))
        begin = max(begin, end)
    if begin < total:
        parts.append((own_seed, total - begin))
    return tuple(parts)
