"""Requests of OpenAI's Responses API, translated to chats."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from baton.errors import InvalidRequest
from baton.gateway import openai
from baton.gateway.batch_store import Metadata
from baton.gateway.chat_completions import parsed_chat
from baton.gateway.conversation_store import Context
from baton.gateway.custom_tools import arguments_of
from baton.gateway.parsed_request import ParsedRequest
from router.admission.chat import MAX_MESSAGES, MAX_TOOLS, call_arguments


class TextContent(Struct, omit_defaults=True):
    """A part of an item; only text is supported."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @property
    def shown(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


Include = Annotated[str, Meta(max_length=64)]
Content = str | list[TextContent]


class InputItem(Struct, kw_only=True):
    """A message, or an item of an earlier output; which fields it has depends on its type."""

    type: openai.ToolType | None = None
    id: str | None = None  # of a stored item that is referred to; others get new ones
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None  # of a message, or of reasoning
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None  # of a function
    input: str | None = None  # of a custom tool
    output: Content | None = None
    namespace: str | None = None  # of the tool that is called
    tools: list[Tool] | None = None  # further ones, of the type additional_tools

    @property
    def kind(self) -> str:
        """The type, which messages and references may omit."""
        return self.type or ("item_reference" if self.id and not self.role else "message")


class ToolFormat(Struct, kw_only=True, omit_defaults=True):
    """What the input of a custom tool is: text, or one that matches a grammar."""

    type: openai.ToolType
    definition: openai.Text | None = None
    syntax: Literal["lark", "regex"] | None = None


class Tool(Struct, kw_only=True):
    """A function, or a custom tool whose input is a text; tools of other types are dropped."""

    type: openai.ToolType
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | UnsetType | None = UNSET
    tools: list[Tool] | UnsetType = UNSET  # of a namespace

    def functions(self, place: str) -> Iterator[tuple[Tool, str, str]]:
        """Itself or the tools of its namespace, each with that and its field."""
        if self.type != "namespace":
            yield self, "", place
            return
        for at, tool in enumerate(self.tools or ()):
            yield tool, self.name, f"{place}.tools[{at}]"

    @property
    def dropped(self) -> str:
        """What is reported of a tool that is not supported; else empty."""
        if self.type == "custom":
            kind = self.format.type if self.format else "text"
            return "" if kind in ("text", "grammar") else f"custom.{kind}"
        return "" if self.type == "function" else self.type

    def in_chat(self, namespace: str, place: str) -> openai.Tool | openai.CustomTool:
        """The tool of a chat. Raises InvalidRequest for a missing field of the tool at `place`."""
        name = full_name(namespace, _required(self.name, f"{place}.name"))
        if self.type == "function":
            return openai.Tool(
                function=openai.FunctionDefinition(
                    name=name, description=self.description, parameters=self.parameters
                )
            )
        custom = openai.CustomDefinition(name=name, description=self.description)
        if self.format and self.format.type == "grammar":
            definition, syntax = self.format.definition, self.format.syntax
            if definition is None or syntax is None:
                missing = f"{place}.format.{'syntax' if definition else 'definition'}"
                raise InvalidRequest(f"{missing} is missing", missing)
            grammar = openai.Grammar(definition=definition, syntax=syntax)
            custom.format = openai.GrammarFormat(grammar)
        return openai.CustomTool(custom=custom)


def full_name(namespace: str | None, name: str) -> str:
    """The name of a tool in the prompt."""
    return f"{namespace}.{name}" if namespace else name


class FunctionChoice(openai.NamedFunction, tag="function"):
    """The function that must be called."""


class CustomChoice(openai.NamedFunction, tag="custom"):
    """The custom tool that must be called."""


class AllowedTool(Struct):
    """A tool that may be called; those of types that are dropped are ignored."""

    type: openai.ToolType
    name: str = ""


class AllowedTools(Struct, kw_only=True, tag="allowed_tools"):
    """Tools that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools


class PlainText(Struct, tag="text"):
    """Any text."""


class JsonObject(Struct, tag="json_object", omit_defaults=True):
    """A JSON object."""

    schema: None = None  # other servers' form


class JsonText(openai.JsonSchemaFormat, tag="json_schema", kw_only=True):
    """JSON that matches a schema."""


class TextOptions(Struct):
    """The format of the answer's text; `verbosity` is ignored."""

    format: PlainText | JsonObject | JsonText | None = None


class ReasoningOptions(Struct):
    """How much the model reasons, for templates that support it."""

    effort: str | None = None


class ConversationId(Struct):
    """A stored conversation."""

    id: str


class ResponsesRequest(openai.ChatOptions, kw_only=True):
    """A request for the next response; `input` continues what it names, or is all."""

    unsupported: ClassVar[openai.Unsupported] = {
        **openai.ChatOptions.unsupported,
        "prompt": (),
        "moderation": (),
        "context_management": ([],),
        "image": (),
    }

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: openai.Positive | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    # Reasoning is returned as text, so nothing is encrypted.
    include: list[Include] | None = None  # those of tools that are dropped add nothing
    top_logprobs: openai.TopLogprobs | None = None  # alternatives of each token
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    store: bool | None = None
    background: bool | None = None
    # Fields of chats that have other names here.
    n: None = None
    max_tokens: None = None
    response_format: None = None
    return_token_ids: None = None
    return_tokens_as_token_ids: None = None
    prompt_logprobs: None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether texts have log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def functions(self) -> Iterator[tuple[Tool, str, str]]:
        """All tools, those of namespaces and items included, with namespace and field."""
        for at, tool in enumerate(self.tools or ()):
            yield from tool.functions(f"tools[{at}]")
        for at, item in enumerate(self.items):
            for i, tool in enumerate(item.tools or ()):
                yield from tool.functions(f"input[{at}].tools[{i}]")

    @property
    def supported_tools(self) -> list[Tool]:
        """The tools that the prompt describes."""
        kept = list[Tool]()
        for tool in self.tools or ():
            if tool.tools:
                nested = [one for one in tool.tools if not one.dropped]
                kept.append(msgspec.structs.replace(tool, tools=nested))
            elif not tool.dropped:
                kept.append(tool)
        return kept

    @property
    def dropped_tools(self) -> list[str]:
        dropped = [tool.dropped for tool, *_ in self.functions() if tool.dropped]
        return dropped + [item.kind for item in self.items if item.kind not in _KNOWN_ITEMS]

    @property
    def custom_tools(self) -> frozenset[str]:
        return frozenset(
            full_name(namespace, tool.name)
            for tool, namespace, _ in self.functions()
            if tool.type == "custom" and not tool.dropped
        )

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of the tools in namespaces, by their names in the prompt."""
        return {
            full_name(namespace, tool.name): (namespace, tool.name)
            for tool, namespace, _ in self.functions()
            if namespace
        }

    @property
    def conversation_id(self) -> str:
        """The id of the conversation, or empty."""
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named or ""

    @property
    def items(self) -> list[InputItem]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    @property
    def kept_items(self) -> list[InputItem]:
        """The items that are stored: those in the prompt."""
        return [item for item in self.items if item.kind in _SHOWN_ITEMS | {"item_reference"}]

    @property
    def references(self) -> dict[str, list[str]]:
        """The ids of items that are referred to, with the fields of each."""
        found = defaultdict[str, list[str]](list)
        for at, item in enumerate(self.items):
            if item.kind == "item_reference":
                found[item.id or ""].append(f"input[{at}].id")
        return found


class CountedRequest(ResponsesRequest, kw_only=True):
    """A conversation whose tokens are counted."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] = msgspec.field(
        default_factory=list
    )


def parse_response(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/responses. Raises InvalidRequest naming the field."""
    return parsed_response(openai.decode(ResponsesRequest, text))


def parse_counted(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/responses/input_tokens. Raises InvalidRequest naming the field."""
    return parsed_response(openai.decode(CountedRequest, text))


def parsed_response(body: ResponsesRequest, context: Context | None = None) -> ParsedRequest:
    """Translates a request behind what it continues. Raises InvalidRequest naming the field."""
    before, context = list[InputItem](), context or Context()
    for stored in context.before:
        before += msgspec.json.decode(stored, type=list[InputItem])
    if context.referenced:
        found = {
            name: msgspec.json.decode(item, type=InputItem)
            for name, item in context.referenced.items()
        }
        body = msgspec.structs.replace(
            body, input=[found.get(item.id or "", item) for item in body.items]
        )
    earlier = "conversation" if body.conversation else "previous_response_id"
    items = [(earlier, item) for item in before]
    items += [(f"input[{at}]", item) for at, item in enumerate(body.items)]
    messages, item_fields = _messages(items, body.instructions)
    tools, tool_fields = list[openai.Tool | openai.CustomTool](), dict[str, str]()  # by the chat's
    for tool, namespace, place in body.functions():
        if not tool.dropped:
            in_chat = tool.in_chat(namespace, place)
            for name, field in in_chat.fields.items():
                tool_fields[f"tools[{len(tools)}].{field}"] = f"{place}.{_TOOL_FIELDS[name]}"
            tools.append(in_chat)
    same = {name: getattr(body, name) for name in openai.ChatOptions.__struct_fields__}
    chat = openai.ChatRequest(
        **{**same, "response_format": _response_format(body.text)},
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=tools,
        logprobs=body.with_logprobs,
        top_logprobs=body.top_logprobs if body.with_logprobs else None,
        tool_choice=_tool_choice(body.tool_choice),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )
    parsed = parsed_chat(chat)
    if body.with_logprobs:
        parsed.base.stream_interval = 1  # tells tokens of texts from those of other items
    restriction = parsed.fields["structured_output"]
    fields = {
        **{name: tool_fields.get(field, field) for name, field in parsed.fields.items()},
        **dict.fromkeys(("input", "chat", "token_ids"), "input"),
        "max_tokens": "max_output_tokens",
        "structured_output": "text.format" if restriction == "response_format" else restriction,
        **item_fields,
    }
    return replace(parsed, options=body, fields=fields)


def _tool_choice(choice: ToolChoice | None) -> Any:
    match choice:
        case FunctionChoice() | CustomChoice():
            return openai.NamedTool(openai.NamedFunction(choice.name))
        case AllowedTools():
            tools: list[Any] = [
                openai.NamedTool(openai.NamedFunction(one.name))
                for one in choice.tools
                if one.type in ("function", "custom")
            ]
            return openai.AllowedToolChoice(openai.AllowedTools(mode=choice.mode, tools=tools))
    return choice


def _response_format(text: TextOptions | None) -> openai.ResponseFormat | None:
    asked = text.format if text else None
    if isinstance(asked, JsonText):
        return openai.ResponseFormat(type="json_schema", json_schema=asked)
    return openai.ResponseFormat(type="json_object") if isinstance(asked, JsonObject) else None


_TOOL_FIELDS = {"name": "name", "parameters": "parameters", "input": "format.definition"}
_ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
# Items of one output in their order, of which calls may repeat: one turn of a chat.
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}


_SHOWN_ITEMS = frozenset(_ID_PREFIXES)
_KNOWN_ITEMS = _SHOWN_ITEMS | {"item_reference", "additional_tools"}


def check_items(items: Sequence[InputItem]) -> None:
    """Raises InvalidRequest naming the field, as in `items`, for what no chat could have."""
    _messages([(f"items[{at}]", item) for at, item in enumerate(items)])
    for at, item in enumerate(items):
        if item.kind == "function_call" and isinstance(item.arguments, str):
            call_arguments(item.arguments or "{}", f"items[{at}].arguments")


def shown_items(items: Sequence[InputItem], key: str) -> list[dict[str, Any]]:
    """Items with ids made from `key`, as the API lists them. Raises InvalidRequest."""
    found = []
    for at, item in enumerate(items):
        if item.kind not in _ID_PREFIXES:
            known = ", ".join(_ID_PREFIXES)
            raise InvalidRequest(f"send an item of these types: {known}", f"items[{at}].type")
        fields = {k: v for k, v in msgspec.to_builtins(item).items() if v is not None}
        content = fields.get("content")
        if isinstance(content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            content = fields["content"] = [{"type": kind, "text": content}]
        for part in content or ():
            if part["type"] == "output_text":
                part["annotations"] = []
        place = f"{_ID_PREFIXES[item.kind]}_{key}_{at}"
        if item.kind == "reasoning":
            fields.setdefault("summary", [])
        found.append({**fields, "type": item.kind, "id": place, "status": "completed"})
    return found


def _messages(
    items: Iterable[tuple[str, InputItem]], instructions: str | None = None
) -> tuple[list[openai.Message], dict[str, str]]:
    """The messages of items, given with their places, and the place of each message's arguments.

    Raises InvalidRequest naming the place.
    """
    messages, fields = list[openai.Message](), dict[str, str]()
    if instructions:
        messages.append(openai.Message(role="system", content=instructions))
    before = ""  # type of the previous item of an assistant's turn
    for place, item in items:
        kind = item.kind
        if kind not in _SHOWN_ITEMS:  # references are not read yet
            continue
        is_call = _ORDER.get(kind) == _ORDER["function_call"]
        if kind in _ORDER and (kind != "message" or item.role == "assistant"):
            if not before or not (is_call or _ORDER[kind] > _ORDER[before]):
                messages.append(openai.Message(role="assistant", tool_calls=[]))
            before = kind
            _add(messages[-1], item, place)
            if is_call:
                call = f"tool_calls[{len(messages[-1].tool_calls or ()) - 1}].function.arguments"
                fields[f"messages[{len(messages) - 1}].{call}"] = f"{place}.arguments"
            continue
        before = ""
        if kind == "message":
            role = _required(item.role, f"{place}.role")
            messages.append(openai.Message(role=role, content=_parts(item.content, place)))
        else:
            call_id = _required(item.call_id, f"{place}.call_id")
            output = _parts(item.output, place, "output")
            messages.append(openai.Message(role="tool", content=output, tool_call_id=call_id))
    return messages, fields


def _add(turn: openai.Message, item: InputItem, place: str) -> None:
    if item.kind == "message":
        turn.content = _parts(item.content, place)
    elif item.kind == "reasoning":
        content = _parts(item.content or "", place)
        turn.reasoning = content if isinstance(content, str) else "".join(p.text for p in content)
    else:
        name = full_name(item.namespace, _required(item.name, f"{place}.name"))
        arguments = item.arguments or ""
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if item.kind == "custom_tool_call":
            arguments = arguments_of(item.input or "")
        function = openai.CalledFunction(arguments, name)
        call = openai.ToolCall(id=_required(item.call_id, f"{place}.call_id"), function=function)
        assert turn.tool_calls is not None
        turn.tool_calls.append(call)


def _parts(content: Content | None, place: str, name: str = "content") -> str | openai.Parts:
    if content is None:
        raise InvalidRequest(f"{place}.{name} is missing", f"{place}.{name}")
    if isinstance(content, str):
        return content
    parts: openai.Parts = []
    for at, part in enumerate(content):
        if part.shown is None:
            field = f"{place}.{name}[{at}].{'refusal' if part.type == 'refusal' else 'text'}"
            raise InvalidRequest(f"{field} is missing", field)
        parts.append(openai.TextPart(part.shown))
    return parts


def _required(value: str | None, field: str) -> str:
    if not value:
        raise InvalidRequest(f"{field} is missing", field)
    return value
