"""Renders a conversation to the prompt text its model was trained on.

Templates are jinja2 programs that come with the checkpoint, written against the names Hugging Face
transformers gives them; the same names mean the same here. They run in jinja2's sandbox and with
bounded output, for a checkpoint is somebody else's code; time and memory are not bounded, so a
model directory must still be one the operator chose. This module knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.errors import MAX_QUOTED_CHARS, CheckpointError, InvalidRequest

MAX_RENDERED_CHARS = 16 << 20


class ChatTurn(Protocol):
    """One turn, as the protobuf message baton.v1.ChatMessage has it."""

    role: str
    content: str


class ChatTemplate:
    """A compiled chat template; safe to share between requests."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """Raises CheckpointError, naming `origin`, when `source` is not a template."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        # jinja2 leaves a stray "break" to Python, which compiles what it generates.
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise CheckpointError(f"{origin}: broken chat template: {error}") from error

    def render(self, messages: Sequence[tuple[str, str] | ChatTurn]) -> str:
        """The prompt of a conversation (oldest turn first), ready for the assistant's answer.

        Raises InvalidRequest (field "chat") for no messages, and when the template refuses them.
        """
        if not messages:
            raise InvalidRequest("chat needs at least one message", "chat")
        try:
            return self._render([_plain(message) for message in messages])
        except InvalidRequest:
            raise
        except MemoryError as error:
            raise InvalidRequest("the chat template asked for too much memory", "chat") from error
        # A template is a program: whatever it raises, this conversation cannot be rendered.
        except Exception as error:
            reason = str(error)[:MAX_QUOTED_CHARS]  # it may quote the conversation
            raise InvalidRequest(f"the chat template refused: {reason}", "chat") from error

    def _render(self, messages: list[dict[str, str]]) -> str:
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        parts, size = [], 0
        for part in self._template.generate(variables):
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise InvalidRequest(f"the chat is over {MAX_RENDERED_CHARS} characters", "chat")
            parts.append(part)
        return "".join(parts)


def _plain(message: tuple[str, str] | ChatTurn) -> dict[str, str]:
    """Only plain strings reach a template: it could call methods of anything richer."""
    if isinstance(message, tuple):
        role, content = message
    else:
        role, content = message.role, message.content
    return {"role": role, "content": content}


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for serving, only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """A namespace that keeps no underscored names, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a parameter called self, so that `namespace(self=...)` is an attribute.
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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """Stands for `dict`, whose other methods would change what a template must not change."""

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
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
