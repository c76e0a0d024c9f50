"""Requests of OpenAI's Responses API, translated to chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from baton.errors import InvalidRequest
from baton.gateway import api
from baton.gateway.batch_store import Metadata
from baton.gateway.chat import parsed_chat
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.response_store import StoredResponse
from router.admission.chat import MAX_MESSAGES, MAX_TOOLS


class TextContent(Struct):
    """A part of an item; only text is supported."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]
Content = str | list[TextContent]


class InputItem(Struct, kw_only=True):
    """A message, or an item of an earlier output; which fields it has depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None  # of a message, or of reasoning
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call; tools of other types are dropped."""

    type: api.ToolType
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(api.NamedFunction, tag="function"):
    """The function that must be called."""


class AllowedFunctions(Struct, kw_only=True, tag="allowed_tools"):
    """Functions that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


class PlainText(Struct, tag="text"):
    """Any text."""


class JsonObject(Struct, tag="json_object"):
    """A JSON object."""


class JsonText(api.JsonSchemaFormat, tag="json_schema", kw_only=True):
    """JSON that matches a schema."""


class TextOptions(Struct):
    """The format of the answer's text; `verbosity` is ignored."""

    format: PlainText | JsonObject | JsonText | None = None


class ReasoningOptions(Struct):
    """How much the model reasons, for templates that support it."""

    effort: str | None = None


class ResponsesRequest(api.ChatOptions, kw_only=True):
    """A request for the next response; `input` holds the whole conversation."""

    unsupported: ClassVar[api.Unsupported] = {
        **api.ChatOptions.unsupported,
        "conversation": (),
        "prompt": (),
        "moderation": (),
        "context_management": ([],),
        "max_tool_calls": (),
        "image": (),
    }

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: api.Positive | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None = (
        None
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    # Reasoning is returned as text, so nothing is encrypted.
    include: list[Include] | None = None
    top_logprobs: api.TopLogprobs | None = None  # alternatives of each token
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
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

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that are functions."""
        return [tool for tool in self.tools or () if tool.type == "function"]

    @property
    def dropped_tools(self) -> list[str]:
        return [tool.type for tool in self.tools or () if tool.type != "function"]


class CountedRequest(ResponsesRequest, kw_only=True):
    """A conversation whose tokens are counted."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] = msgspec.field(
        default_factory=list
    )


class _Output(Struct):
    """Of a stored response: what it adds to a conversation."""

    output: list[InputItem]


def parse_response(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/responses. Raises InvalidRequest naming the field."""
    return parsed_response(api.decode(ResponsesRequest, text))


def parse_counted(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/responses/input_tokens. Raises InvalidRequest naming the field."""
    return parsed_response(api.decode(CountedRequest, text))


def parsed_response(
    body: ResponsesRequest, history: Sequence[StoredResponse] = ()
) -> ParsedRequest:
    """Translates a request behind stored responses. Raises InvalidRequest naming the field."""
    before = list[InputItem]()
    for response in history:
        before += msgspec.json.decode(response.input, type=list[InputItem])
        before += msgspec.json.decode(response.body, type=_Output).output
    messages, item_fields = _messages(body, before)
    tools, tool_fields = list[api.Tool](), dict[str, str]()
    for at, tool in enumerate(body.tools or ()):
        if tool.type == "function":
            for name in ("name", "parameters"):
                tool_fields[f"tools[{len(tools)}].function.{name}"] = f"tools[{at}].{name}"
            function = api.FunctionDefinition(
                name=_required(tool.name, f"tools[{at}].name"),
                description=tool.description,
                parameters=tool.parameters,
            )
            tools.append(api.Tool(type="function", function=function))
    same = {name: getattr(body, name) for name in api.ChatOptions.__struct_fields__}
    chat = api.ChatRequest(
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
        **parsed.fields,
        **dict.fromkeys(("input", "chat", "token_ids"), "input"),
        "max_tokens": "max_output_tokens",
        "structured_output": "text.format" if restriction == "response_format" else restriction,
        **item_fields,
        **tool_fields,
    }
    return replace(parsed, options=body, fields=fields)


def _tool_choice(choice: str | FunctionChoice | AllowedFunctions | None) -> Any:
    match choice:
        case FunctionChoice():
            return api.NamedTool(api.NamedFunction(choice.name))
        case AllowedFunctions():
            tools = [api.NamedTool(api.NamedFunction(one.name)) for one in choice.tools]
            return api.AllowedToolChoice(api.AllowedTools(mode=choice.mode, tools=tools))
    return choice


def _response_format(text: TextOptions | None) -> api.ResponseFormat | None:
    asked = text.format if text else None
    if isinstance(asked, JsonText):
        return api.ResponseFormat(type="json_schema", json_schema=asked)
    return api.ResponseFormat(type="json_object") if isinstance(asked, JsonObject) else None


_ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"
}  # fmt: skip
# Items of one output in their order, of which calls may repeat: one turn of a chat.
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}


def input_items(body: ResponsesRequest, request_id: str) -> list[dict[str, Any]]:
    """The items of a body's input, with ids, as the API lists them."""
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    found = []
    for at, item in enumerate(items):
        fields = {k: v for k, v in msgspec.to_builtins(item).items() if v is not None}
        if isinstance(text := fields.get("content"), str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": text}]
        place = f"{_ID_PREFIXES[item.type]}_{request_id}_input_{at}"
        found.append({"id": place, "status": "completed", **fields})
    return found


def _messages(
    body: ResponsesRequest, history: Sequence[InputItem]
) -> tuple[list[api.Message], dict[str, str]]:
    """The messages of the chat, and the input's field for each of their fields."""
    messages, fields = list[api.Message](), dict[str, str]()
    if body.instructions:
        messages.append(api.Message(role="system", content=body.instructions))
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    before = ""  # type of the previous item of an assistant's turn
    for at, item in enumerate((*history, *items), -len(history)):
        place = f"input[{at}]" if at >= 0 else "previous_response_id"
        is_call = item.type == "function_call"
        if item.type in _ORDER and (item.type != "message" or item.role == "assistant"):
            if not before or not (is_call or _ORDER[item.type] > _ORDER[before]):
                messages.append(api.Message(role="assistant", tool_calls=[]))
            before = item.type
            _add(messages[-1], item, place)
            if is_call:
                call = f"tool_calls[{len(messages[-1].tool_calls or ()) - 1}].function.arguments"
                fields[f"messages[{len(messages) - 1}].{call}"] = f"{place}.arguments"
            continue
        before = ""
        if item.type == "message":
            role = _required(item.role, f"{place}.role")
            messages.append(api.Message(role=role, content=_parts(item.content, place)))
        else:
            call_id = _required(item.call_id, f"{place}.call_id")
            output = _parts(item.output, place, "output")
            messages.append(api.Message(role="tool", content=output, tool_call_id=call_id))
    return messages, fields


def _add(turn: api.Message, item: InputItem, place: str) -> None:
    if item.type == "message":
        turn.content = _parts(item.content, place)
    elif item.type == "reasoning":
        content = _parts(item.content or "", place)
        turn.reasoning = content if isinstance(content, str) else "".join(p.text for p in content)
    else:
        name = _required(item.name, f"{place}.name")
        function = api.CalledFunction(item.arguments or "", name)
        call = api.ToolCall(id=_required(item.call_id, f"{place}.call_id"), function=function)
        assert turn.tool_calls is not None
        turn.tool_calls.append(call)


def _parts(content: Content | None, place: str, name: str = "content") -> str | list[api.TextPart]:
    if content is None:
        raise InvalidRequest(f"{place}.{name} is missing", f"{place}.{name}")
    if isinstance(content, str):
        return content
    return [api.TextPart("text", part.text) for part in content]


def _required(value: str | None, field: str) -> str:
    if not value:
        raise InvalidRequest(f"{field} is missing", field)
    return value
