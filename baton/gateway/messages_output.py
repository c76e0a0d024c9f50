"""Answers of Anthropic's Messages API: content blocks, whole or as events, and counted tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from baton.errors import InvalidRequest, quoted
from baton.gateway import answers, openai, sse
from baton.gateway.endpoint import Call, Endpoint
from baton.gateway.errors import MESSAGES_PATH, VERSION_HEADER, MessageError
from baton.gateway.generation import Generation, generate
from baton.gateway.messages import (
    CountTokensRequest,
    MessagesRequest,
    parse_count_tokens,
    parse_message,
)
from baton.gateway.openapi import MESSAGE_ERRORS, Operation, Routes
from baton.gateway.output import ItemSink
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.tokenize import count_chat
from baton.generation.tool_call import ToolCallDelta
from baton.net.http_errors import Failure
from baton.net.http_server import HttpExchange
from baton.v1 import common_pb2, inference_pb2

FIRST_VERSION = b"2023-06-01"  # with these events; clients of later ones understand the answers
_PING = sse.event("ping", b'{"type":"ping"}')
_encode = msgspec.json.Encoder().encode
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
# A JSON object, as the model wrote it.
CallInput = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class ThinkingContent(Struct, tag="thinking"):
    """Reasoning before an answer; the signature is opaque, and not checked when it comes back."""

    thinking: str = ""
    signature: str = ""


class TextContent(Struct, tag="text"):
    """Text of an answer."""

    text: str = ""


class ToolUse(Struct, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: CallInput


Content = ThinkingContent | TextContent | ToolUse


class ThinkingUsage(Struct):
    """Reasoning tokens of the output."""

    thinking_tokens: openai.Count


class MessageUsage(Struct, omit_defaults=True):
    """Token counts; the prompt's are `input_tokens` and those that were cached."""

    input_tokens: openai.Count
    output_tokens: openai.Count
    cache_read_input_tokens: openai.Count
    cache_creation_input_tokens: openai.Count | UnsetType = UNSET
    output_tokens_details: ThinkingUsage | UnsetType = UNSET  # if there was reasoning
    baton: list[answers.ServedBy] | UnsetType = UNSET  # for requests with x-baton-route


class MessageAnswer(Struct, tag="message", kw_only=True):
    """The answer; in `message_start` without content."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: openai.Count


# The type of a block's deltas, and their member with text.
_DELTAS: dict[type[Content], tuple[str, str]] = {
    ThinkingContent: ("thinking_delta", "thinking"),
    TextContent: ("text_delta", "text"),
    ToolUse: ("input_json_delta", "partial_json"),
}
Emit = Callable[..., None]


async def answer_message(parsed: ParsedRequest, call: Call) -> None:
    """Answers a request to /v1/messages."""
    _check_version(call.exchange)
    await generate(MessageGeneration, parsed, call)


async def count_tokens(parsed: ParsedRequest, call: Call) -> None:
    """Answers with the number of the conversation's tokens."""
    _check_version(call.exchange)
    call.answer(TokenCount(await count_chat(parsed, call)))


def _check_version(exchange: HttpExchange) -> None:
    given = exchange.headers.get(VERSION_HEADER, FIRST_VERSION)
    if not re.fullmatch(rb"\d{4}-\d\d-\d\d", given) or given < FIRST_VERSION:
        name, shown = VERSION_HEADER.decode(), quoted(given.decode("latin-1"))
        first = FIRST_VERSION.decode()
        raise InvalidRequest(f"{name} {shown} is not supported: send {first} or a later one", name)


@dataclass
class MessageGeneration(Generation):
    """A request to /v1/messages."""

    _has_begun: bool = field(default=False, init=False)  # whether message_start was sent

    def __post_init__(self) -> None:
        super().__post_init__()
        body = self.parsed.options
        assert isinstance(body, MessagesRequest)
        self._body = body
        if self.admission.chat_formats.reasoning is None:
            # Agents send a budget to every model; others cannot exceed it.
            self.parsed.base.chat.ClearField("max_thinking_tokens")
        omits = body.thinking is not None and body.thinking.display == "omitted"
        self._output = BlocksOutput(self.on_start, self._emit if body.stream else None, omits)

    @property
    def sinks(self) -> Sequence[BlocksOutput]:
        return [self._output]

    async def answer(self) -> bytes:
        reason, stop = self._stop()
        return _encode(
            self._message(
                content=self._output.items,
                stop_reason=reason,
                stop_sequence=stop,
                usage=self._usage(),
            )
        )

    def last_event(self, failure: Failure | None) -> bytes:
        if failure is not None:
            return sse.event("error", failure.body)
        reason, stop = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        end = self._event("message_delta", delta=delta, usage=self._usage())
        return self._begin() + end + self._event("message_stop")

    def waiting(self) -> bytes:
        return self._begin() + _PING

    def release(self) -> None:
        del self._output

    def _emit(self, kind: str, **members: Any) -> None:
        self.send(self._begin() + self._event(kind, **members))

    def _begin(self) -> bytes:
        """The event that precedes all others, the first time."""
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = MessageUsage(self.started.prompt_tokens, 0, 0)  # cached ones are known at the end
        return self._event("message_start", message=self._message(usage=usage))

    def _event(self, kind: str, **members: Any) -> bytes:
        return sse.event(kind, _encode({"type": kind, **members}))

    def _message(self, **members: Any) -> MessageAnswer:
        return MessageAnswer(id=f"msg_{self.started.request_id}", model=self.model, **members)

    def _usage(self) -> MessageUsage:
        usage, end = self.usage_of([self._output.end]), self._output.end.usage
        thinking = ThinkingUsage(end.reasoning_tokens) if end.reasoning_tokens else UNSET
        return MessageUsage(
            end.prompt_tokens - end.cached_tokens,
            end.completion_tokens,
            end.cached_tokens,
            0,
            thinking,
            usage.baton,
        )

    def _stop(self) -> tuple[StopReason, str | None]:
        """Why the output ended, and the stop sequence that ended it."""
        end, usage = self._output.end, self._output.end.usage
        if end.reason == common_pb2.FINISH_REASON_TOOL_CALLS:
            return "tool_use", None
        if end.reason == common_pb2.FINISH_REASON_LENGTH:
            length = usage.prompt_tokens + usage.completion_tokens
            is_full = length >= self.target.version.max_context > 0
            has_more = usage.completion_tokens < self._body.max_tokens
            return "model_context_window_exceeded" if is_full and has_more else "max_tokens", None
        return ("stop_sequence", end.stop) if end.stop else ("end_turn", None)


class BlocksOutput(ItemSink):
    """The sink that collects output in content blocks, and emits an event for each change."""

    reasoning_type, text_type = ThinkingContent, TextContent

    def __init__(
        self,
        on_start: Callable[[inference_pb2.Started], None],
        emit: Emit | None = None,
        omits_thinking: bool = False,
    ) -> None:
        super().__init__(on_start)
        self._emit = emit
        self._omits_thinking = omits_thinking

    def new_item(self, kind: type[ThinkingContent | TextContent]) -> Content:
        return kind()

    def new_call(self, call: ToolCallDelta) -> Content:
        return ToolUse(call.id, call.name, Raw(b"{}"))

    def on_begin(self, item: Content) -> None:
        self._event("content_block_start", content_block=item)

    def on_text(self, item: Content, text: str) -> None:
        if not (self._omits_thinking and isinstance(item, ThinkingContent)):
            kind, member = _DELTAS[type(item)]
            self._event("content_block_delta", delta={"type": kind, member: text})

    def on_end(self, item: Content, text: str, *, cut: bool) -> None:
        if isinstance(item, ThinkingContent):
            item.thinking = "" if self._omits_thinking else text
            item.signature = self.request_id
            delta = {"type": "signature_delta", "signature": item.signature}
            self._event("content_block_delta", delta=delta)
        elif isinstance(item, ToolUse):
            item.input = Raw(b"{}" if cut and not _is_json(text) else text.encode() or b"{}")
        else:
            item.text = text
        self._event("content_block_stop")

    def _event(self, kind: str, **members: Any) -> None:
        if self._emit is not None:
            self._emit(kind, index=len(self.items) - 1, **members)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


ROUTES: Routes = {
    MESSAGES_PATH: {"POST": Operation(
        Endpoint(parse_message, answer_message),
        "Answer a conversation, in Anthropic's format.", MessageAnswer, MESSAGE_ERRORS,
        MessagesRequest, streams=True, error=MessageError, runs=True,
    )},
    f"{MESSAGES_PATH}/count_tokens": {"POST": Operation(
        Endpoint(parse_count_tokens, count_tokens),
        "Count a conversation's tokens, in Anthropic's format.", TokenCount, MESSAGE_ERRORS,
        CountTokensRequest, error=MessageError,
    )},
}  # fmt: skip
