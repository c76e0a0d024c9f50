"""Formats of tool calls whose arguments are elements of markup, one for each parameter.

The text of an element has no type of its own: it is what the tool's schema says, and a text where
it is not of that type. Without a type in the schema it is JSON, if it can be read as such.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.text.json_repair import JsonRepair, repaired
from baton.text.tool_parsers.format import ANY_TEXT, INPUT, GrammarTerms, ToolFormat
from baton.text.tool_parsers.head import NAME, SPACE, Chars, Head
from baton.text.tool_parsers.parser import Steps, ToolParser
from baton.text.tool_parsers.schemas import (
    STRING,
    is_text,
    properties_of,
    required_of,
    texts_of,
    type_of,
    types_of,
    with_definitions,
)

_CONTAINERS = frozenset({"object", "array"})
_ANY = frozenset[str]()  # where a schema does not say


@dataclass(frozen=True, kw_only=True)
class XmlFormat(ToolFormat):
    """Calls that end with `close`, in a section from `begin` to `end`.

    `bare`: a text with which `head` may begin without `begin`. `parameter`: what precedes a value,
    with the parameter's name, and "true" or "false" if it says whether the value is text.
    `element`: the texts around a value, with KEY for the name. `in_lines`: a value has a line break
    before and after it.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...] = ()
    head: Head
    close: str
    bare: str = ""
    parameter: Head
    element: tuple[str, str]
    in_lines: bool = False
    typed: bool = True

    @property
    def written(self) -> str:
        elements = "\u2026".join(self.element) + "\u2026"
        return self.around[0] + elements.join(self.call) + self.around[2]

    def steps(self, parser: ToolParser) -> Steps:
        while True:
            marker = yield from parser.until(*self.begin, *([self.bare] if self.bare else []))
            if marker == self.bare:
                parser.give_back(marker)
            called = False
            while match := (yield from parser.head(self.head)):
                called = True
                parser.begin_call(match[1])
                yield from self._arguments(parser, parser.schemas.get(match[1]) or {})
            if called:
                for text in self.end:
                    yield from parser.goes_on_with(text)
                continue
            if marker == self.bare:
                parser.take(len(marker))
            parser.put(marker)

    def _arguments(self, parser: ToolParser, schema: Mapping[str, Any]) -> Steps:
        parser.add_arguments("{")
        separator = ""
        while match := (yield from parser.head(self.parameter)):
            key, *marked = match.groups()
            parser.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            if marked:
                types = STRING if marked[0] == "true" else _ANY
            else:
                types = types_of(properties_of(schema).get(key), schema)
            yield from self._value(parser, types)
            separator = ", "
        closed = yield from parser.goes_on_with(self.close)
        if parser.was_cut and not closed:
            yield from parser.stop()
        parser.add_arguments("}")

    def _value(self, parser: ToolParser, types: frozenset[str]) -> Steps:
        value, end = Value(types, parser.add_arguments), self.element[1].strip()
        if self.in_lines:
            yield from parser.line_break()
        found = yield from parser.text_until(
            [f"\n{end}", end] if self.in_lines else [end], value.push
        )
        if not found and parser.was_cut:
            yield from parser.stop()
        value.close()

    def argument_rules(
        self, number: int, schema: Mapping[str, Any] | None, terms: GrammarTerms
    ) -> list[str]:
        schema = schema or {}
        rules, sequence = list[str](), list[str]()
        required = required_of(schema)
        for at, (key, one) in enumerate(properties_of(schema).items()):
            name = f"arguments_{number}_{at}"
            marked = "true" if is_text(one, schema) else "false"
            before, behind = (
                text.replace("STRING", marked).replace("KEY", key) for text in self.element
            )
            value, end = _value_rules(f"{name}_v", one, schema, behind, terms)
            rules += [f"{name}: {terms.text(before)} {name}_v {terms.text(end)}", *value]
            sequence.append(name if key in required else f"{name}?")
        return [f"arguments_{number}: {' '.join(sequence)}", *rules]

    def around_input(self) -> tuple[str, str, bool]:
        before, behind = (
            text.replace("STRING", "true").replace("KEY", INPUT) for text in self.element
        )
        return before, behind, False


def _value_rules(
    name: str, schema: Any, root: Mapping[str, Any], behind: str, terms: GrammarTerms
) -> tuple[list[str], str]:
    """The rules of a value, and the text behind it that they do not contain."""
    if not is_text(schema, root):
        return [f"{name}: {terms.json(with_definitions(schema, root))}"], behind
    return text_rules(name, schema, behind, terms)


def text_rules(name: str, schema: Any, behind: str, terms: GrammarTerms) -> tuple[list[str], str]:
    """The rules of a text, and the text behind it that they do not contain.

    A text ends with the first `behind`, and has no special tokens.
    """
    if texts := texts_of(schema):
        return [f"{name}: " + " | ".join(map(json.dumps, texts))], behind
    first = terms.first_special(behind)
    if first == 0:
        return [f"{name}: {ANY_TEXT}"], behind
    part = f"{name}_part[suffix={json.dumps(behind[:first])}]: {ANY_TEXT}"
    # Where a special token follows, what precedes it may also be in the text.
    return [f"{name}: {name}_part{'+' if behind[first:] else ''}", part], behind[first:]


class Value:
    """Converts the text of a value to JSON, in pieces; texts and containers as they come."""

    def __init__(self, types: frozenset[str], emit: Callable[[str], object]) -> None:
        """`types`: of the schema; empty if it has none."""
        self._types = types
        self._emit = emit
        self._repair: JsonRepair | None = None
        self._held = list[str]()
        if types == STRING:
            emit('"')

    def push(self, text: str) -> None:
        """Adds text."""
        if self._types == STRING:
            self._emit(json.dumps(text, ensure_ascii=False)[1:-1])
            return
        if self._repair is None and self._types and self._types <= _CONTAINERS and not self._held:
            text = text.lstrip()
            if text.startswith(("{", "[")):
                self._repair = JsonRepair()
        if self._repair is not None:
            self._emit(self._repair.push(text))
        elif text:
            self._held.append(text)

    def close(self) -> None:
        """Ends the value."""
        if self._types == STRING:
            self._emit('"')
        elif self._repair is not None:
            self._emit(self._repair.close())
        else:
            self._emit(to_json("".join(self._held), self._types))


def to_json(text: str, types: frozenset[str]) -> str:
    """A value of one of the types as JSON; a string if it is none of them."""
    word = text.strip()
    is_json = _is_json(word)
    if is_json and (not types or types & _kinds(json.loads(word))):
        return word
    if "null" in types and word == "None":
        return "null"
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    if types & _CONTAINERS and word.startswith(("{", "[")):
        return repaired(word)
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _kinds(value: object) -> frozenset[str]:
    """The types of a value that is not a text in quotes, which would be a text with quotes."""
    kind = type_of(value)
    return frozenset({kind, "number"} if kind == "integer" else {kind}) - STRING


def _refuse(word: str) -> None:
    raise ValueError(word)


_KEY = Chars(r"[^<>\n]", 1, 256)
_QUOTED = Chars(r'[^"<>\n]', 1, 256)
QWEN3_CODER = XmlFormat(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
    templates=(("<tool_call>", "<function="),),
    markers=("<tool_call>", "</tool_call>"),
    call=("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>"),
    around=("", "\n", ""),
    begin=("<tool_call>",),
    end=("</tool_call>",),
    bare="<function=",
    head=Head(SPACE, "<function=", NAME, ">", SPACE, ahead=("<parameter=", "</function>")),
    close="</function>",
    parameter=Head(SPACE, "<parameter=", _KEY, ">"),
    element=("<parameter=KEY>\n", "\n</parameter>\n"),
    in_lines=True,
)
SEED_OSS = XmlFormat(
    name="seed_oss",
    models="Seed-OSS",
    templates=(("<seed:tool_call>",),),
    markers=("<seed:tool_call>", "</seed:tool_call>"),
    call=("<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>"),
    around=("", "\n", ""),
    begin=("<seed:tool_call>",),
    end=("</seed:tool_call>",),
    head=QWEN3_CODER.head,
    close="</function>",
    parameter=QWEN3_CODER.parameter,
    element=("<parameter=KEY>", "</parameter>\n"),
)
GLM45 = XmlFormat(
    name="glm45",
    models="GLM-4.5 to GLM-5",
    templates=(("<tool_call>", "<arg_key>"),),
    markers=(
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    call=("<tool_call>NAME\n", "</tool_call>"),
    around=("", "\n", ""),
    begin=("<tool_call>",),
    head=Head(SPACE, NAME, SPACE, ahead=("<arg_key>", "</tool_call>")),
    close="</tool_call>",
    parameter=Head(SPACE, "<arg_key>", _KEY, "</arg_key>", SPACE, "<arg_value>"),
    element=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
)
MINIMAX_M2 = XmlFormat(
    name="minimax_m2",
    models="MiniMax M2",
    templates=(("<minimax:tool_call>",),),
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=('<invoke name="NAME">\n', "</invoke>\n"),
    around=("<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    begin=("<minimax:tool_call>",),
    end=("</minimax:tool_call>",),
    head=Head(SPACE, '<invoke name="', NAME, '">', SPACE, ahead=("<parameter ", "</invoke>")),
    close="</invoke>",
    parameter=Head(SPACE, '<parameter name="', _QUOTED, '">'),
    element=('<parameter name="KEY">', "</parameter>\n"),
)
_D = "\uff5cDSML\uff5c"
DEEPSEEK_V32 = XmlFormat(
    name="deepseek_v32",
    models="DeepSeek V3.2",
    templates=((_D,), ("DSML",)),
    markers=(_D,),
    call=(f'<{_D}invoke name="NAME">\n', f"</{_D}invoke>\n"),
    around=(f"<{_D}function_calls>\n", "", f"</{_D}function_calls>"),
    begin=(f"<{_D}function_calls>", f"<{_D}tool_calls>"),
    end=(f"</{_D}function_calls>", f"</{_D}tool_calls>"),
    head=Head(
        SPACE, f'<{_D}invoke name="', NAME, '">', SPACE,
        ahead=(f"<{_D}parameter ", f"</{_D}invoke>"),
    ),
    close=f"</{_D}invoke>",
    parameter=Head(
        SPACE, f'<{_D}parameter name="', _QUOTED, '" string="', Chars("[a-z]", 4, 5), '">'
    ),
    element=(f'<{_D}parameter name="KEY" string="STRING">', f"</{_D}parameter>\n"),
    typed=False,
)  # fmt: skip
