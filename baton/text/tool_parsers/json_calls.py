"""Formats of tool calls whose arguments are JSON."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass
from typing import Any

from baton.text.tool_parsers.format import ToolFormat
from baton.text.tool_parsers.head import NAME, SPACE, Chars, Head
from baton.text.tool_parsers.parser import Found, Steps, ToolParser

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class ObjectFormat(ToolFormat):
    """Objects with name and arguments, or lists of them, after one of the texts `begin`."""

    begin: tuple[str, ...]
    end: str = ""

    def steps(self, parser: ToolParser) -> Steps:
        while True:
            marker = yield from parser.until(*self.begin)
            if (yield from parser.goes_on_with("[")):
                called = yield from parser.call()
                if not called:
                    parser.put(marker + "[")
                while called and (yield from parser.goes_on_with(",")):
                    called = yield from parser.call()
                if called:
                    yield from parser.goes_on_with("]")
            else:
                called = yield from self.one(parser)
                if not called:
                    parser.put(marker)
            if called and self.end:
                yield from parser.goes_on_with(self.end)

    def one(self, parser: ToolParser) -> Found:
        """Parses a call that is not in a list."""
        return (yield from parser.call())

    def history(self, messages: list[dict[str, Any]], *, shown: bool) -> list[dict[str, Any]]:
        """Calls become content for a template that does not show them, as Granite 3's."""
        return messages if shown else list(map(self._in_content, messages))

    def _in_content(self, message: dict[str, Any]) -> dict[str, Any]:
        if not (calls := message.get("tool_calls")):
            return message
        (before, behind), (first, between, last) = self.call, self.around
        texts = [
            before.replace("NAME", function["name"])
            + json.dumps(function["arguments"], ensure_ascii=False)
            + behind
            for function in (call["function"] for call in calls)
        ]
        content = message["content"] + first + between.join(texts) + last
        return {"role": message["role"], "content": content}


class MistralFormat(ObjectFormat):
    """Also a name and arguments with marks between."""

    def one(self, parser: ToolParser) -> Found:
        return (yield from parser.named_call())


class Llama3Format(ToolFormat):
    """An object at the beginning of the output, or objects after a marker."""

    def steps(self, parser: ToolParser) -> Steps:
        bare = yield from parser.goes_on_with("{", drop=False)
        while True:
            if not bare:
                yield from parser.until(*self.markers[:2])
            called = yield from parser.call(bare=bare)
            while called and (yield from parser.goes_on_with(";")):
                called = yield from parser.call()
            bare = False


@dataclass(frozen=True, kw_only=True)
class NamedFormat(ToolFormat):
    """Calls of a name and arguments between markers, in a section from `begin` to `end`.

    `head`: of a call, with the name, or an id that has the name.
    """

    begin: str
    head: Head
    tail: tuple[str, ...]
    end: str

    def steps(self, parser: ToolParser) -> Steps:
        while True:
            yield from parser.until(self.begin)
            called = False
            while match := (yield from parser.head(self.head)):
                called = True
                parser.begin_call(*self.name_and_id(match[1]))
                yield from parser.arguments()
                for text in self.tail:
                    yield from parser.goes_on_with(text)
            if called:
                yield from parser.goes_on_with(self.end)
            else:
                parser.put(self.begin)

    def name_and_id(self, text: str) -> tuple[str, str]:
        """The name and id of a call by the text in its head; without an id, a new one is made."""
        return text, ""


class KimiFormat(NamedFormat):
    """Calls whose ids, as in "functions.NAME:0", are the model's; its templates expect them."""

    def name_and_id(self, text: str) -> tuple[str, str]:
        name, _, number = text.rpartition(":")
        return (name if number.isdecimal() else text).removeprefix("functions."), text


def _mistral_id() -> str:
    """An id of nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


HERMES = ObjectFormat(
    name="hermes",
    models="Qwen2.5, Qwen3, Hermes, Granite 4, the demo model",
    templates=(("<tool_call>",),),
    markers=("<tool_call>", "</tool_call>"),
    call=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    around=("", "\n", ""),
    begin=("<tool_call>",),
    end="</tool_call>",
)
GRANITE = ObjectFormat(
    name="granite",
    models="Granite 3",
    templates=(("<|tool_call|>",),),
    markers=("<|tool_call|>",),
    call=('{"name": "NAME", "arguments": ', "}"),
    around=("<|tool_call|>[", ", ", "]"),
    begin=("<|tool_call|>", "<tool_call>"),
)
PHI4_MINI = ObjectFormat(
    name="phi4_mini",
    models="Phi-4-mini",
    templates=(("<|/tool_call|>",),),
    markers=("<|tool_call|>", "<|/tool_call|>"),
    call=('{"name": "NAME", "arguments": ', "}"),
    around=("<|tool_call|>[", ", ", "]<|/tool_call|>"),
    begin=("<|tool_call|>", "functools"),
    end="<|/tool_call|>",
)
JAMBA = ObjectFormat(
    name="jamba",
    models="Jamba, Hunyuan-A13B, Apriel",
    templates=(("<tool_calls>",),),
    markers=("<tool_calls>", "</tool_calls>"),
    call=('{"name": "NAME", "arguments": ', "}"),
    around=("<tool_calls>[", ", ", "]</tool_calls>"),
    begin=("<tool_calls>",),
    end="</tool_calls>",
)
NEMOTRON = ObjectFormat(
    name="nemotron",
    models="Nemotron Nano 2, Llama Nemotron 1.5",
    templates=(("<TOOLCALL>",),),
    markers=("<TOOLCALL>", "</TOOLCALL>"),
    call=('{"name": "NAME", "arguments": ', "}"),
    around=("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    begin=("<TOOLCALL>",),
    end="</TOOLCALL>",
)
LLAMA3 = Llama3Format(
    name="llama3",
    models="Llama 3.1 to 3.3; one call per output when calls are required",
    templates=(("<|python_tag|>",), ('{"name": function name, "parameters"',)),
    markers=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    call=('{"name": "NAME", "parameters": ', "}"),
    parallel=False,
)
MISTRAL = MistralFormat(
    name="mistral",
    models="Mistral, with ids of nine characters",
    templates=(("[TOOL_CALLS]",),),
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    call=('{"name": "NAME", "arguments": ', "}"),
    around=("[TOOL_CALLS][", ", ", "]"),
    begin=("[TOOL_CALLS]",),
    new_id=_mistral_id,
)
MISTRAL_ARGS = MistralFormat(
    name="mistral",
    models="Mistral, from version 11 of its tokenizer on",
    templates=(("[TOOL_CALLS]", "[ARGS]"),),
    markers=MISTRAL.markers,
    call=("[TOOL_CALLS]NAME[ARGS]", ""),
    begin=("[TOOL_CALLS]",),
    new_id=_mistral_id,
)
_DEEPSEEK_MARKERS = tuple(
    f"<\uff5ctool\u2581{text}\uff5c>"
    for text in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_BEGIN, _END, _CALL, _CALL_END, _SEP = _DEEPSEEK_MARKERS
DEEPSEEK_V3 = NamedFormat(
    name="deepseek_v3",
    models="DeepSeek V3, R1",
    templates=((_SEP, "```json"),),
    markers=_DEEPSEEK_MARKERS,
    call=(f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_CALL_END}"),
    around=(_BEGIN, "\n", _END),
    begin=_BEGIN,
    head=Head(SPACE, _CALL, "function", _SEP, NAME, SPACE, "```json", SPACE, ahead="{"),
    tail=("```", _CALL_END),
    end=_END,
)
DEEPSEEK_V31 = NamedFormat(
    name="deepseek_v31",
    models="DeepSeek V3.1",
    templates=((_SEP,),),
    markers=_DEEPSEEK_MARKERS,
    call=(f"{_CALL}NAME{_SEP}", _CALL_END),
    around=(_BEGIN, "", _END),
    begin=_BEGIN,
    head=Head(SPACE, _CALL, NAME, _SEP, SPACE, ahead="{"),
    tail=(_CALL_END,),
    end=_END,
)
_KIMI_CALL, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI_K2 = KimiFormat(
    name="kimi_k2",
    models="Kimi K2, with ids of the form `functions.NAME:0`",
    templates=((_KIMI_CALL,),),
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _KIMI_CALL,
        _KIMI_ARGUMENTS,
        "<|tool_call_end|>",
    ),
    ends_reasoning="<|tool_calls_section_begin|>",
    call=(f"{_KIMI_CALL}functions.NAME:INDEX{_KIMI_ARGUMENTS}", "<|tool_call_end|>"),
    around=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    begin="<|tool_calls_section_begin|>",
    head=Head(
        SPACE, _KIMI_CALL, SPACE, Chars(r"[\w.:-]", 1, 160), SPACE, _KIMI_ARGUMENTS, SPACE,
        ahead="{",
    ),
    tail=("<|tool_call_end|>",),
    end="<|tool_calls_section_end|>",
)  # fmt: skip
