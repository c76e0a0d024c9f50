"""A family's format of tool calls: its markers, its parser, its grammar, and its history."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from baton.errors import InvalidRequest
from baton.generation.sampling_params import MAX_STRUCTURED_OUTPUT_CHARS, StructuredOutput
from baton.text.tool_parsers.parser import Steps, ToolParser, ToolSchemas
from baton.text.tool_parsers.text_grammars import text_grammar

INPUT = "input"  # the argument of a tool that takes a text
ANY_TEXT = "/(?s:.*)/"
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass
class GrammarTerms:
    """Writes terms of a Lark grammar.

    `special`: ids of markers that are special tokens. `options`: added to each schema. All methods
    raise InvalidRequest once the terms have more characters than a grammar may have, because each
    parameter may repeat all definitions of its tool.
    """

    special: Mapping[str, int]
    options: Mapping[str, object]
    num_chars: int = field(default=0, init=False)  # of the terms

    def text(self, text: str, words: Mapping[str, str] = MappingProxyType({})) -> str:
        """A sequence for a text with special tokens, and with `words` that stand for terms."""
        terms = {marker: f"<[{token}]>" for marker, token in self.special.items()} | dict(words)
        parts = re.split(f"({'|'.join(map(re.escape, terms))})", text) if terms else [text]
        return self._added(" ".join(terms.get(part) or json.dumps(part) for part in parts if part))

    def first_special(self, text: str) -> int:
        """The place of the first special token in a text; its length if there is none."""
        return min((at for one in self.special if (at := text.find(one)) >= 0), default=len(text))

    def json(self, schema: Mapping[str, object]) -> str:
        """JSON that matches a schema."""
        return self._added(f"%json {json.dumps({**schema, **self.options})}")

    def _added(self, term: str) -> str:
        self.num_chars += len(term)
        check_size(self.num_chars)
        return term


def check_size(num_chars: int) -> None:
    """Raises InvalidRequest for a grammar of tools with too many characters."""
    if num_chars > (most := MAX_STRUCTURED_OUTPUT_CHARS):
        raise InvalidRequest(
            f"as a grammar the tools have more than {most} characters: leave tool_choice to the "
            "model, or name one",
            "chat.tools",
        )


@dataclass(frozen=True, kw_only=True)
class AllowedCalls:
    """What a grammar allows: calls of `tools`, or something else if they are optional.

    `inputs`: restrictions of the texts that tools take as their argument `input`. `single`: one
    call at most. `answer`: a schema that an answer without calls matches. `optional`: whether
    there may be any text before the calls or without them.
    """

    tools: ToolSchemas
    inputs: Mapping[str, StructuredOutput] = field(default_factory=dict)
    single: bool = False
    answer: Mapping[str, object] | None = None
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The tool call format of a family of models. Subclasses have the steps of a parser.

    `models`: the families, for documentation. `templates`: sets of texts; a chat template with all
    of one set is the format's. `markers`: texts that may be special tokens, which are passed to the
    parser as text. `call`: the texts before and after a call's arguments, with NAME for the
    function and INDEX for a number. `around`: the texts before the first, between two, and after
    the last call.
    """

    name: str
    models: str
    templates: tuple[tuple[str, ...], ...]
    markers: tuple[str, ...]
    call: tuple[str, str]
    around: tuple[str, str, str] = ("", "", "")
    parallel: bool = True  # whether an output may have several calls
    typed: bool = False  # whether the types of arguments follow from the tools' schemas
    ends_reasoning: str = ""  # a marker that ends reasoning without its own end
    channels: bool = False  # whether it also marks content and reasoning, so that it always applies
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"

    def parser(
        self, schemas: ToolSchemas = MappingProxyType({}), *, single: bool = False
    ) -> ToolParser:
        """A parser of one output; see ToolParser."""
        return ToolParser(self.steps, schemas, self.new_id, markers=self.markers, single=single)

    def steps(self, parser: ToolParser) -> Steps:
        """Parses an output; never returns."""
        raise NotImplementedError

    @property
    def written(self) -> str:
        """A call in this format, with NAME and marks of its arguments, for documentation."""
        return self.around[0] + "{\u2026}".join(self.call) + self.around[2]

    def history(self, messages: list[dict[str, Any]], *, shown: bool) -> list[dict[str, Any]]:
        """A conversation in the form that a chat template of these models expects.

        `shown`: whether the template shows calls.
        """
        return messages if self.parallel else _one_call_each(messages)

    def marks_calls(self, special: Mapping[str, int]) -> bool:
        """Whether calls begin with a special token, which ends the text before them."""
        return (self.around[0] + self.call[0]).startswith(tuple(special)) if special else False

    def grammar(self, allowed: AllowedCalls, terms: GrammarTerms) -> str:
        """A Lark grammar of an output. Raises InvalidRequest naming the tools or one's `input`."""
        answer = allowed.answer
        first, between, last = self.around
        if answer is not None and (first + self.call[0]).startswith("{"):
            first = self.markers[0]  # else a "{" would be ambiguous
        first, between, last = map(terms.text, (first, between, last))
        more = "" if allowed.single or not self.parallel else f"({between} call)*"
        start = "calls" if answer is None else "calls | answer"
        rules = ["start: text? calls | text" if allowed.optional else f"start: {start}"]
        rules.append(f"calls: {first} call {more} {last}")
        rules += self.call_rules(allowed, terms)
        if allowed.optional:
            rules.append(f"text: {ANY_TEXT}")
        elif answer is not None:
            rules.append(f"answer: {terms.json(answer)}")
        return "\n".join(rules)

    def call_rules(self, allowed: AllowedCalls, terms: GrammarTerms) -> list[str]:
        """The rules of a call of one of the tools."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(allowed.tools)))]
        for i, (name, schema) in enumerate(allowed.tools.items()):
            words = {"NAME": json.dumps(name), "INDEX": "/[0-9]{1,4}/"}
            before, behind = (terms.text(text, words) for text in self.call)
            rules.append(f"call_{i}: {before} arguments_{i} {behind}")
            if restriction := allowed.inputs.get(name):
                rules += self.input_rules(i, restriction, terms)
            else:
                rules += self.argument_rules(i, schema, terms)
        return rules

    def argument_rules(
        self, number: int, schema: Mapping[str, Any] | None, terms: GrammarTerms
    ) -> list[str]:
        """The rules of a tool's arguments, the first of which is `arguments_` and its number."""
        return [f"arguments_{number}: {terms.json(NO_ARGUMENTS if schema is None else schema)}"]

    def input_rules(
        self, number: int, restriction: StructuredOutput, terms: GrammarTerms
    ) -> list[str]:
        """As `argument_rules`, for the argument `input`, a text that matches the restriction."""
        name = f"arguments_{number}"
        before, behind, in_json = self.around_input()
        end = behind[: terms.first_special(behind)]
        try:
            rules = text_grammar(
                restriction, f"{name}_text", in_json=in_json, end=end, before_token=end != behind
            )
        except ValueError as error:
            raise InvalidRequest(str(error), f"chat.tools[{number}].input") from error
        rest = terms.text(behind[len(end) :])
        return [f"{name}: {terms.text(before)} {name}_text {rest}", *rules]

    def around_input(self) -> tuple[str, str, bool]:
        """What precedes and follows the text of the argument `input`; whether it is in JSON."""
        return f'{{"{INPUT}": "', '"}', True


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts messages with several calls, each of which is followed by its result."""
    turns = list[dict[str, Any]]()
    at = 0
    while at < len(messages):
        turn, at = messages[at], at + 1
        if len(calls := turn.get("tool_calls", ())) < 2:
            turns.append(turn)
            continue
        results = list[dict[str, Any]]()
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for call in calls:
            own = [one for one in results if one.get("tool_call_id") == call["id"]]
            own = own or [one for one in results if "tool_call_id" not in one][:1]
            results = [one for one in results if one not in own]
            turns += [{**turn, "tool_calls": [call]}, *own]
            turn = {"role": turn["role"], "content": ""}
        turns += results
    return turns
