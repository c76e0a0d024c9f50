"""Renders conversations with a checkpoint's chat template.

Templates are jinja2 programs that use the variables of Hugging Face transformers, which have the
same meaning here. They are untrusted code: they run in jinja2's sandbox with limits on time, memory
and output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from baton.errors import MAX_QUOTED_CHARS, CheckpointError, InvalidRequest
from baton.text.bounded_jinja import BoundedEnvironment, LimitExceeded, bounded

MAX_RENDERED_CHARS = 16 << 20
MAX_SOURCE_CHARS = 64 << 10  # compiles in a second; templates in use have up to 20,000
# Limits of a rendering: CPU seconds, and characters of all results, also discarded ones.
MAX_RENDERING = (2.0, 64 << 20)
MAX_TRIAL = (0.25, 4 << 20)
MAX_AT_ONCE = (0.005, 64 << 10)
_TRIAL = "a trial"  # content of a message that templates are tried with
_CONTINUED = "/the-text-goes-on-here/"  # added to a message that is to be continued

# A turn in the form of transformers: role, content and its other keys.
Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template, which requests may share."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """Raises CheckpointError, naming `origin`, for an invalid `source`.

        A template that exceeds the limits for a conversation of one character is invalid, too.
        """
        self._special_tokens = dict(special_tokens)
        self.source = source
        self._developer_role = "developer" if "developer" in source else "system"
        if len(source) > MAX_SOURCE_CHARS:
            raise CheckpointError(f"{origin}: chat template of over {MAX_SOURCE_CHARS} characters")
        try:
            self._template = _environment().from_string(source)
        # Any error of jinja2, or of Python compiling its output.
        except Exception as error:
            reason = str(error)[:MAX_QUOTED_CHARS]
            raise CheckpointError(f"{origin}: broken chat template: {reason}") from error
        # Some of multimodal models show no content but a list of parts.
        self._expects_parts = not self._shows(_TRIAL, origin) and self._shows(
            _parts(_TRIAL), origin
        )

    @property
    def has_tools(self) -> bool:
        return "tools" in self.source

    @cached_property
    def shown_arguments(self) -> set[type]:
        """The types of arguments, dict and str (JSON), with which the template shows a call."""
        tried: tuple[dict[str, Any] | str, ...] = ({"a": 1}, '{"a": 1}')
        return {type(arguments) for arguments in tried if self._shows_call(arguments)}

    def _shows_call(self, arguments: Mapping[str, Any] | str) -> bool:
        called = {"name": "trial_of_calls", "arguments": arguments}
        call: dict[str, Any] = {"id": "abcdefghi", "type": "function", "function": called}
        turns: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "y", "tool_call_id": "abcdefghi", "name": "f"},
        ]
        function = {"name": "f", "description": "f", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        given = {"messages": self._turns(turns), "tools": tools}
        try:
            return "trial_of_calls" in self._render(given, MAX_TRIAL)
        except Exception:  # of a template, which is a program
            return False

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        at_once: bool = False,
    ) -> str:
        """Renders a conversation, oldest turn first, up to the assistant's answer.

        To continue the final message, up to its end. `variables`: those of the template besides
        messages and special tokens. Raises InvalidRequest (field "chat") without messages, or if
        the template refuses them; with `at_once`, TimeoutError if it would block the event loop.
        """
        if not messages:
            raise InvalidRequest("chat needs at least one message", "chat")
        given = dict(variables or {})
        if continue_final_message:
            final = str(messages[-1].get("content") or "").rstrip()
            marked = {**messages[-1], "content": final and final + _CONTINUED}
            messages = [*messages[:-1], marked]
            given["add_generation_prompt"] = False
        given["messages"] = self._turns(messages)
        try:
            text = self._render(given, MAX_AT_ONCE if at_once else MAX_RENDERING)
        except InvalidRequest:
            raise
        except LimitExceeded as error:
            if at_once:
                raise TimeoutError from error
            raise InvalidRequest(f"the chat template was stopped: {error}", "chat") from error
        except MemoryError as error:
            raise InvalidRequest("the chat template asked for too much memory", "chat") from error
        # A template is a program and may raise anything.
        except Exception as error:
            reason = str(error)[:MAX_QUOTED_CHARS]  # it may quote the conversation
            raise InvalidRequest(f"the chat template refused: {reason}", "chat") from error
        if not continue_final_message:
            return text
        if (at := text.rfind(_CONTINUED)) < 0:
            raise InvalidRequest(
                "the last message cannot be continued: the chat template does not show it", "chat"
            )
        return text[:at]

    def _turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages in the form that the template expects."""
        turns = [dict(message) for message in messages]
        for turn in turns:
            if turn["role"] == "developer":
                turn["role"] = self._developer_role
            if self._expects_parts and isinstance(turn.get("content"), str):
                turn["content"] = _parts(turn["content"])
        return turns

    def _shows(self, content: str | list[dict[str, str]], origin: str) -> bool:
        """Whether a chat of one message shows its content. Raises CheckpointError as `__init__`."""
        try:
            text = self._render({"messages": [{"role": "user", "content": content}]}, MAX_TRIAL)
        except (LimitExceeded, MemoryError) as error:
            raise CheckpointError(f"{origin}: chat template without bounds: {error}") from error
        except Exception:
            return False  # it needs another conversation
        return _TRIAL in text

    def _render(self, given: Mapping[str, Any], limits: tuple[float, int]) -> str:
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **given,
            **self._special_tokens,
        }
        parts, size = [], 0
        with bounded(*limits):
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidRequest(
                        f"the chat is over {MAX_RENDERED_CHARS} characters", "chat"
                    )
                parts.append(part)
        return "".join(parts)


def _parts(content: str) -> list[dict[str, str]]:
    """Content as a list of parts, in the form of transformers."""
    return [{"type": "text", "text": content}]


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's words for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """A namespace without underscored names, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a parameter called self, to allow `namespace(self=...)`.
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a template must not set the attribute {name!r}")


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        filters={"tojson": _tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, loopcontrols],
    )
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """Replaces `dict`, whose other methods would modify shared values."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
