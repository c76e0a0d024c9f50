"""Formats of tool calls whose arguments are named values that are not quite JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from baton.text.json_repair import JsonRepair
from baton.text.tool_parsers.format import INPUT, GrammarTerms, ToolFormat
from baton.text.tool_parsers.head import NAME, SPACE, Chars, Head
from baton.text.tool_parsers.parser import Steps, ToolParser
from baton.text.tool_parsers.schemas import (
    properties_of,
    required_of,
    types_of,
    with_definitions,
)
from baton.text.tool_parsers.xml_calls import text_rules

_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}
_OUTSIDE = re.compile(r"""["'\[\](){},]""")
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_ARGUMENT = Chars(r"[\w)]", 1, 1)


class NamedValues(ToolFormat):
    """Arguments as pairs with a comma between; `pair`: the text before a value, with KEY."""

    pair: ClassVar[str]
    comma: ClassVar[str] = ","

    @property
    def written(self) -> str:
        pairs = f"{self.pair}\u2026{self.comma}\u2026"
        return self.around[0] + pairs.join(self.call) + self.around[2]

    def argument_rules(
        self, number: int, schema: Mapping[str, Any] | None, terms: GrammarTerms
    ) -> list[str]:
        schema = schema or {}
        pairs, required = properties_of(schema), required_of(schema)
        name = f"arguments_{number}"
        rules = [f"{name}: {name}_first_0"]
        for at, (key, one) in enumerate(pairs.items()):
            # Behind `first` no pair has been written, behind `rest` one has.
            pair, comma = f"{name}_pair_{at}", json.dumps(self.comma)
            first, rest = f"{name}_first_{at}", f"{name}_rest_{at}"
            later = f"{name}_first_{at + 1}", f"{name}_rest_{at + 1}"
            optional = key not in required
            rules.append(f"{first}: {pair} {later[1]}" + (f" | {later[0]}" if optional else ""))
            rules.append(f"{rest}: ({comma} {pair}){'?' if optional else ''} {later[1]}")
            value = self.value_rule(f"{pair}_v", one, schema, terms)
            rules += [f"{pair}: {json.dumps(self.pair.replace('KEY', key))} {pair}_v", *value]
        return [*rules, f'{name}_first_{len(pairs)}: ""', f'{name}_rest_{len(pairs)}: ""']

    def around_input(self) -> tuple[str, str, bool]:
        return self.pair.replace("KEY", INPUT) + '"', '"', True

    def value_rule(
        self, name: str, schema: Any, root: Mapping[str, Any], terms: GrammarTerms
    ) -> list[str]:
        """The rules of a value, the first of which is `name`."""
        return [f"{name}: {terms.json(with_definitions(schema, root))}"]


@dataclass(frozen=True, kw_only=True)
class PythonFormat(NamedValues):
    """Calls with keyword arguments between the first two markers.

    Values are Python's literals or JSON. `first` and `later`: what precedes the arguments of calls.
    `close`: what follows the last one. `bare`: whether a list may also begin the output without a
    marker, if with the name of a tool, because lists are common in answers.
    """

    first: Head
    later: Head
    close: str = ""
    bare: bool = False

    pair: ClassVar[str] = "KEY="
    comma: ClassVar[str] = ", "

    def steps(self, parser: ToolParser) -> Steps:
        begin, end = self.markers
        marker = "" if self.bare else (yield from parser.until(begin))
        while True:
            match = yield from parser.head(self.first)
            if match and (marker or match[1] in parser.schemas):
                while match:
                    parser.begin_call(match[1])
                    yield from self._arguments(parser)
                    match = yield from parser.head(self.later)
                for text in filter(None, (self.close, end)):
                    yield from parser.goes_on_with(text)
            else:
                if match:
                    parser.give_back(match[0])
                parser.put(marker)
            marker = yield from parser.until(begin)

    def _arguments(self, parser: ToolParser) -> Steps:
        parser.add_arguments("{")
        separator = ""
        while match := (yield from parser.head(_KEYWORD)):
            parser.add_arguments(f"{separator}{json.dumps(match[1], ensure_ascii=False)}: ")
            ended = yield from parser.json_until(_ArgumentScan(), "null")
            if parser.was_cut and not ended:
                yield from parser.stop()
            separator = ", "
            yield from parser.goes_on_with(",")
        closed = yield from parser.goes_on_with(")")
        if parser.was_cut and not closed:
            yield from parser.stop()
        parser.add_arguments("}")


_FIRST_IN_LIST = Head(SPACE, "[", SPACE, NAME, SPACE, "(", SPACE, ahead=_ARGUMENT)
_LATER_IN_LIST = Head(SPACE, ",", SPACE, NAME, SPACE, "(", SPACE, ahead=_ARGUMENT)
_IN_LINE = Head(SPACE, NAME, "(", SPACE, ahead=_ARGUMENT)
_KEYWORD = Head(SPACE, Chars(r"\w", 1, 128), SPACE, "=")


class _ArgumentScan:
    """Finds the comma or parenthesis behind a value, in pieces of its text."""

    def __init__(self) -> None:
        self._depth = 0  # number of open brackets
        self._quote = ""  # of the open string
        self._escaped = False

    def end_in(self, text: str, start: int = 0) -> int | None:
        """The place of what is behind the value; None if it goes on."""
        at = start
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while found := (_IN_STRING[self._quote] if self._quote else _OUTSIDE).search(text, at):
            at, char = found.end(), found[0]
            if char == "\\":
                self._escaped = at == len(text)
                at += 1
            elif self._quote or char in "\"'":
                self._quote = "" if self._quote else char
            elif self._depth == 0 and char in ",)":
                return at - 1
            elif char != ",":
                self._depth += 1 if char in "([{" else -1
        return None


@dataclass(frozen=True, kw_only=True)
class GemmaFormat(NamedValues):
    """`call:NAME{KEY:VALUE}` between the first two markers; strings are between two `quote`."""

    quote: str

    pair: ClassVar[str] = "KEY:"

    def steps(self, parser: ToolParser) -> Steps:
        begin, end, *_ = self.markers
        while True:
            yield from parser.until(begin)
            if match := (yield from parser.head(_GEMMA_CALL)):
                parser.begin_call(match[1])
                yield from self._arguments(parser, end)
                yield from parser.goes_on_with(end)
            else:
                parser.put(begin)

    def _arguments(self, parser: ToolParser, end: str) -> Steps:
        repair, depth = JsonRepair(), 1

        def add(text: str) -> None:
            parser.add_arguments(repair.push(text))

        def add_string(text: str) -> None:
            add(json.dumps(text, ensure_ascii=False)[1:-1])

        add("{")
        while depth:
            found = yield from parser.text_until((self.quote, "{", "}", end), add)
            if found == self.quote:
                add('"')
                found = yield from parser.text_until((self.quote,), add_string)
                add('"' if found else "")
            elif found in ("{", "}"):
                add(found)
                depth += 1 if found == "{" else -1
            if not found and parser.was_cut:
                yield from parser.stop()
            if found in ("", end):
                break
        parser.add_arguments(repair.close())

    def around_input(self) -> tuple[str, str, bool]:
        return f"{INPUT}:{self.quote}", self.quote, False

    def value_rule(
        self, name: str, schema: Any, root: Mapping[str, Any], terms: GrammarTerms
    ) -> list[str]:
        types = types_of(schema, root)
        if types and types <= _SCALARS:
            return super().value_rule(name, schema, root, terms)
        is_one = types == frozenset({"string"})
        rules, end = text_rules(f"{name}_text", schema if is_one else {}, self.quote, terms)
        text = f"{terms.text(self.quote)} {name}_text {terms.text(end)}"
        if is_one:
            return [f"{name}: {text}", *rules]
        pair = f'/[A-Za-z0-9_]+/ ":" {name}'  # of any types
        scalar = json.dumps({"type": ["number", "boolean", "null"]})
        return [
            f"{name}: {text} | {name}_scalar | {name}_list | {name}_object",
            *rules,
            f"{name}_scalar: %json {scalar}",
            f'{name}_list: "[" ({name} ("," {name})*)? "]"',
            f'{name}_object: "{{" ({pair} ("," {pair})*)? "}}"',
        ]


_GEMMA_CALL = Head(SPACE, "call:", NAME, "{")

PYTHONIC = PythonFormat(
    name="pythonic",
    models="Llama 4, Llama 3.2 with such a template",
    templates=(("[func_name1(",), ("<|python_start|>",)),
    markers=("<|python_start|>", "<|python_end|>"),
    call=("NAME(", ")"),
    around=("[", ", ", "]"),
    first=_FIRST_IN_LIST,
    later=_LATER_IN_LIST,
    close="]",
    bare=True,
)
LFM2 = PythonFormat(
    name="lfm2",
    models="LFM2.5, LFM2 with such a template",
    templates=(("<|tool_call_start|>",),),
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    call=("NAME(", ")"),
    around=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    first=_FIRST_IN_LIST,
    later=_LATER_IN_LIST,
    close="]",
)
OLMO3 = PythonFormat(
    name="olmo3",
    models="Olmo 3, a call a line",
    templates=(("<functions>", "<function_calls>"),),
    markers=("<function_calls>", "</function_calls>"),
    call=("NAME(", ")"),
    around=("<function_calls>", "\n", "</function_calls>"),
    first=_IN_LINE,
    later=_IN_LINE,
)
FUNCTION_GEMMA = GemmaFormat(
    name="functiongemma",
    models="FunctionGemma",
    templates=(("<start_function_call>",),),
    markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    call=("<start_function_call>call:NAME{", "}<end_function_call>"),
    quote="<escape>",
)
GEMMA4 = GemmaFormat(
    name="gemma4",
    models="Gemma 4",
    templates=(("<|tool_call>call:",),),
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    call=("<|tool_call>call:NAME{", "}<tool_call|>"),
    quote='<|"|>',
)
