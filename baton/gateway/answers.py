"""Answers of OpenAI's API as msgspec structs, which encode and describe them.

Fields are OpenAI's, and vLLM's extensions by vLLM's names.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from baton.gateway.openai import (
    CalledCustomTool,
    CalledFunction,
    Count,
    Logprob,
    Positive,
    ServiceTier,
    ToolCall,
)
from baton.generation.enum_names import FinishReason


class PromptTokensDetails(Struct):
    """Cached tokens of the prompt."""

    cached_tokens: Count


class CompletionTokensDetails(Struct):
    """Reasoning tokens of the output."""

    reasoning_tokens: Count


class ServedBy(Struct):
    """Workers and phases of a choice; `prefill` is null if decode computed the prompt."""

    prefill: str | None
    decode: str | None
    transport: str | None
    attempts: Count
    transfer_bytes: Count
    cached_tokens: Count
    queue_ms: float
    ttft_ms: float
    transfer_ms: float
    tpot_ms: float
    e2e_ms: float


class CompletionUsage(Struct):
    """Token counts of a request: each prompt once, the output of every choice.

    In a chunk before the last one, counts of its choice so far, without details.
    """

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # if there was reasoning
    baton: list[ServedBy] | UnsetType = UNSET  # for each choice, if the request had x-baton-route


class CompletionLogprobs(Struct):
    """Parallel lists with an entry for each token; null for a prompt's first token."""

    text_offset: list[Count]
    token_logprobs: list[Logprob | None]
    tokens: list[str]
    top_logprobs: list[dict[str, Logprob] | None]


class PromptToken(Struct):
    """A prompt token or an alternative to it; rank 1 is the likeliest."""

    logprob: Logprob
    rank: Positive
    decoded_token: str


# By position, then by token id; null for the first token.
PromptLogprobs = list[dict[str, PromptToken] | None]


class TopToken(Struct):
    """A token and its UTF-8 bytes."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ChatToken(TopToken):
    """The token of a position, and the likeliest ones there."""

    top_logprobs: list[TopToken]


class ChatLogprobs(Struct):
    """Log-probabilities, with an entry for each token."""

    content: list[ChatToken]
    refusal: None = None


class Choice(Struct, kw_only=True):
    """An output, or in a chunk a piece of it; `stop_reason` is in the last one."""

    index: Count
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[Count] | UnsetType = UNSET


class CompletionChoice(Choice, kw_only=True):
    """One output of a completion."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class AssistantMessage(Struct):
    """The answer of a chat; clients read reasoning by either name."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatToolCallDelta(Struct, kw_only=True):
    """A piece of a call: first id and name, then arguments."""

    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustomTool | UnsetType = UNSET


class ChatDelta(Struct):
    """A piece of a message; the first one has the role."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """A chat's output: a `message`, or in a chunk a `delta`."""

    message: AssistantMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None


class Answer(Struct, kw_only=True):
    """A whole answer or a chunk of it."""

    id: str
    created: Count
    model: str
    system_fingerprint: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET
    service_tier: ServiceTier | UnsetType = UNSET  # as requested


class Completion(Answer, kw_only=True):
    """The answer to a completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatCompletion(Answer, kw_only=True):
    """The answer to a chat."""

    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Tokens(Struct):
    """The answer of /tokenize."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Embedding(Struct):
    """The embedding of an input: numbers, or base64 of little-endian float32 numbers."""

    embedding: list[float] | str
    index: Count
    object: Literal["embedding"] = "embedding"


class InputUsage(Struct):
    """Token counts of all inputs."""

    prompt_tokens: Count
    total_tokens: Count


class Embeddings(Struct):
    """The answer to an embedding request."""

    data: list[Embedding]
    model: str
    usage: InputUsage
    object: Literal["list"] = "list"


class Detokenized(Struct):
    """The answer of /detokenize, special tokens included."""

    prompt: str


class ModelCard(Struct):
    """A served model, in OpenAI's and Anthropic's fields."""

    id: str
    max_model_len: Count
    object: Literal["model"] = "model"
    root: str = ""
    created: int = 0
    owned_by: str = "baton"
    parent: str | None = None
    type: Literal["model"] = "model"
    display_name: str = ""
    created_at: str = "1970-01-01T00:00:00Z"  # Anthropic's value for models without a date
    lifecycle: Literal["active"] = "active"
    max_input_tokens: Count = 0

    def __post_init__(self) -> None:
        self.display_name, self.max_input_tokens = self.id, self.max_model_len


class ModelList(Struct):
    """The served models; the last three fields are of Anthropic's pages."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None

    def __post_init__(self) -> None:
        if self.data:
            self.first_id, self.last_id = self.data[0].id, self.data[-1].id


class Status(Struct):
    """The answer of /health and /ready."""

    status: str


class Load(Struct):
    """The number of requests that run or wait on this process."""

    server_load: Count


class TokenizerInfo(Struct):
    """What a model's tokenizer and chat template are."""

    model: str
    vocab_size: Count
    max_model_len: Count
    eos_token_ids: list[Count]
    special_tokens: dict[str, str]
    chat_template: str | None


class Version(Struct):
    """The program's version."""

    version: str


class ErrorDetails(Struct):
    """Why a request was refused or failed; `param` is the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """The body of every status from 400 on."""

    error: ErrorDetails
