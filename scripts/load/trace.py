"""Requests of a Mooncake trace, scaled down to a machine and a few minutes.

A row of the JSON Lines file is {"timestamp": ms, "input_length": tokens, "output_length": tokens,
"hash_ids": one for each 512 tokens of the prompt}; equal ids at equal places are equal text. The
published times are multiples of 3 s: requests of one time are spread evenly up to the next.
Source: R. Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load.arrivals import Arrival

_TOKENS_OF_AN_ID = 512
_RESOLUTION_S = 3.0


@dataclass(frozen=True)
class Scale:
    """How a trace is made smaller: lengths divided, time compressed, a slice taken."""

    length: float  # 8: prompts and outputs of an eighth
    rate: float  # 4: four times as many requests a second
    first: int  # rows left out
    count: int  # rows taken
    max_tokens: int  # prompts are cut to so many, outputs to a quarter of it


def arrivals(path: Path, scale: Scale) -> list[Arrival]:
    """The slice's requests, the first at 0 s."""
    rows = list(_rows(path, scale))
    times_s = _spread([row["timestamp"] / 1e3 for row in rows])
    return [
        _arrival(row, (time_s - times_s[0]) / scale.rate, scale)
        for row, time_s in zip(rows, times_s, strict=True)
    ]


def reusable(requests: list[Arrival]) -> float:
    """Share of prompt tokens that some earlier request of the slice had as a prefix too."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    shared = 0
    for request in requests:
        for end in range(len(request.parts), 0, -1):
            if request.parts[:end] in seen:
                shared += sum(length for _, length in request.parts[:end])
                break
        seen |= {request.parts[:end] for end in range(1, len(request.parts) + 1)}
    return shared / sum(request.prompt_tokens for request in requests)


def _rows(path: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        yield from map(json.loads, itertools.islice(lines, scale.first, scale.first + scale.count))


def _spread(times_s: list[float]) -> list[float]:
    """Equal times, moved on in even steps."""
    spread: list[float] = []
    for time_s, group in itertools.groupby(times_s):
        count = len(list(group))
        spread += [time_s + _RESOLUTION_S * i / count for i in range(count)]
    return spread


def _arrival(row: dict[str, Any], at_s: float, scale: Scale) -> Arrival:
    left = min(round(row["input_length"] / scale.length), scale.max_tokens)
    size = round(_TOKENS_OF_AN_ID / scale.length)
    parts: list[tuple[int, int]] = []
    for hash_id in row["hash_ids"]:
        if left <= 0:
            break
        parts.append((hash_id, min(size, left)))
        left -= size
    outputs = max(2, min(round(row["output_length"] / scale.length), scale.max_tokens // 4))
    return Arrival(at_s, tuple(parts), outputs)
