"""Turns a checked body into requests to the router, and how to answer them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from baton.gateway.api_schema import MAX_CHOICES, MAX_CHOICES_SIZE
from baton.sampling import FILL_CONTEXT
from baton.v1 import common_pb2, inference_pb2

Body = Mapping[str, Any]

_DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it
_SEEDS = 1 << 64
_PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}
# Fields of the sampling settings that have the same name and meaning here.
_SAME = (
    "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True)
class ParsedRequest:
    """What to generate and return. Choice i belongs to prompt i // n."""

    requests: Sequence[inference_pb2.GenerateRequest]  # one for each prompt
    n: int
    stream: bool
    include_usage: bool
    model: str  # empty: the one that is served
    logprobs: bool
    return_token_ids: bool
    max_tokens_given: bool  # by the caller; a default is cut to what the context leaves
    echoes: Sequence[str | Sequence[int]] = ()  # by prompt; what its text begins with


def parse_completion(body: Body) -> ParsedRequest:
    """Of a body of /v1/completions. Raises InvalidRequest naming the field."""
    prompts = _prompts(body["prompt"])
    n = body.get("n") or 1
    if (best_of := body.get("best_of")) is not None and best_of != n:
        raise InvalidRequest("best_of is supported only where it equals n", "best_of")
    logprobs, echo = body.get("logprobs"), bool(body.get("echo"))
    if echo and logprobs is not None:
        raise InvalidRequest("echo is not supported together with logprobs", "echo")
    base = _base(body, body.get("max_tokens") or _DEFAULT_MAX_TOKENS, logprobs)
    bases = []
    for prompt in prompts:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(base)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        bases.append(request)
    size = sum(map(len, prompts))
    return _parsed(body, bases, size, logprobs is not None, prompts if echo else ())


def parse_chat(body: Body) -> ParsedRequest:
    """Of a body of /v1/chat/completions; without a limit it may fill the context."""
    top = body.get("top_logprobs")
    if top is not None and not body.get("logprobs"):
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (top or 0) if body.get("logprobs") else None
    most = body.get("max_completion_tokens") or body.get("max_tokens") or FILL_CONTEXT
    base = _base(body, most, logprobs)
    base.chat.CopyFrom(chat_of(body["messages"]))
    size = sum(len(message.content) for message in base.chat.messages)
    return _parsed(body, [base], size, logprobs is not None)


def parse_tokenize(body: Body) -> inference_pb2.TokenizeRequest:
    """Of a body of /tokenize."""
    prompt: str | None = body.get("prompt")
    messages: Any = body.get("messages")
    if (prompt is None) is (messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    if body.get("add_special_tokens") not in (None, messages is None):
        raise InvalidRequest("add_special_tokens is not supported here: leave it out",
                             "add_special_tokens")  # fmt: skip
    request = inference_pb2.TokenizeRequest(model=body.get("model") or "")
    if prompt is not None:
        request.text = prompt
    else:
        request.chat.CopyFrom(chat_of(messages))
    return request


def chat_of(messages: Sequence[Mapping[str, Any]]) -> inference_pb2.Chat:
    """A conversation as the service takes it."""
    return inference_pb2.Chat(
        messages=[
            inference_pb2.ChatMessage(role=message["role"], content=_content(message))
            for message in messages
        ]
    )


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _prompts(prompt: Any) -> Sequence[str | Sequence[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _parsed(
    body: Body,
    bases: Sequence[inference_pb2.GenerateRequest],
    size: int,
    logprobs: bool,
    echoes: Sequence[str | Sequence[int]] = (),
) -> ParsedRequest:
    """`size` is of all prompts, in characters or token ids."""
    n = body.get("n") or 1
    if len(bases) * n > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n may be {MAX_CHOICES} at most", "n")
    if n > 1 and size * n > MAX_CHOICES_SIZE:
        raise InvalidRequest(
            f"n times the prompts' length may be {MAX_CHOICES_SIZE} characters or token ids at "
            f"most, not {n} times {size}",
            "n",
        )
    stream, options = bool(body.get("stream")), body.get("stream_options")
    if options and not stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    return ParsedRequest(
        requests=bases,
        n=n,
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        model=body.get("model") or "",
        logprobs=logprobs,
        return_token_ids=bool(body.get("return_token_ids")),
        max_tokens_given=bool(body.get("max_completion_tokens") or body.get("max_tokens")),
        echoes=echoes,
    )


def _base(body: Body, max_tokens: int, logprobs: int | None) -> inference_pb2.GenerateRequest:
    """All but the prompt."""
    stop = body.get("stop")
    return inference_pb2.GenerateRequest(
        model=body.get("model") or "",
        sampling=_sampling(body, max_tokens, logprobs),
        stop=[stop] if isinstance(stop, str) else stop,
        include_stop=bool(body.get("include_stop_str_in_output")),
        cache_salt=body.get("cache_salt") or "",
        priority=_priority(body.get("priority")),
        ttft_target_ms=body.get("ttft_target_ms") or 0,
    )


def _sampling(body: Body, max_tokens: int, logprobs: int | None) -> common_pb2.SamplingParams:
    temperature, seed = body.get("temperature"), body.get("seed")
    settings = {name: body[name] for name in _SAME if body.get(name) is not None}
    if bias := body.get("logit_bias"):
        settings["logit_bias"] = {int(token): value for token, value in bias.items()}
    return common_pb2.SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_k=max(0, body.get("top_k") or 0),
        seed=None if seed is None else seed % _SEEDS,
        stop_token_ids=body.get("stop_token_ids"),
        max_tokens=max_tokens,
        logprobs=logprobs,
        **settings,
    )


def _priority(value: str | int | None) -> common_pb2.Priority:
    if isinstance(value, str):
        return _PRIORITIES[value]
    if not value:
        return common_pb2.PRIORITY_UNSPECIFIED
    return common_pb2.PRIORITY_HIGH if value < 0 else common_pb2.PRIORITY_LOW
