"""The formats of tool calls, and which of them a chat template belongs to."""

from __future__ import annotations

from baton.text.tool_parsers.format import ToolFormat
from baton.text.tool_parsers.harmony import HARMONY
from baton.text.tool_parsers.json_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    HERMES,
    JAMBA,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    PHI4_MINI,
)
from baton.text.tool_parsers.value_calls import FUNCTION_GEMMA, GEMMA4, LFM2, OLMO3, PYTHONIC
from baton.text.tool_parsers.xml_calls import DEEPSEEK_V32, GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS

# A template belongs to the first format of which it has the texts.
FORMATS = (
    HARMONY, DEEPSEEK_V32, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MINIMAX_M2, MISTRAL_ARGS, MISTRAL,
    FUNCTION_GEMMA, GEMMA4, PHI4_MINI, GRANITE, SEED_OSS, LFM2, OLMO3, NEMOTRON, GLM45, QWEN3_CODER,
    HERMES, JAMBA, PYTHONIC, LLAMA3,
)  # fmt: skip


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of that name, or with "auto" the one of the chat template.

    Of formats with the same name, it is the one of the template, or else the last.
    """
    if name == "none":
        return None
    formats = [one for one in FORMATS if name in ("auto", one.name)]
    found = (one for one in formats if _belongs(template, one))
    return next(found, None if name == "auto" else formats[-1])


def _belongs(template: str, tool_format: ToolFormat) -> bool:
    return any(all(text in template for text in texts) for texts in tool_format.templates)
