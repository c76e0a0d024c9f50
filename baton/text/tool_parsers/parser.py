"""Finds tool calls in text that arrives in pieces: the scanner that all formats share.

Results do not depend on how the text is cut. Arguments are emitted as they arrive, after the name:
unchanged if they are JSON, else repaired. Text that turns out not to be a call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from baton.generation.tool_call import ToolCallDelta
from baton.text.json_repair import JsonRepair, repaired
from baton.text.tool_parsers.head import Head

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


class ToolParser:
    """Splits one output, after its reasoning, into content and tool calls.

    Formats are generators that use the steps below. Steps yield if they need more text, and return
    at the end of it. A format with channels splits off the reasoning, too.
    """

    def __init__(
        self,
        steps: Callable[[ToolParser], Steps],
        schemas: ToolSchemas,
        new_id: Callable[[], str],
        *,
        markers: tuple[str, ...] = (),
        single: bool = False,
    ) -> None:
        """`steps` and `markers`: of the format. `schemas`: of the tools that may be called.

        `new_id`: makes the id of a call. `single`: drop all calls after the first.
        """
        self.num_calls = 0
        self.call_is_cut = False  # the output ends within a call
        self.markers = markers
        self.schemas = schemas
        self.part = "content"  # or "reasoning" or "call", if the format has channels
        self._new_id = new_id
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
        self._arguments: list[str] = []  # of the last call
        self._steps = steps(self)

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
            self.call_is_cut = cut and self.num_calls > 0 and not _is_json(self._arguments)
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
        dropped; if `markers_are_rare` and there was no call, not if it is one character, which may
        be ordinary text.
        """
        first_chars = {marker[0] for marker in markers}
        while not (found := self._first_of(markers)):
            held = 0
            if not first_chars.isdisjoint(self._text):
                held = max(_beginning_at_end(self._text, marker) for marker in markers)
            may_be_text = markers_are_rare and not self.num_calls
            if self._ended and not (self._cut and held > may_be_text):
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
        if not (self._single and self.num_calls > 1):
            self._arguments.clear()
        self._add(ToolCallDelta(self.num_calls - 1, call_id or self._new_id(), name, ""))

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        index, last = self.num_calls - 1, self._deltas[-1] if self._deltas else None
        if self._single and index:
            return
        self._arguments.append(text)
        if last and last.index == index and not last.id:
            text = self._deltas.pop().arguments + text
        if text:
            self._add(ToolCallDelta(index, "", "", text))

    def take_all(self) -> str:
        """Takes the rest of the text."""
        return self.take(len(self._text))

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


def _is_json(parts: Sequence[str]) -> bool:
    try:
        json.loads("".join(parts))
    except (ValueError, RecursionError):
        return False
    return True


def _beginning_at_end(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that may become `marker`."""
    most = min(len(text), len(marker) - 1)
    return next((n for n in range(most, 0, -1) if marker.startswith(text[-n:])), 0)
