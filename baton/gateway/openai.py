"""OpenAI's API as msgspec structs, which decode, check and describe it.

Fields are OpenAI's, and vLLM's extensions by vLLM's names. Unsupported fields that would change an
answer are refused by name (`unsupported`); other unknown fields are ignored.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from baton.errors import InvalidRequest
from baton.gateway.field_errors import invalid, why_not_json
from baton.generation.sampling_params import (
    FILL_CONTEXT,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from baton.text.stop_strings import MAX_STOP_CHARS, MAX_STOPS
from router.admission.chat import MAX_MESSAGES, MAX_TOOLS
from router.generation_service import CALLERS_ID_PATTERN

MAX_N = 128
MAX_PROMPTS = 1024
MAX_INPUTS = 2048  # of a request without output
MAX_DETOKENIZED = 1 << 20  # tokens
_MAX_NEUTRAL_BYTES = 64  # of a value that disables a feature

_UINT32 = (1 << 32) - 1
Text = Annotated[str, Meta(min_length=1)]
ModelName = Annotated[str, Meta(max_length=1024)]
Session = Annotated[str, Meta(max_length=1024)]  # or an end user
Salt = Annotated[str, Meta(max_length=MAX_CACHE_SALT_CHARS)]
CallersId = Annotated[str, Meta(pattern=CALLERS_ID_PATTERN)]
Count = Annotated[int, Meta(ge=0, le=_UINT32)]
TokenIds = Annotated[list[Count], Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1, le=_UINT32)]
Truncation = Annotated[int, Meta(ge=-1, le=_UINT32)]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
ToolType = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
TokenKey = Annotated[int, Meta(ge=0, lt=10**9)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[TokenKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)]
# 64 bits, signed or not: msgspec's own bounds are those of int64.
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 64) - 1})]
PriorityNumber = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Priority = Literal["low", "normal", "high"] | PriorityNumber
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Logprob = Annotated[float, Meta(le=0)]
Schema = dict[str, Any] | Text  # a text is the schema in JSON, as vLLM takes it

# Kinds of `prompt`, by whether it is a list, and what its first item begins with.
_PROMPTS: dict[tuple[bool, bytes], Any] = {
    (False, b'"'): str,
    (True, b'"'): Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)],
    (True, b""): TokenIds,
    (True, b"["): Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_PROMPTS)],
}
_PROMPT_SCHEMAS = [msgspec.json.schema(kind) for kind in _PROMPTS.values()]
_INPUTS: dict[tuple[bool, bytes], Any] = {
    **_PROMPTS,
    (True, b'"'): Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)],
    (True, b"["): Annotated[list[TokenIds], Meta(min_length=1, max_length=MAX_INPUTS)],
}
_INPUT_SCHEMAS = [msgspec.json.schema(kind) for kind in _INPUTS.values()]

# By field: the values besides null that disable it.
Unsupported = dict[str, tuple[Any, ...]]
_UNSUPPORTED: Unsupported = {
    "kv_transfer_params": (),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "detokenize": (True,),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "vllm_xargs": ({},),
    "guided_whitespace_pattern": (),
    **dict.fromkeys(("regex", "ebnf", "json_schema", "lora_path"), ()),  # SGLang's
}
_TEMPLATE: Unsupported = {"chat_template": ()}


class StreamOptions(Struct):
    """Adds the usage to a stream: in a last chunk, or also in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    """A schema of `response_format`; name, description and strict are ignored."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: None = None  # other servers' form


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's structured output: one of these."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    structural_tag: None = None
    whitespace_pattern: None = None


class GenerateOptions(Struct, kw_only=True):
    """Fields of completions and chats; null is the default."""

    unsupported: ClassVar[Unsupported] = _UNSUPPORTED

    model: ModelName | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_UINT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    prompt_logprobs: TopLogprobs | None = None
    allowed_token_ids: Annotated[TokenIds, Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Priority | None = None
    service_tier: ServiceTier | None = None
    ttft_target_ms: Count | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: Session | None = None
    user: Session | None = None
    safety_identifier: Session | None = None  # OpenAI's newer name of the same
    request_id: CallersId | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None

    @property
    def dropped_tools(self) -> list[str]:
        """Types of the tools that are not functions; they are dropped from the prompt."""
        return []

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools whose input is a text."""
        return frozenset()


class CompletionRequest(GenerateOptions, kw_only=True):
    """A request to complete one or more prompts."""

    unsupported: ClassVar[Unsupported] = {
        **_UNSUPPORTED,
        "prompt_embeds": (),
    }

    prompt: Annotated[Raw, Meta(extra_json_schema={"anyOf": _PROMPT_SCHEMAS})]  # see `prompts_of`
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: str | None = None


class TextPart(Struct, tag="text"):
    """A part of a message; only text is supported."""

    text: str


class RefusalPart(Struct, tag="refusal"):
    """A part of an answer with which another model refused."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class CalledFunction(Struct):
    """A function and its arguments, in JSON; in a delta, a piece of them."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustomTool(Struct):
    """A custom tool and its input, a text; in a delta, a piece of it."""

    input: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, kw_only=True):
    """A call of a function or of a custom tool."""

    id: str
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustomTool | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"


class Message(Struct, kw_only=True):
    """One turn of a chat; parts are joined by line breaks."""

    role: Text
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: None = None
    audio: None = None


Parts = list[TextPart | RefusalPart]
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class FunctionDefinition(Struct, kw_only=True):
    """A function and the JSON schema of its arguments; `strict` is ignored."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, tag="function"):
    """A function that the model may call."""

    function: FunctionDefinition
    fields: ClassVar[Mapping[str, str]] = {  # of a body, by the router's
        "name": "function.name",
        "parameters": "function.parameters",
    }

    @property
    def name(self) -> str:
        return self.function.name


class Grammar(Struct, kw_only=True):
    """A grammar in Lark's syntax, or a regular expression."""

    definition: Text
    syntax: Literal["lark", "regex"]


class TextFormat(Struct, tag="text"):
    """Any text."""


class GrammarFormat(Struct, tag="grammar"):
    """A text that matches a grammar."""

    grammar: Grammar


class CustomDefinition(Struct, kw_only=True):
    """A tool whose input is a text."""

    name: str
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None


class CustomTool(Struct, kw_only=True, tag="custom"):
    """A tool that the model may call with a text."""

    custom: CustomDefinition
    fields: ClassVar[Mapping[str, str]] = {  # of a body, by the router's
        "name": "custom.name",
        "input": "custom.format.grammar.definition",
    }

    @property
    def name(self) -> str:
        return self.custom.name


class NamedFunction(Struct):
    """A function by its name."""

    name: str


class NamedTool(Struct, tag="function"):
    """The tool that must be called."""

    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Struct, tag="custom"):
    """The custom tool that must be called."""

    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedTools(Struct, kw_only=True):
    """Tools that may be called, or of which one must be; the prompt describes no others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Struct, tag="allowed_tools"):
    """A choice among some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedToolChoice
Tools = Annotated[list[Tool | CustomTool], Meta(max_length=MAX_TOOLS)]


class ChatOptions(GenerateOptions, kw_only=True):
    """What chats and responses have in common."""

    parallel_tool_calls: bool | None = None
    max_thinking_tokens: Count | None = None
    # vLLM's name of the same; -1 is no limit.
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=_UINT32)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


class ChatRequest(ChatOptions, kw_only=True):
    """A request for the next message of a chat."""

    unsupported: ClassVar[Unsupported] = {
        **_UNSUPPORTED,
        **_TEMPLATE,
        "echo": (False,),
        "best_of": (1,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "moderation": (),
    }

    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def custom_tools(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))


class TokenizeRequest(Struct, kw_only=True):
    """A prompt, or messages for the chat template, to tokenize."""

    unsupported: ClassVar[Unsupported] = _TEMPLATE

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class PoolingOptions(Struct, kw_only=True):
    """Fields of requests without output."""

    unsupported: ClassVar[Unsupported] = {
        "truncation_side": ("left",),
        "mm_processor_kwargs": ({},),
        "messages": (),
    }

    model: ModelName | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    user: Session | None = None
    request_id: CallersId | None = None


class InputRequest(PoolingOptions, kw_only=True):
    """Texts or token ids."""

    input: Annotated[Raw, Meta(extra_json_schema={"anyOf": _INPUT_SCHEMAS})]  # see `prompts_of`


class EmbeddingRequest(InputRequest, kw_only=True):
    """Texts or token ids to embed."""

    unsupported: ClassVar[Unsupported] = {
        **PoolingOptions.unsupported,
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Token ids to turn into text."""

    unsupported: ClassVar[Unsupported] = {}

    tokens: Annotated[list[Count], Meta(max_length=MAX_DETOKENIZED)]
    model: ModelName | None = None


T = TypeVar("T", bound=Struct)  # struct of a request
_ABSENT = Raw()
_PROMPT_START = re.compile(rb'(\[?)[ \t\r\n]*(["[]?)')


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of requests that keeps unsupported fields undecoded."""
    fields = [(name, Raw, _ABSENT) for name in unsupported_in(kind)]
    return msgspec.json.Decoder(msgspec.defstruct("_Body", fields, bases=(kind,), kw_only=True))


def decode(kind: type[T], body: bytes) -> T:
    """Decodes and checks a body; values of unknown fields and a byte order mark are skipped.

    Raises InvalidRequest naming the wrong field, or none if the body is not a JSON object.
    """
    try:
        request: T = _decoder(kind).decode(body.removeprefix(codecs.BOM_UTF8))
        for name, neutral in unsupported_in(kind).items():
            given = getattr(request, name)
            if given is not _ABSENT and not _is_neutral(given, neutral):
                raise InvalidRequest(f"{name} is not supported: leave it out", name)
        return request
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = why_not_json(error, body)
        raise InvalidRequest(f"the body is not JSON in UTF-8: {reason}") from error


def truncation_of(given: int | None) -> int:
    """What the message has for a body's truncate_prompt_tokens: for -1 FILL_CONTEXT, 0 for None."""
    return FILL_CONTEXT if given == -1 else given or 0


def unsupported_in(kind: Any) -> Unsupported:
    """The fields that a struct refuses."""
    return getattr(kind, "unsupported", {})


def inputs_of(raw: Raw, field: str) -> list[str] | list[list[int]]:
    """Decodes the inputs of `field`, as prompts. Raises InvalidRequest."""
    return prompts_of(raw, field, _INPUTS, MAX_INPUTS)


def prompts_of(
    raw: Raw,
    field: str = "prompt",
    kinds: Mapping[tuple[bool, bytes], Any] = _PROMPTS,
    most: int = MAX_PROMPTS,
) -> list[str] | list[list[int]]:
    """Decodes the prompts of `field`, `most` at most. Raises InvalidRequest."""
    text = bytes(raw)
    start = _PROMPT_START.match(text)
    assert start is not None
    kind = (bool(start[1]), start[2])
    if kind not in kinds:
        raise InvalidRequest(f"{field} must be text, token ids, or a list of either", field)
    # Counted first: a million lists would take long to decode.
    if kind == (True, b"[") and text.count(b"[") > most + 1:
        raise InvalidRequest(f"{field} has more than {most} prompts", field)
    try:
        prompt = msgspec.json.decode(text, type=kinds[kind])
    except msgspec.ValidationError as error:
        raise invalid(error, field) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{field} is not UTF-8: {error}", field) from error
    return prompt if start[1] and start[2] else [prompt]


def _is_neutral(raw: Raw, neutral: tuple[Any, ...]) -> bool:
    """Whether a value disables a feature. Compared as JSON: true is not 1."""
    text = bytes(raw)
    if len(text) > _MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.encode(msgspec.json.decode(text))
    return value in map(msgspec.json.encode, (None, *neutral))
