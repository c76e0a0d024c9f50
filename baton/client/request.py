"""Builds request messages from prompts and options."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from baton.config import CANARY_DEFAULTS
from baton.errors import InvalidRequest, quoted
from baton.generation.enum_names import PRIORITIES
from baton.v1 import common_pb2, fleet_pb2, inference_pb2, route_pb2

# Chat messages such as {"role": "user", "content": "Hello"}. Content may also be parts such as
# {"type": "text", "text": "Hello"}. An assistant's may have "tool_calls", in OpenAI's form or
# as in `Completion.message`, and a tool's message has the "tool_call_id" that it answers.
Messages = Sequence[Mapping[str, Any]]
# Plain text, token ids, or chat messages.
Prompt = str | Sequence[int] | Messages
# The stream interval of output that is not streamed.
WHOLE_INTERVAL = 16
_LONGEST_S = 1e9  # gRPC overflows for much longer times
_PROMPT = (
    'prompt must be text, token ids, or chat messages such as {"role": "user", "content": "Hi"}'
)


class Options(TypedDict, total=False):
    """Options of a completion; comments begin with the server's default, which None selects."""

    model: str | None  # the served one
    # 64; 0: no output, for log-probabilities or an embedding of the prompt;
    # baton.generation.sampling_params.FILL_CONTEXT: the rest of the context
    max_tokens: int | None
    # The next five: the model's generation_config.json, else
    temperature: float | None  # 1; 0: greedy
    top_k: int | None  # 0: all
    top_p: float | None  # 1
    min_p: float | None  # 0
    repetition_penalty: float | None  # 1
    presence_penalty: float | None  # 0
    frequency_penalty: float | None  # 0
    logit_bias: Mapping[int, float] | None  # none
    seed: int | None  # the server picks one
    stop: str | Sequence[str] | None  # none
    include_stop: bool | None  # False: the stop string is not part of the text
    stop_token_ids: Sequence[int] | None  # none
    embedding: bool | None  # False; True, with max_tokens 0: return the prompt's embedding
    classification: bool | None  # False; True, with max_tokens 0: return the prompt's labels
    min_tokens: int | None  # 0
    allowed_token_ids: Sequence[int] | None  # any
    bad_words: Sequence[str] | None  # none; texts that the output must not contain
    suffix: str | None  # none; text after the output, for fill-in-the-middle models
    add_special_tokens: bool | None  # True for text, False for a chat
    # no; number of tokens to keep at the end of the prompt; FILL_CONTEXT: as many as fit
    truncate_prompt_tokens: int | None
    show_special_tokens: bool | None  # False; True: special tokens of the output are text
    ignore_eos: bool | None  # False
    logprobs: int | None  # off; number of alternatives
    prompt_logprobs: int | None  # off; number of alternatives
    # any text; {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}, or a
    # pydantic model class for its schema
    response_format: Mapping[str, Any] | type | None
    # any text; one of the keys "json" (a schema), "json_object" (True), "regex", "choice" (texts),
    # "grammar" (Lark or GBNF)
    structured_outputs: Mapping[str, Any] | None
    # none; functions that a chat's model may call, in OpenAI's form
    tools: Sequence[Mapping[str, Any]] | None
    # "auto"; "none", "required", or {"type": "function", "function": {"name": …}}
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None  # True
    max_thinking_tokens: int | None  # no limit; reasoning tokens
    chat_template_kwargs: Mapping[str, Any] | None  # none; additional variables of the template
    continue_final_message: bool | None  # False: answer it
    session: str | None  # none; requests of a session get the same version of a model
    # none; for whom the request is: the end users of a tenant share what it gets equally
    user: str | None
    cache_salt: str | None  # none; cached prefixes are shared by requests of the same salt
    priority: str | None  # the tenant's; "low", "normal" or "high"
    ttft_target: float | None  # none; seconds: refuse at once if the first token would be later
    # 1, or 16 for `generate`; tokens in each delta except the first and last. Larger deltas cost
    # less, and delay more tokens when a worker fails
    stream_interval: int | None
    workers: (
        Sequence[str] | None
    )  # any; incarnations of the workers that may serve it, to test a pair
    timeout: float | None  # the server's; seconds for the whole call, retries included


_SAMPLING = frozenset(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_PLAIN = (
    *("model", "session", "user", "include_stop", "cache_salt", "workers", "suffix", "bad_words"),
    *("add_special_tokens", "truncate_prompt_tokens", "show_special_tokens", "stream_interval"),
)


def generate_request(prompt: Prompt, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Builds the message of a prompt and `Options`, without its time-out.

    Raises InvalidRequest for values of a wrong type; the router checks ranges.
    """
    request = inference_pb2.GenerateRequest()
    _set_input(request, prompt)
    for name, value in options.items():
        if value is None or name == "timeout":
            continue
        if name in _STRUCTURED_OUTPUTS:
            _set_structured_output(request.sampling, name, value)
        elif name in _CHAT:
            if not request.HasField("chat"):
                raise InvalidRequest(f"{name} is for chat messages", name)
            _checked(name, _CHAT[name], request.chat, value)
        elif name in _SAMPLING and name not in _PLAIN:
            _set(request.sampling, name, value, f"sampling.{name}")
        elif name in _PLAIN:
            _set(request, name, value, name)
        elif name == "stop":
            _set(request, name, [value] if isinstance(value, str) else value, name)
        elif name == "priority":
            if not isinstance(value, str) or value not in PRIORITIES:
                raise InvalidRequest(f"priority must be one of {', '.join(PRIORITIES)}", name)
            request.priority = PRIORITIES[value]
        elif name == "ttft_target":
            _set(request, "ttft_target_ms", _checked(name, _milliseconds, value), name)
        else:
            raise InvalidRequest(f"there is no option {name!r}", name)
    return request


def pair(query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
    """The messages by which a reranker is given a pair."""
    turns = {"system": instruction, "query": query, "document": document}
    return [{"role": role, "content": text} for role, text in turns.items() if text is not None]


def _set_structured_output(sampling: common_pb2.SamplingParams, name: str, value: Any) -> None:
    if sampling.HasField("structured_output"):
        raise InvalidRequest(f"give one of {', '.join(_STRUCTURED_OUTPUTS)}", name)
    if (output := _checked(name, _STRUCTURED_OUTPUTS[name], value)) is not None:
        sampling.structured_output.CopyFrom(output)


def response_format(value: Any) -> common_pb2.StructuredOutput | None:
    """Parses OpenAI's `response_format` or a pydantic model class. Raises TypeError."""
    if hasattr(value, "model_json_schema"):
        return structured_outputs({"json": value.model_json_schema()})
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return structured_outputs({"json_object": True})
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return structured_outputs({"json": schema})
    raise TypeError(
        'give {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}} or a '
        f"pydantic model class, not {quoted(value)}"
    )


def structured_outputs(value: Mapping[str, Any]) -> common_pb2.StructuredOutput:
    """Parses vLLM's `structured_outputs`. Raises TypeError."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((form, given),) = value.items()
        if form == "json_object" and given is True:
            form, given = "json", {"type": "object"}
        if form == "json":
            text = given if isinstance(given, str) else json.dumps(given)
            return common_pb2.StructuredOutput(json_schema=text)
        if form in ("regex", "grammar") or (form == "choice" and not isinstance(given, str)):
            return common_pb2.StructuredOutput(**{form: given})
    raise TypeError(f"give one of json, json_object, regex, choice, grammar, not {quoted(value)}")


_STRUCTURED_OUTPUTS: Mapping[str, Callable[[Any], common_pb2.StructuredOutput | None]] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
}


def _set_tools(chat: inference_pb2.Chat, tools: Sequence[Mapping[str, Any]]) -> None:
    for tool in tools:
        function = tool.get("function", tool)
        if "name" not in function:
            form = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
            raise TypeError(f"a tool is {form}, not {quoted(tool)}")
        parameters = function.get("parameters")
        chat.tools.add(
            name=function["name"],
            description=function.get("description") or "",
            parameters="" if parameters is None else json.dumps(parameters),
        )


def _set_tool_choice(chat: inference_pb2.Chat, choice: Any) -> None:
    match choice:
        case "auto":
            chat.tool_choice = inference_pb2.TOOL_CHOICE_UNSPECIFIED
        case "none":
            chat.tool_choice = inference_pb2.TOOL_CHOICE_NONE
        case "required":
            chat.tool_choice = inference_pb2.TOOL_CHOICE_REQUIRED
        case {"function": {"name": str(name)}}:
            chat.tool_name = name
        case _:
            named = '{"type": "function", "function": {"name": …}}'
            raise TypeError(f"give auto, none, required or {named}, not {quoted(choice)}")


_CHAT: Mapping[str, Callable[[inference_pb2.Chat, Any], None]] = {
    "tools": _set_tools,
    "tool_choice": _set_tool_choice,
    "parallel_tool_calls": lambda chat, on: setattr(chat, "single_tool_call", not on),
    "max_thinking_tokens": lambda chat, most: setattr(chat, "max_thinking_tokens", most),
    "chat_template_kwargs": lambda chat, given: setattr(chat, "template_kwargs", json.dumps(given)),
    "continue_final_message": lambda chat, on: setattr(chat, "continue_final_message", on),
}


def timeout_of(timeout: Any) -> float | None:
    """Checks a time-out in seconds; None: the server's. Raises InvalidRequest."""
    if timeout is None:
        return None
    if isinstance(timeout, (str, bool)) or math.isnan(_checked("timeout", float, timeout)):
        raise InvalidRequest(f"timeout must be seconds or None, not {quoted(timeout)}", "timeout")
    return float(timeout) if timeout < _LONGEST_S else None


def load_adapter_request(
    name: str, directory: str, model: str
) -> fleet_pb2.LoadFleetAdapterRequest:
    """Loads a LoRA adapter. Raises InvalidRequest, as the following do."""
    request = fleet_pb2.LoadFleetAdapterRequest()
    for field, value in (("name", name), ("directory", directory), ("model", model)):
        _set(request, field, value, field)
    return request


def unload_adapter_request(name: str, wait_s: float) -> fleet_pb2.UnloadFleetAdapterRequest:
    """Unloads a LoRA adapter; `wait_s` 0: as long as workers drain."""
    request = fleet_pb2.UnloadFleetAdapterRequest()
    _set(request, "name", name, "name")
    if wait_s != 0:
        _set(request, "wait_ms", _checked("wait_s", _milliseconds, wait_s), "wait_s")
    return request


def route_request(name: str, targets: Mapping[str, float]) -> route_pb2.SetRouteRequest:
    """Sets a route; the router checks what the targets are."""
    if not isinstance(targets, Mapping):
        raise InvalidRequest(f"targets are weights by target, not {quoted(targets)}", "targets")
    request = route_pb2.SetRouteRequest()
    _set(request.route, "name", name, "name")
    request.route.targets.extend(route_target(text, weight) for text, weight in targets.items())
    return request


def canary_request(
    name: str, target: str, settings: Mapping[str, Any]
) -> route_pb2.SetRouteRequest:
    """Begins a canary."""
    request = route_pb2.SetRouteRequest()
    _set(request.route, "name", name, "name")
    canary = request.route.canary
    canary.target.CopyFrom(route_target(target))
    for field, value in {**CANARY_DEFAULTS, **settings}.items():
        _set(canary, field, value, field)
    return request


def route_target(text: str, weight: float = 1.0) -> route_pb2.RouteTarget:
    """Parses "chat@v1", or a version or name."""
    model, at, version = text.partition("@") if isinstance(text, str) else ("", "", "")
    if not model:
        raise InvalidRequest(f"{quoted(text)} is no target: write v1, chat@v1 or chat", "targets")
    target = route_pb2.RouteTarget()
    _set(target, "model", model, "targets")
    if at:
        _set(target, "version", version, "targets")
    _set(target, "weight", weight, "targets")
    return target


def delete_route_request(name: str) -> route_pb2.DeleteRouteRequest:
    """Removes a route."""
    request = route_pb2.DeleteRouteRequest()
    _set(request, "name", name, "name")
    return request


def tokenize_request(prompt: Prompt, model: str | None) -> inference_pb2.TokenizeRequest:
    """Builds the message to tokenize a text or a chat. Raises InvalidRequest."""
    request = inference_pb2.TokenizeRequest()
    _set(request, "model", model or "", "model")
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise InvalidRequest("tokenize takes text or chat messages", "prompt")
    _set_input(request, prompt)
    return request


def _set_input(request: Any, prompt: Any) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt, "prompt")
    elif _is_chat(prompt):
        for message in prompt:
            request.chat.messages.append(_checked("prompt", _message, message))
    else:
        try:
            if isinstance(prompt, (bytes, bytearray)):
                raise TypeError("bytes would be read as token ids")
            ids = [operator.index(token_id) for token_id in prompt]
        except TypeError as error:
            raise InvalidRequest(f"{_PROMPT}, not {quoted(prompt)}", "prompt") from error
        if not ids:
            raise InvalidRequest("prompt has no tokens", "prompt")
        _set(request.token_ids, "ids", ids, "prompt")


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _message(message: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise TypeError(f"{quoted(message)} is not a chat message")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(map(_text_of, content))
    fields = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in fields:
        fields["reasoning"] = fields.pop("reasoning_content")
    fields["tool_calls"] = [_tool_call(call) for call in fields.get("tool_calls", ())]
    return inference_pb2.ChatMessage(**{**fields, "content": content})


def _tool_call(call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    function = call.get("function", call)
    return inference_pb2.ToolCall(
        id=call.get("id"), name=function["name"], arguments=function["arguments"]
    )


def _text_of(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise TypeError(f'a part of content is {{"type": "text", "text": "..."}}, not {quoted(part)}')


def _milliseconds(seconds: float) -> int:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{seconds} must be seconds above 0")
    return max(1, round(seconds * 1000))


def _set(message: Any, name: str, value: Any, field: str) -> None:
    if isinstance(value, Mapping):
        _checked(field, lambda: getattr(message, name).update(value))
    elif isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, str):
        _checked(field, lambda: getattr(message, name).extend(value))
    else:
        _checked(field, setattr, message, name, value)


def _checked(field: str, convert: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return convert(*arguments)
    # Protobuf's errors, those of a mapping that lacks a key, and of a number that no float holds.
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise InvalidRequest(f"{field}: {error}", field) from error
