"""A tool call as it is streamed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call `index` of an output: first its id and name, then parts of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
