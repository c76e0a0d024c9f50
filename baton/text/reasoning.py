"""The tokens with which families of models delimit reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The two tokens, and whether outputs begin with reasoning whatever the prompt ends with."""

    begin: str
    end: str
    always: bool = False


_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    # Older templates do not open it, and models omit the first token.
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format of that name; for "auto", the one of the chat template."""
    if name != "auto":
        return _FORMATS.get(name)
    return next((one for one in _FORMATS.values() if one.end in template), None)
