"""gpt-oss's format, harmony: messages in channels, of which calls have a recipient.

    <|channel|>analysis<|message|>...<|end|>                       reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>   content before a call
    <|start|>assistant<|channel|>final<|message|>...<|return|>     content
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The prompt ends with `<|start|>assistant`. A recipient may also precede the channel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from baton.generation.sampling_params import StructuredOutput
from baton.text.tool_parsers.format import ANY_TEXT, AllowedCalls, GrammarTerms, ToolFormat
from baton.text.tool_parsers.head import SPACE, Chars, Head
from baton.text.tool_parsers.parser import Steps, ToolParser

MESSAGE = "<|message|>"
_START, _END, _CHANNEL, _CONSTRAIN = "<|start|>", "<|end|>", "<|channel|>", "<|constrain|>"
_RETURN, _CALL = "<|return|>", "<|call|>"
_RECIPIENT = (SPACE, "to=", Chars(r"[\w.-]", 1, 160))
_HEADER = Head(
    _RECIPIENT,
    _CHANNEL,
    Chars("[a-z]", 1, 32),
    _RECIPIENT,
    (SPACE, _CONSTRAIN),
    (SPACE, Chars(r"[\w.-]", 1, 64, named=False)),
    SPACE,
    MESSAGE,
)


_ANALYSIS = (f"{_CHANNEL}analysis{MESSAGE}", f"{_END}{_START}assistant")
_PREAMBLE = (f"{_CHANNEL}commentary{MESSAGE}", _ANALYSIS[1])
_FINAL = f"{_CHANNEL}final{MESSAGE}"


@dataclass(frozen=True, kw_only=True)
class HarmonyFormat(ToolFormat):
    """One call per output, because the token after it ends the output.

    `stops`: tokens that end an output.
    """

    stops: tuple[str, ...]

    def steps(self, parser: ToolParser) -> Steps:
        begun = ""  # what was taken before a header
        while True:
            header = yield from parser.head(_HEADER)
            emit: Callable[[str], object] = parser.put
            parser.new_part("content")
            if header is None:
                parser.put(begun)
            else:
                recipient, channel = header[1] or header[3] or "", header[2]
                name = recipient.removeprefix("functions.")
                if name in parser.schemas and (yield from parser.goes_on_with("{", drop=False)):
                    parser.new_part("call")
                    parser.begin_call(name)
                    yield from parser.arguments()
                    emit = _drop
                elif name in parser.schemas and parser.was_cut:
                    yield from parser.stop()
                elif recipient:
                    parser.put(begun + header[0])
                elif channel == "analysis":
                    parser.new_part("reasoning")
                    emit = parser.think
            marker = yield from parser.text_until(
                (_END, _CALL, _RETURN, _START), emit, markers_are_rare=emit == parser.put
            )
            if not marker:
                yield from parser.stop()
            begun = ""
            if marker == _START or (yield from parser.goes_on_with(_START)):
                begun = _START
                if (yield from parser.goes_on_with("assistant")):
                    begun += "assistant"

    def history(self, messages: list[dict[str, Any]], *, shown: bool) -> list[dict[str, Any]]:
        """The template shows either a call's content or its `thinking`."""
        turns = []
        for message in messages:
            turn = dict(message)
            thinking = turn.pop("reasoning_content", "")
            if turn.get("tool_calls"):
                thinking = "\n".join(filter(None, (thinking, turn["content"])))
                turn["content"] = ""
            turns.append({**turn, "thinking": thinking} if thinking else turn)
        return super().history(turns, shown=shown)

    def marks_calls(self, special: Mapping[str, int]) -> bool:
        return _CHANNEL in special

    def grammar(self, allowed: AllowedCalls, terms: GrammarTerms) -> str:
        rules = [*_analysis(terms), *self.call_rules(allowed, terms)]
        if allowed.optional:
            before, behind = map(terms.text, _PREAMBLE)
            start = "start: (analysis | preamble)* (call | final)"
            rules += [f"preamble: {before} TEXT {behind}", *_final("TEXT", terms)]
        elif allowed.answer is not None:
            start = "start: analysis* (call | final)"
            rules += _final(terms.json(allowed.answer), terms)
        else:
            start = "start: analysis* call"
        return "\n".join([start, *rules])

    def answer_grammar(self, output: StructuredOutput, terms: GrammarTerms, schema: str) -> str:
        """A Lark grammar of reasoning, and an answer that matches `output`, of the JSON `schema`.

        Raises InvalidRequest for a grammar.
        """
        if output.grammar:
            raise InvalidRequest(
                "a grammar cannot restrict one channel of this model's output: use a JSON schema, "
                "a regular expression or a choice",
                "sampling.structured_output",
            )
        answer = f"%json {schema}" if output.json_schema else " | ".join(
            map(json.dumps, output.choice)
        )  # fmt: skip
        if output.regex:
            answer = "/" + re.sub(r"\\.|/", _escaped_slash, output.regex, flags=re.DOTALL) + "/"
        rules = ["start: analysis* final", *_analysis(terms), *_final(answer, terms)]
        return "\n".join(rules)


def _drop(text: str) -> None:
    """Discards text behind the arguments of a call."""


def _escaped_slash(match: re.Match[str]) -> str:
    return r"\/" if match[0] == "/" else match[0]


def _analysis(terms: GrammarTerms) -> list[str]:
    before, behind = map(terms.text, _ANALYSIS)
    return [f"analysis: {before} TEXT {behind}", f"TEXT: {ANY_TEXT}"]


def _final(answer: str, terms: GrammarTerms) -> list[str]:
    return [f"final: {terms.text(_FINAL)} answer", f"answer: {answer}"]


HARMONY = HarmonyFormat(
    name="harmony",
    models="gpt-oss; one call per output",
    templates=((_CHANNEL, MESSAGE),),
    markers=(_START, _END, MESSAGE, _CHANNEL, _CONSTRAIN, _RETURN, _CALL),
    call=(f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{MESSAGE}", ""),
    parallel=False,
    channels=True,
    stops=(_RETURN, _CALL),
)
