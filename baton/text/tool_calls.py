"""Finds tool calls in text that arrives in pieces, in the formats of families of models.

Results do not depend on how the text is cut. Arguments are emitted as they arrive, after the name:
unchanged if they are JSON, else repaired. Text that turns out not to be a call is content.
"""

from __future__ import annotations

import json
import re
import secrets
import string
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

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
_ID_CHARS = string.ascii_letters + string.digits
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

Steps = Generator[None, None, None]
Found = Generator[None, None, bool]


class ToolParser:
    """Splits one output, after its reasoning, into content and tool calls.

    Formats are generators that use the steps below. Steps yield if they need more text, and return
    at the end of it.
    """

    def __init__(self, tool_format: ToolFormat, *, single: bool = False) -> None:
        """`single`: drop all calls after the first."""
        self.num_calls = 0
        self._new_id = tool_format.new_id
        self._single = single
        self._text = ""  # not consumed by a step yet
        self._ended = self._cut = False
        self._has_content = False  # whether there was content before the last call
        self._content = ""
        self._space = ""  # white space after content, dropped before a call
        self._behind_call = False
        self._deltas: list[ToolCallDelta] = []
        self._steps = tool_format.steps(self)

    def push(
        self, text: str, *, last: bool = False, cut: bool = False
    ) -> tuple[str, list[ToolCallDelta]]:
        """Adds text; returns the content and pieces of calls that are certain, all if `last`.

        If the output is `cut` there, a possible beginning of a call or its marker is dropped, and
        arguments stay incomplete.
        """
        self._text += text
        self._ended, self._cut = last, cut
        next(self._steps)
        if last:
            self._content += self._space
        content, deltas = self._content, self._deltas
        self._content, self._deltas = "", []
        return content, deltas

    def until(self, marker: str) -> Steps:
        """Emits content up to a marker, which is dropped."""
        while (at := self._text.find(marker)) < 0:
            held = _beginning_at_end(self._text, marker)
            # A single character is too common to be held back as a marker's beginning.
            if self._ended and not (self._cut and held > 1):
                held = 0
            self.put(self._take(len(self._text) - held))
            if self._ended:
                self._text = ""
            yield
        self.put(self._take(at))
        self._take(len(marker))

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
        self._begin(head[1])
        self._take(head.end())
        yield from self.arguments()
        scan = _ObjectScan(depth=1)  # a closing brace may follow
        while (end := scan.end_in(self._text)) is None and not self._ended:
            self._text = ""
            yield
        self._take(end or 0)
        return True

    def named_call(self) -> Found:
        """Parses a call as a name and an object of arguments, with marks between."""
        while (name := _NAME.match(self._text)) is None:
            if not _NAME_SO_FAR.fullmatch(self._text):
                return False
            if self._ended:
                return self._drop_if_cut()
            yield
        self._begin(name[1])
        while (at := self._text.find("{")) < 0 and not self._ended:
            self._text = ""
            yield
        self._take(at if at >= 0 else len(self._text))
        yield from self.arguments()
        return True

    def arguments(self) -> Steps:
        """Emits the arguments of the last call as they arrive."""
        scan, repair, given = _ObjectScan(), JsonRepair(), 0
        while (end := scan.end_in(self._text)) is None and not self._ended:
            given += self._add_arguments(repair.push(self._take(len(self._text))))
            yield
        given += self._add_arguments(
            repair.push(self._take(len(self._text) if end is None else end))
        )
        if end is not None or not self._cut:
            self._add_arguments(repair.close() or ("" if given else "{}"))

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

    def _whole(self, end: int, bare: bool) -> bool:
        """Parses a complete call with keys in another order, or with arguments in a string."""
        try:
            value = json.loads(self._text[:end], strict=False)
        except (ValueError, RecursionError):
            return False
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or (bare and arguments is None):
            return False
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        arguments = repaired(arguments) or "{}"
        if not arguments.lstrip().startswith("{"):
            return False
        self._begin(name)
        self._add_arguments(arguments)
        self._take(end)
        return True

    def _drop_if_cut(self) -> bool:
        """Drops the rest of a cut output, which may be the beginning of a call."""
        if self._cut:
            self._text = ""
        return self._cut

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _begin(self, name: str) -> None:
        self._space, self._behind_call = "", True
        self.num_calls += 1
        self._add(ToolCallDelta(self.num_calls - 1, self._new_id(), name, ""))

    def _add_arguments(self, text: str) -> int:
        """Adds to the arguments of the last call; returns the number of characters."""
        count = len(text)
        index, last = self.num_calls - 1, self._deltas[-1] if self._deltas else None
        if last and last.index == index and not last.id:
            text = self._deltas.pop().arguments + text
        if text:
            self._add(ToolCallDelta(index, "", "", text))
        return count

    def _add(self, delta: ToolCallDelta) -> None:
        if not (self._single and delta.index):
            self._deltas.append(delta)


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


@dataclass(frozen=True)
class ToolFormat:
    """The tool call format of a family of models.

    Markers that are special tokens are passed to the parser as text. `call`: the texts before and
    after a call's arguments, with NAME for the function. `around`: the texts before the first,
    between two, and after the last call.
    """

    name: str
    steps: Callable[[ToolParser], Steps]
    markers: tuple[str, ...]
    call: tuple[str, str]
    around: tuple[str, str, str]
    parallel: bool = True  # whether an output may have several calls
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"

    def grammar(
        self,
        tools: Mapping[str, Mapping[str, object] | None],
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
        first, between, last = (_lark(text, special) for text in (first, between, last))
        more = "" if single or not self.parallel else f"({between} call)*"
        rules = [f"start: calls{'' if answer is None else ' | answer'}"]
        rules.append(f"calls: {first} call {more} {last}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        for i, (name, schema) in enumerate(tools.items()):
            before, behind = (_lark(text.replace("NAME", name), special) for text in self.call)
            rules.append(f"call_{i}: {before} arguments_{i} {behind}")
            arguments = {**(_NO_ARGUMENTS if schema is None else schema), **options}
            rules.append(f"arguments_{i}: %json {json.dumps(arguments)}")
        if answer is not None:
            rules.append(f"answer: %json {json.dumps({**answer, **options})}")
        return "\n".join(rules)


def _lark(text: str, special: Mapping[str, int]) -> str:
    """A Lark sequence for a text with special tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part
    )


def _hermes_steps(parser: ToolParser) -> Steps:
    while True:
        yield from parser.until("<tool_call>")
        if (yield from parser.call()):
            yield from parser.goes_on_with("</tool_call>")
        else:
            parser.put("<tool_call>")


def _llama3_steps(parser: ToolParser) -> Steps:
    bare = yield from parser.goes_on_with("{", drop=False)
    while True:
        if not bare:
            yield from parser.until("<|python_tag|>")
        called = yield from parser.call(bare=bare)
        while called and (yield from parser.goes_on_with(";")):
            called = yield from parser.call()
        bare = False


def _mistral_steps(parser: ToolParser) -> Steps:
    while True:
        yield from parser.until("[TOOL_CALLS]")
        if (yield from parser.goes_on_with("[")):
            called = yield from parser.call()
            if not called:
                parser.put("[TOOL_CALLS][")
            while called and (yield from parser.goes_on_with(",")):
                called = yield from parser.call()
            if called:
                yield from parser.goes_on_with("]")
        elif not (yield from parser.named_call()):
            parser.put("[TOOL_CALLS]")


def _mistral_id() -> str:
    """An id of nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


HERMES = ToolFormat(
    "hermes",
    _hermes_steps,
    ("<tool_call>", "</tool_call>"),
    ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    ("", "\n", ""),
)
LLAMA3 = ToolFormat(
    "llama3",
    _llama3_steps,
    ("<|python_tag|>",),
    ('{"name": "NAME", "parameters": ', "}"),
    ("", "", ""),
    parallel=False,
)
MISTRAL = ToolFormat(
    "mistral",
    _mistral_steps,
    ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ('{"name": "NAME", "arguments": ', "}"),
    ("[TOOL_CALLS][", ", ", "]"),
    new_id=_mistral_id,
)
MISTRAL_ARGS = ToolFormat(  # from version 11 of the tokenizer on
    "mistral",
    _mistral_steps,
    MISTRAL.markers,
    ("[TOOL_CALLS]NAME[ARGS]", ""),
    ("", "", ""),
    new_id=_mistral_id,
)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of that name; for "auto", the one of the chat template."""
    if name == "none":
        return None
    mistral = MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    named = {"hermes": HERMES, "llama3": LLAMA3, "mistral": mistral}
    if name != "auto":
        return named[name]
    if "[TOOL_CALLS]" in template:
        return mistral
    if "<tool_call>" in template:  # tags for each parameter are another format
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    llama3 = "<|python_tag|>" in template or '{"name": function name, "parameters"' in template
    return LLAMA3 if llama3 else None
