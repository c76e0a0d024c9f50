"""Requests of Anthropic's Messages API, translated to chats."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from baton.errors import InvalidRequest, quoted
from baton.gateway import openai
from baton.gateway.chat_completions import parsed_chat
from baton.gateway.parsed_request import ParsedRequest
from baton.text.stop_strings import MAX_STOPS
from router.admission.chat import MAX_MESSAGES, MAX_TOOLS

# Claude Code's first system block: it differs with each request, so no prefix would be cached.
_BILLING_HEADER = "x-anthropic-billing-header:"
_ERROR_PREFIX = "Error: "  # of results with `is_error`, which chat templates do not have
_TEXTS = ("text", "document", "search_result", "compaction")  # blocks that are texts
_DROPPED_BLOCKS = ("redacted_thinking", "server_tool_use", "mcp_tool_use")


class TextBlock(Struct):
    """A part of the system prompt."""

    type: Literal["text"]
    text: str


class Block(Struct, kw_only=True):
    """A part of a message; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of a tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a tool_result
    content: str | list[Block] | dict[str, Any] | None = None
    is_error: bool | None = None
    title: str | None = None  # of a document or search result
    source: str | dict[str, Any] | None = None


class InputMessage(Struct, kw_only=True):
    """A turn; successive ones of a role are one."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Struct, kw_only=True):
    """A tool that the client runs; those with another type, as web_search, are dropped."""

    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: openai.ToolType | None = None  # null or "custom"

    @property
    def is_dropped(self) -> bool:
        """Whether it is a tool that Anthropic's servers run or define."""
        return self.type not in (None, "custom")


class MessageToolChoice(Struct, kw_only=True):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the one to call
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model reasons, for templates that support it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: openai.Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True):
    """A schema that the answer matches."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """How much the model reasons, and the format of its answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class RequestMetadata(Struct):
    """Who asks; the session of the request."""

    user_id: openai.Session | None = None


class CountTokensRequest(openai.ChatOptions, kw_only=True):
    """A conversation whose tokens are counted."""

    unsupported: ClassVar[openai.Unsupported] = {
        **openai.ChatOptions.unsupported,
        "container": (),
        "mcp_servers": ([],),
        "output_format": (),
    }

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Fields of chats that have other names here, or no place in the answer.
    n: None = None
    documents: None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]
    stop: None = None
    stream_options: None = None
    response_format: None = None
    parallel_tool_calls: None = None
    max_thinking_tokens: None = None
    thinking_token_budget: None = None
    return_token_ids: None = None
    return_tokens_as_token_ids: None = None
    prompt_logprobs: None = None

    @property
    def dropped_tools(self) -> list[str]:
        return [tool.type or "" for tool in self.tools or () if tool.is_dropped]


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A request for the next message; `messages` is the whole conversation."""

    max_tokens: openai.Positive
    stop_sequences: Annotated[list[openai.StopText], Meta(max_length=MAX_STOPS)] | None = None
    metadata: RequestMetadata | None = None


def parse_message(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/messages. Raises InvalidRequest naming the field."""
    body = openai.decode(MessagesRequest, text)
    user = body.metadata.user_id if body.metadata else None
    parsed = _parsed(
        body,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        user=user or body.user,
    )
    # Agents always ask for as much as Anthropic's models can write: it is cut to the context.
    return replace(parsed, max_tokens_given=False)


def parse_count_tokens(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/messages/count_tokens. Raises InvalidRequest naming the field."""
    return _parsed(openai.decode(CountTokensRequest, text))


def _parsed(body: CountTokensRequest, **members: Any) -> ParsedRequest:
    tools, fields = _tools(body)
    messages = _messages(body)
    last = messages[-1] if messages else None
    if last and last.tool_calls:
        raise InvalidRequest("messages end with calls: add their results", "messages")
    chat = {name: getattr(body, name) for name in openai.ChatOptions.__struct_fields__}
    chat |= _options(body) | members
    chat |= {
        "max_tokens": None,
        "messages": messages,
        "tools": tools,
        "continue_final_message": bool(last and last.role == "assistant"),
    }
    parsed = parsed_chat(openai.ChatRequest(**chat))
    restriction = parsed.fields["structured_output"]
    fields |= {
        "max_tokens": "max_tokens",
        "stop": "stop_sequences",
        "session": "metadata.user_id",
        "max_thinking_tokens": "thinking.budget_tokens",
        "structured_output": (
            "output_config.format" if restriction == "response_format" else restriction
        ),
    }
    return replace(parsed, options=body, fields={**parsed.fields, **fields})


def _options(body: CountTokensRequest) -> dict[str, Any]:
    """The fields of a chat for settings that have other names or forms here."""
    thinking, config = body.thinking, body.output_config or OutputConfig()
    choice = body.tool_choice or MessageToolChoice(type="auto")
    options: dict[str, Any] = {
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "reasoning_effort": config.effort or None,
        "chat_template_kwargs": _template_kwargs(body),
    }
    if thinking and thinking.type == "enabled":
        options["max_thinking_tokens"] = thinking.budget_tokens
    if config.format:
        schema = openai.JsonSchemaFormat(schema=config.format.schema)
        options["response_format"] = openai.ResponseFormat(type="json_schema", json_schema=schema)
    return options


def _template_kwargs(body: CountTokensRequest) -> dict[str, Any] | None:
    """The template's variables, with the names by which templates turn reasoning on and off."""
    if body.thinking is None or body.thinking.type not in ("enabled", "disabled"):
        return body.chat_template_kwargs
    thinks = body.thinking.type == "enabled"
    return {"enable_thinking": thinks, "thinking": thinks, **(body.chat_template_kwargs or {})}


def _tools(body: CountTokensRequest) -> tuple[list[openai.Tool], dict[str, str]]:
    """The functions, and the body's field for each of their fields."""
    tools, fields = list[openai.Tool](), dict[str, str]()
    for at, tool in enumerate(body.tools or ()):
        place = f"tools[{at}]"
        if tool.is_dropped:
            continue
        name = f"tools[{len(tools)}].function"
        fields[f"{name}.name"] = f"{place}.name"
        fields[f"{name}.parameters"] = f"{place}.input_schema"
        function = openai.FunctionDefinition(
            name=_required(tool.name, f"{place}.name"),
            description=tool.description,
            parameters=_required(tool.input_schema, f"{place}.input_schema"),
        )
        tools.append(openai.Tool(function=function))
    return tools, fields


def _tool_choice(choice: MessageToolChoice) -> Any:
    if choice.type == "tool":
        name = _required(choice.name, "tool_choice.name")
        return openai.NamedTool(openai.NamedFunction(name))
    return "required" if choice.type == "any" else choice.type


def _messages(body: CountTokensRequest) -> list[openai.Message]:
    turns = list[openai.Message]()
    system = body.system or ()
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if texts := [text for text in texts if not text.startswith(_BILLING_HEADER)]:
        parts: openai.Parts = [openai.TextPart(text) for text in texts]
        turns.append(openai.Message(role="system", content=parts))
    for at, message in enumerate(body.messages):
        place = f"messages[{at}].content"
        if isinstance(message.content, str):
            _text_of(turns, message.role).append(openai.TextPart(message.content))
        else:
            for i, block in enumerate(message.content):
                _add(turns, message.role, block, f"{place}[{i}]")
    return turns


def _turn(turns: list[openai.Message], role: str) -> openai.Message:
    """The last turn, if it is one of the role, else a new one."""
    if not turns or turns[-1].role != role:
        turns.append(openai.Message(role=role, content=[], tool_calls=[]))
    return turns[-1]


def _text_of(turns: list[openai.Message], role: str) -> openai.Parts:
    content = _turn(turns, role).content
    assert isinstance(content, list)
    return content


def _add(turns: list[openai.Message], role: str, block: Block, place: str) -> None:
    """Adds a block of a message. Raises InvalidRequest if its type has no place there."""
    kind = block.type
    if kind in _TEXTS:
        _text_of(turns, role).append(openai.TextPart(_text(block, place)))
    elif kind == "tool_result" and role == "user":
        call_id = _required(block.tool_use_id, f"{place}.tool_use_id")
        content = _result(block, place)
        turns.append(openai.Message(role="tool", content=content, tool_call_id=call_id))
    elif role == "assistant" and kind == "thinking":
        turn = _turn(turns, role)
        thinking = _required(block.thinking, f"{place}.thinking")
        turn.reasoning = f"{turn.reasoning}\n{thinking}" if turn.reasoning else thinking
    elif role == "assistant" and kind == "tool_use":
        calls = _turn(turns, role).tool_calls
        assert calls is not None
        arguments = json.dumps(_required(block.input, f"{place}.input"), ensure_ascii=False)
        function = openai.CalledFunction(
            arguments, _required(block.name, f"{place}.name", empty=False)
        )
        calls.append(
            openai.ToolCall(id=_required(block.id, f"{place}.id", empty=False), function=function)
        )
    elif role != "assistant" or not (kind in _DROPPED_BLOCKS or kind.endswith("_tool_result")):
        raise _unsupported(kind, f"{place}.type")


def _result(block: Block, place: str) -> str:
    content = block.content or ""
    if isinstance(content, dict):
        raise InvalidRequest(f"{place}.content must be text or blocks", f"{place}.content")
    if not isinstance(content, str):
        # What a reference names is among the tools.
        content = "\n".join(
            _text(part, f"{place}.content[{i}]")
            for i, part in enumerate(content)
            if part.type != "tool_reference"
        )
    is_marked = content.lower().startswith("error") or not block.is_error
    return content if is_marked else _ERROR_PREFIX + content


def _text(block: Block, place: str) -> str:
    """The text of a block, behind its title. Raises InvalidRequest if it has none."""
    if block.type == "text":
        return str(_required(block.text, f"{place}.text"))
    content: Any = block.content
    if block.type == "document":
        source = block.source if isinstance(block.source, dict) else {}
        if source.get("type") not in ("text", "content"):
            raise _unsupported(block.type, f"{place}.type")
        content = source.get("data" if source["type"] == "text" else "content")
    elif block.type not in _TEXTS:
        raise _unsupported(block.type, f"{place}.type")
    if isinstance(content, list):
        parts = (part if isinstance(part, dict) else msgspec.to_builtins(part) for part in content)
        content = "\n".join(str(part.get("text") or "") for part in parts)
    if not isinstance(content, str):
        raise InvalidRequest(f"{place} has no text", place)
    address = block.source if isinstance(block.source, str) else None
    return "\n".join(filter(None, (block.title, address, content)))


def _unsupported(kind: str, field: str) -> InvalidRequest:
    text = f"{field}: a block {quoted(kind)} is not supported here: send its text"
    return InvalidRequest(text, field)


def _required(value: Any, field: str, *, empty: bool = True) -> Any:
    if value is None or not (value or empty):
        raise InvalidRequest(f"{field} is missing", field)
    return value
