"""Finds tool calls in text that arrives in pieces: the scanner that all formats share.

Results do not depend on how the text is cut. Arguments are emitted as they arrive, after the name:
unchanged if they are JSON, else repaired. Text that turns out not to be a call is content.
`baton.text.tool_formats` has the formats.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from baton.generation.tool_call import ToolCallDelta
from baton.text.json_repair import JsonRepair, repaired

_MAX_HEAD_CHARS = 4096  # of a call, before its arguments
_HEAD = re.compile(
    r'\{\s*(?:"(?:id|type)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"([^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_KEYS = ("id", "type", "name", "arguments", "parameters")
# A name of bounded length, because it is searched again with each piece of text.
_NAME = re.compile(r"\s{0,64}([\w.-]{1,128})\s{0,64}(?=[\[{])")
_NAME_SO_FAR = re.compile(r"\s{0,64}[\w.-]{0,128}\s{0,64}")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]<]')

# The JSON schemas of the arguments of tools, by name; None: no arguments.
ToolSchemas = Mapping[str, Mapping[str, Any] | None]
Steps = Generator[None, None, None]
Found = Generator[None, None, bool]


class ParsedText(NamedTuple):
    """The parts of a piece of output."""

    content: str
    tool_calls: list[ToolCallDelta]
    reasoning: str = ""


class Chars(NamedTuple):
    """From `least` to `most` characters of a class of regular expressions; a group if `named`."""

    pattern: str
    least: int
    most: int
    named: bool = True


SPACE = Chars(r"\s", 0, 64, named=False)
NAME = Chars(r"[\w.-]", 1, 128)


class Head:
    """What precedes arguments, matched at the beginning of text that arrives in pieces.

    `parts`: texts, characters, and optional sequences of both. One of the texts in `ahead` must
    follow, or one of such characters, and is not taken.
    """

    def __init__(self, *parts: HeadPart, ahead: Sequence[str] | Chars = ()) -> None:
        if isinstance(ahead, Chars):
            behind, rest = ahead.pattern, ""
        else:
            behind = "|".join(map(re.escape, ahead))
            rest = "|".join(_beginnings(text) for text in ahead)
        self._pattern = re.compile(_pattern(parts) + (f"(?={behind})" if ahead else ""))
        self._beginning = re.compile(_so_far(parts, f"(?:{rest})"))

    def match(self, text: str) -> re.Match[str] | None:
        """The match at the beginning of `text`."""
        return self._pattern.match(text)

    def may_match(self, text: str) -> bool:
        """Whether `text` is the beginning of a match, with more text to come."""
        return self._beginning.fullmatch(text) is not None


HeadPart = str | Chars | Sequence["str | Chars"]


def _pattern(parts: Sequence[HeadPart]) -> str:
    """The regular expression of a head."""
    patterns = []
    for part in parts:
        if isinstance(part, str):
            patterns.append(re.escape(part))
        elif isinstance(part, Chars):
            group = "(" if part.named else "(?:"
            patterns.append(f"{group}{part.pattern}{{{part.least},{part.most}}})")
        else:
            patterns.append(f"(?:{_pattern(part)})?")
    return "".join(patterns)


def _so_far(parts: Sequence[HeadPart], rest: str) -> str:
    """A regular expression of all beginnings of the parts, then of `rest`."""
    for part in reversed(parts):
        if isinstance(part, str):
            rest = _beginnings(part, rest)
        elif isinstance(part, Chars):
            rest = f"{part.pattern}{{0,{part.most}}}{rest}"
        else:
            rest = f"(?:{_so_far(part, rest)}|{rest})"
    return rest


def _beginnings(text: str, rest: str = "") -> str:
    for char in reversed(text):
        rest = f"(?:{re.escape(char)}{rest})?"
    return rest


class ToolParser:
    """Splits one output, after its reasoning, into content and tool calls.

    Formats are generators that use the steps below. Steps yield if they need more text, and return
    at the end of it. A format with channels splits off the reasoning, too.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        schemas: ToolSchemas = MappingProxyType({}),
        *,
        single: bool = False,
    ) -> None:
        """`schemas`: of the tools that may be called. `single`: drop all calls after the first."""
        self.num_calls = 0
        self.schemas = schemas
        self.markers = tool_format.markers
        self.part = "content"  # or "reasoning" or "call", if the format has channels
        self._new_id = tool_format.new_id
        self._single = single
        self._text = ""  # not consumed by a step yet
        self._ended = self._cut = False
        self._has_content = False  # whether there was content before the last call
        self._content = ""
        self._space = ""  # white space after content, dropped before a call
        self._behind_call = False
        self._reasoning = ""
        self._has_reasoning, self._between_thoughts = False, ""
        self._deltas: list[ToolCallDelta] = []
        self._steps = tool_format.steps(self)

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> ParsedText:
        """Adds text; returns the content and pieces of calls that are certain, all if `last`.

        If the output is `cut` there, a possible beginning of a call or its marker is dropped, and
        arguments stay incomplete.
        """
        self._text += text
        self._ended, self._cut = last, cut
        next(self._steps)
        if last:
            self._content += self._space
        parsed = ParsedText(self._content, self._deltas, self._reasoning)
        self._content, self._deltas, self._reasoning = "", [], ""
        return parsed

    @property
    def was_cut(self) -> bool:
        """Whether the output ends here, cut by its length or a stop string."""
        return self._ended and self._cut and not self._text

    def until(self, *markers: str) -> Generator[None, None, str]:
        """Emits content up to one of the markers, which is dropped and returned."""
        found = yield from self.text_until(markers, self.put, markers_are_rare=True)
        if not found:
            yield from self.stop()
        return found

    def text_until(
        self,
        markers: Sequence[str],
        emit: Callable[[str], object],
        *,
        markers_are_rare: bool = False,
    ) -> Generator[None, None, str]:
        """Emits text up to the first of the markers, which is dropped; returns it.

        Returns an empty text at the end of the output. If that is cut, a beginning of a marker is
        dropped; if `markers_are_rare`, not a single character, which is common by itself.
        """
        first_chars = {marker[0] for marker in markers}
        while not (found := self._first_of(markers)):
            held = 0
            if not first_chars.isdisjoint(self._text):
                held = max(_beginning_at_end(self._text, marker) for marker in markers)
            if self._ended and not (self._cut and held > markers_are_rare):
                held = 0
            emit(self.take(len(self._text) - held))
            if self._ended:
                self._text = ""
                return ""
            yield
        at, marker = found
        emit(self.take(at))
        self.take(len(marker))
        return marker

    def stop(self) -> Generator[None, None, None]:
        """Drops the rest of an output that has ended."""
        self._text = ""
        while True:
            yield

    def head(self, head: Head) -> Generator[None, None, re.Match[str] | None]:
        """Takes a head; None, without effect, if the text does not begin with it."""
        while (match := head.match(self._text)) is None:
            if not head.may_match(self._text):
                return None
            if self._ended:
                if self._cut:
                    yield from self.stop()
                return None
            yield
        self.take(match.end())
        return match

    def line_break(self) -> Steps:
        """Drops a line break, if one follows."""
        while not (self._text or self._ended):
            yield
        self._text = self._text.removeprefix("\n")

    def give_back(self, text: str) -> None:
        """Undoes the taking of a text."""
        self._text = text + self._text

    def goes_on_with(self, mark: str, *, drop: bool = True) -> Found:
        """Whether `mark` follows, after white space; drops both."""
        space = 0  # characters of white space, which are read once
        while True:
            text = self._text[space:].lstrip()
            if text.startswith(mark):
                if drop:
                    self._text = text[len(mark) :]
                return True
            if self._ended or not mark.startswith(text):
                if self._cut and mark.startswith(text):
                    self._text = ""
                return False
            space = len(self._text) - len(text)
            yield

    def call(self, *, bare: bool = False) -> Found:
        """Parses a call as an object with name and arguments; False, without effect, if it is not.

        `bare`: no marker precedes it, so it must have arguments.
        """
        scan, seen = _ObjectScan(), 0
        while True:
            self._text = self._text.lstrip()
            if head := _HEAD.match(self._text):
                break
            key = _FIRST_KEY.match(self._text)
            if (end := scan.end_in(self._text, seen)) is not None:
                return self._whole(end, bare)
            if (
                self._text[:1] not in "{"
                or len(self._text) > _MAX_HEAD_CHARS
                or (key and key[1] not in _KEYS)
            ):
                return False
            if self._ended:
                return self._drop_if_cut()
            seen = len(self._text)
            yield
        self.begin_call(head[1])
        self.take(head.end())
        yield from self.arguments()
        scan = _ObjectScan(depth=1)  # a closing brace may follow
        while (end := scan.end_in(self._text)) is None and not self._ended:
            self._text = ""
            yield
        self.take(len(self._text) if end is None else end)
        return True

    def named_call(self) -> Found:
        """Parses a call as a name and an object of arguments, with marks between."""
        while (name := _NAME.match(self._text)) is None:
            if not _NAME_SO_FAR.fullmatch(self._text):
                return False
            if self._ended:
                return self._drop_if_cut()
            yield
        self.begin_call(name[1])
        while (at := self._text.find("{")) < 0 and not self._ended:
            self._text = ""
            yield
        self.take(at if at >= 0 else len(self._text))
        yield from self.arguments()
        return True

    def arguments(self) -> Steps:
        """Emits the arguments of the last call as they arrive."""
        yield from self.json_until(_ObjectScan(), "{}")

    def json_until(self, scan: Scan, missing: str) -> Found:
        """Adds a value up to its end to the last call's arguments; False if the end is not there.

        `missing`: for a value without text.
        """
        repair, given = JsonRepair(), False

        def add(text: str) -> None:
            nonlocal given
            self.add_arguments(text)
            given = given or bool(text.strip())

        while (end := scan.end_in(self._text)) is None and not self._ended:
            add(repair.push(self.take(len(self._text))))
            yield
        add(repair.push(self.take(len(self._text) if end is None else end)))
        if end is not None or not self._cut:
            add(repair.close())
            self.add_arguments("" if given else missing)
        return end is not None

    def put(self, text: str) -> None:
        """Emits content without white space around calls; a line break joins its parts."""
        shown = text.rstrip()
        if not shown:  # content if more content follows
            self._space += "" if self._behind_call else text
            return
        if self._behind_call:
            self._content += ("\n" if self._has_content else "") + shown.lstrip()
        else:
            self._content += self._space + shown
        self._space, self._behind_call, self._has_content = text[len(shown) :], False, True

    def think(self, text: str) -> None:
        """Emits reasoning; a line break joins its parts."""
        if text:
            self._reasoning += self._between_thoughts + text
            self._between_thoughts, self._has_reasoning = "", True

    def new_part(self, part: str) -> None:
        """Begins a part of the output of a format with channels."""
        self.part = part
        self._behind_call = self._behind_call or self._has_content
        self._between_thoughts = "\n" if self._has_reasoning else ""

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begins a call, by default with an id of the format's form."""
        self._space, self._behind_call = "", True
        self.num_calls += 1
        self._add(ToolCallDelta(self.num_calls - 1, call_id or self._new_id(), name, ""))

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        index, last = self.num_calls - 1, self._deltas[-1] if self._deltas else None
        if last and last.index == index and not last.id:
            text = self._deltas.pop().arguments + text
        if text:
            self._add(ToolCallDelta(index, "", "", text))

    def take(self, count: int) -> str:
        """Takes characters from the beginning of the text."""
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _whole(self, end: int, bare: bool) -> bool:
        """Parses a complete call with keys in another order, or with arguments in a string."""
        try:
            value = json.loads(self._text[:end], strict=False)
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or (bare and arguments is None):
            return False
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        arguments = repaired(arguments) or "{}"
        if not arguments.lstrip().startswith("{"):
            return False
        self.begin_call(name)
        self.add_arguments(arguments)
        self.take(end)
        return True

    def _drop_if_cut(self) -> bool:
        """Drops the rest of a cut output, which may be the beginning of a call."""
        if self._cut:
            self._text = ""
        return self._cut

    def _first_of(self, markers: Sequence[str]) -> tuple[int, str] | None:
        """Place and text of the first marker, the longest of those that begin there."""
        if not any(map(self._text.__contains__, markers)):
            return None
        found = [(at, m) for m in markers if (at := self._text.find(m)) >= 0]
        return min(found, key=lambda one: (one[0], -len(one[1])), default=None)

    def _add(self, delta: ToolCallDelta) -> None:
        if not (self._single and delta.index):
            self._deltas.append(delta)


class Scan(Protocol):
    """Finds the end of a value in pieces of its text."""

    def end_in(self, text: str, start: int = 0) -> int | None:
        """The place in `text` behind the value; None if it goes on."""


class _ObjectScan:
    """Finds the end of a JSON object in pieces of its text."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth  # number of open objects and lists
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str, start: int = 0) -> int | None:
        """The end of the object in `text[start:]`, or a "<" outside of strings: not JSON."""
        at = start
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while found := (_IN_STRING if self._in_string else _OUTSIDE).search(text, at):
            at, char = found.end(), found[0]
            if char == "\\":
                if at == len(text):
                    self._escaped = True
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif char == "<":
                return at - 1
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return at
        return None


def _beginning_at_end(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that may become `marker`."""
    most = min(len(text), len(marker) - 1)
    return next((n for n in range(most, 0, -1) if marker.startswith(text[-n:])), 0)


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

    def grammar(
        self,
        tools: ToolSchemas,
        special: Mapping[str, int],
        options: Mapping[str, object],
        *,
        single: bool,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """A Lark grammar of calls of `tools` (schemas by name), or of an `answer` (a schema).

        `special`: ids of markers that are special tokens. `options`: added to each schema.
        """
        first, between, last = self.around
        if answer is not None and (first + self.call[0]).startswith("{"):
            first = self.markers[0]  # else a "{" would be ambiguous
        first, between, last = (lark(text, special) for text in (first, between, last))
        more = "" if single or not self.parallel else f"({between} call)*"
        rules = [f"start: calls{'' if answer is None else ' | answer'}"]
        rules.append(f"calls: {first} call {more} {last}")
        rules += self.call_rules(tools, special, options)
        if answer is not None:
            rules.append(f"answer: %json {json.dumps({**answer, **options})}")
        return "\n".join(rules)

    def call_rules(
        self, tools: ToolSchemas, special: Mapping[str, int], options: Mapping[str, object]
    ) -> list[str]:
        """The rules of a call of one of the tools."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, (name, schema) in enumerate(tools.items()):
            terms = {"NAME": json.dumps(name), "INDEX": "/[0-9]{1,4}/"}
            before, behind = (lark(text, special, terms) for text in self.call)
            rules.append(f"call_{i}: {before} arguments_{i} {behind}")
            rules += self.argument_rules(i, schema, special, options)
        return rules

    def argument_rules(
        self,
        number: int,
        schema: Mapping[str, Any] | None,
        special: Mapping[str, int],
        options: Mapping[str, object],
    ) -> list[str]:
        """The rules of a tool's arguments, the first of which is `arguments_` and its number."""
        arguments = NO_ARGUMENTS if schema is None else schema
        return [f"arguments_{number}: %json {json.dumps({**arguments, **options})}"]


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


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def lark(text: str, special: Mapping[str, int], terms: Mapping[str, str] | None = None) -> str:
    """A Lark sequence for a text with special tokens, and words that stand for `terms`."""
    terms = {marker: f"<[{token}]>" for marker, token in special.items()} | dict(terms or {})
    parts = re.split(f"({'|'.join(map(re.escape, terms))})", text) if terms else [text]
    return " ".join(terms.get(part) or json.dumps(part) for part in parts if part)
