"""How families of models mark what they think before they answer: by one token at each end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The two tokens, and whether an output begins inside them whatever the prompt says."""

    begin: str
    end: str
    always: bool = False


_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    # Older templates do not open it, and the model leaves the first token out.
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """The format of that name, or for "auto" the one that a chat template is written for."""
    if name != "auto":
        return _FORMATS.get(name)
    return next((one for one in _FORMATS.values() if one.end in template), None)
