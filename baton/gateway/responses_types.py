"""The answers of OpenAI's Responses API: a response and the items of its output."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from baton.gateway import answers, openai
from baton.gateway.responses import (
    ConversationId,
    ReasoningOptions,
    TextOptions,
    Tool,
    ToolChoice,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
FailureCode = Literal[
    "server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"
]


class OutputText(Struct, tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[None] = []
    logprobs: list[answers.ChatToken] = []


class ReasoningText(Struct, tag="reasoning_text"):
    """The text of reasoning."""

    text: str = ""


class ReasoningItem(Struct, tag="reasoning", kw_only=True):
    """Reasoning before an answer."""

    id: str
    status: ItemStatus = "in_progress"
    content: list[ReasoningText] = []
    summary: list[None] = []
    encrypted_content: None = None


class MessageItem(Struct, tag="message", kw_only=True):
    """An answer."""

    id: str
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class FunctionCallItem(Struct, tag="function_call", kw_only=True):
    """A function call with its arguments in JSON."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, tag="custom_tool_call", kw_only=True):
    """A call of a custom tool with its input, a text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


Item = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(Struct):
    """Cached tokens of the input; tokens written to the cache are not counted."""

    cached_tokens: openai.Count
    cache_write_tokens: openai.Count = 0


class OutputTokensDetails(Struct):
    """Reasoning tokens of the output."""

    reasoning_tokens: openai.Count


class ResponseUsage(Struct):
    """Token counts of a response."""

    input_tokens: openai.Count
    input_tokens_details: InputTokensDetails
    output_tokens: openai.Count
    output_tokens_details: OutputTokensDetails
    total_tokens: openai.Count
    baton: list[answers.ServedBy] | UnsetType = UNSET  # for requests with x-baton-route


class IncompleteDetails(Struct):
    """Why an output is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct):
    """Why a stream failed after it had started; `code` is one of OpenAI's."""

    code: FailureCode
    message: str
    type: str
    param: str | None


class Response(Struct, kw_only=True):
    """The answer, with the settings of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: openai.Count
    completed_at: openai.Count | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningOptions
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[Tool]
    top_p: float
    background: bool
    previous_response_id: str | None
    conversation: ConversationId | None
    service_tier: openai.ServiceTier
    store: bool
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
