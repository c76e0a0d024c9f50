"""Custom tools, whose input is a text: the model calls functions of one text.

The prompt describes a function with the argument `input`; the model writes calls in its own format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from msgspec import UNSET

from baton.gateway import answers, openai
from baton.generation.tool_call import ToolCallDelta
from baton.text.tool_parsers.format import INPUT
from baton.v1 import inference_pb2

CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters of a string; both halves of a pair of surrogates are one.
_CHARS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
)


class CustomInput:
    """Takes the text of a call's input out of its arguments, which arrive in pieces of JSON."""

    def __init__(self) -> None:
        self._held = ""  # arguments that are not text yet
        self._begun = False

    def push(self, arguments: str) -> str:
        """Adds a piece of the arguments; returns the text that is certain."""
        self._held += arguments
        if not self._begun:
            if (match := _BEGIN.match(self._held)) is None:
                return ""
            self._begun, self._held = True, self._held[match.end() :]
        match = _CHARS.match(self._held)
        assert match is not None
        self._held = self._held[match.end() :]
        text: str = json.loads(f'"{match[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def close(self) -> str:
        """The rest: arguments that are not of a custom tool are its input as they are."""
        return "" if self._begun or self._held.strip() == "{}" else self._held


def tool_message(tool: openai.Tool | openai.CustomTool) -> inference_pb2.Tool:
    """The protocol's message for a tool."""
    if isinstance(tool, openai.CustomTool):
        message = inference_pb2.Tool(
            name=tool.name,
            description=tool.custom.description or "",
            parameters=json.dumps(CUSTOM_SCHEMA),
        )
        if isinstance(form := tool.custom.format, openai.GrammarFormat):
            is_regex = form.grammar.syntax == "regex"
            setattr(message.input, "regex" if is_regex else "grammar", form.grammar.definition)
        return message
    parameters = tool.function.parameters
    return inference_pb2.Tool(
        name=tool.name,
        description=tool.function.description or "",
        parameters="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
    )


def arguments_of(text: str) -> str:
    """The arguments of an earlier call of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class ChatCalls:
    """The calls of one output as chats have them."""

    def __init__(self, custom_tools: Collection[str]) -> None:
        self._custom_tools = custom_tools
        self._input: CustomInput | None = None  # of the last call, if it is of a custom tool
        self._index = 0

    def push(
        self, calls: Sequence[ToolCallDelta], *, last: bool = False
    ) -> list[answers.ChatToolCallDelta]:
        """Pieces of calls, all if `last`."""
        deltas = list[answers.ChatToolCallDelta]()
        for call in calls:
            if call.id:
                deltas += self._close()
                self._index = call.index
            if call.id and call.name in self._custom_tools:
                self._input = CustomInput()
                custom = openai.CalledCustomTool(self._input.push(call.arguments), call.name)
                delta = answers.ChatToolCallDelta(index=call.index, custom=custom)
                delta.id, delta.type = call.id, "custom"
                deltas.append(delta)
            elif self._input is not None:
                deltas += self._custom(self._input.push(call.arguments))
            else:
                function = openai.CalledFunction(call.arguments, call.name or UNSET)
                delta = answers.ChatToolCallDelta(index=call.index, function=function)
                if call.id:
                    delta.id, delta.type = call.id, "function"
                deltas.append(delta)
        return deltas + self._close() if last else deltas

    def _custom(self, text: str) -> list[answers.ChatToolCallDelta]:
        custom = openai.CalledCustomTool(text)
        return [answers.ChatToolCallDelta(index=self._index, custom=custom)] if text else []

    def _close(self) -> list[answers.ChatToolCallDelta]:
        """The rest of the last call."""
        text, self._input = self._input.close() if self._input else "", None
        return self._custom(text)


def whole_calls(deltas: Sequence[answers.ChatToolCallDelta]) -> list[openai.ToolCall]:
    """Calls from their pieces."""
    calls: list[openai.ToolCall] = []
    for delta in deltas:
        if delta.id is not UNSET:
            calls.append(openai.ToolCall(id=delta.id, function=delta.function, custom=delta.custom))
            if delta.custom is not UNSET:
                calls[-1].type = "custom"
        elif delta.custom is not UNSET and calls[-1].custom is not UNSET:
            calls[-1].custom.input += delta.custom.input
        elif delta.function is not UNSET and calls[-1].function is not UNSET:
            calls[-1].function.arguments += delta.function.arguments
    return calls
