"""Checks of a request that need no tokenizer and no tenant; each raises InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from baton.errors import ContextOverflow, InvalidRequest
from baton.generation.sampling_params import FILL_CONTEXT, MAX_CACHE_SALT_CHARS, SamplingParams
from baton.v1 import common_pb2, inference_pb2

MAX_CHARS_PER_TOKEN = 16  # of a whole prompt; longer texts are refused before they are tokenized
# Prompt tokens, times the alternatives at each, whose log-probabilities are returned: 8 MiB.
MAX_PROMPT_LOGPROBS = 1 << 20
MAX_USER_CHARS = 1024
MAX_WORKERS = 64  # that one request may name
_PRIORITIES = common_pb2.Priority.values()


def smallest_limit(*limits: int) -> int:
    """The smallest limit; 0 is no limit."""
    return min((limit for limit in limits if limit), default=0)


def check_fields(request: inference_pb2.GenerateRequest) -> None:
    """Checks priority, cache salt, end user and the number of workers named."""
    if request.priority not in _PRIORITIES:
        raise InvalidRequest(f"there is no priority {request.priority}", "priority")
    if "\0" in request.cache_salt:
        raise InvalidRequest("cache_salt has a NUL character", "cache_salt")
    for name, limit in (("cache_salt", MAX_CACHE_SALT_CHARS), ("user", MAX_USER_CHARS)):
        if (size := len(getattr(request, name))) > limit:
            text = f"{name} has {size} characters and at most {limit} are accepted"
            raise InvalidRequest(text, name)
    if (size := len(request.workers)) > MAX_WORKERS:
        text = f"the request names {size} workers and at most {MAX_WORKERS} are accepted"
        raise InvalidRequest(text, "workers")


def check_resumed(request: inference_pb2.GenerateRequest, params: SamplingParams) -> None:
    """Checks that a request that resumes a stream can go on where that ended."""
    if not (num_tokens := len(request.resumed_token_ids)):
        return
    if num_tokens >= params.max_tokens:
        raise InvalidRequest(
            f"{num_tokens} tokens were delivered and {params.max_tokens} were requested: nothing "
            "is left to generate",
            "resumed_token_ids",
        )
    if params.temperature > 0 and not request.sampling.HasField("seed"):
        raise InvalidRequest(
            "to resume a stream that was sampled at random, its seed is needed", "sampling.seed"
        )


def check_prompt(
    prompt: Sequence[int],
    resumed: Sequence[int],
    vocab_size: int,
    context: int,
    max_tokens: int,
    *,
    has_output: bool,
) -> None:
    """Checks tokens and length. `max_tokens`: the router's or tenant's limit; 0 is no limit."""
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", "input")
    check_length(len(prompt) + len(resumed), context, has_output=has_output)
    if (largest := max(chain(prompt, resumed))) >= vocab_size:
        raise InvalidRequest(
            f"token id {largest} is not below the vocabulary size {vocab_size}", "token_ids"
        )
    if max_tokens and len(prompt) > max_tokens:
        text = f"the prompt has {len(prompt)} tokens and at most {max_tokens} are accepted here"
        raise ContextOverflow(text, "input", max_tokens)


def check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    """Checks that not too many log-probabilities of the prompt are requested."""
    if (top := params.prompt_logprobs) is None:
        return
    if num_tokens * (top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the log-probabilities of {num_tokens} tokens with {top} alternatives each are more "
            f"than {MAX_PROMPT_LOGPROBS}: ask for fewer",
            "sampling.prompt_logprobs",
        )


def check_length(num_tokens: int, limit: int, *, has_output: bool) -> None:
    """Checks that the context holds a prompt, and a token of output if there is any."""
    if limit and num_tokens + has_output > limit:
        text = f"the prompt has {num_tokens} tokens and the context holds {limit}"
        if has_output:
            text += ", of which one must be left for output"
        raise ContextOverflow(text, "input", limit)


def num_kept(truncate_prompt_tokens: int, limit: int, max_tokens: int) -> int:
    """Number of tokens that are kept at the end of a prompt; 0: all.

    FILL_CONTEXT keeps what a context of `limit` tokens (0: not known) holds before `max_tokens` of
    output, or before one token if that is FILL_CONTEXT or more than the context.
    """
    if truncate_prompt_tokens != FILL_CONTEXT:
        return truncate_prompt_tokens
    return limit - max_tokens if limit > max_tokens else max(0, limit - 1)


def check_chars(num_chars: int, limit: int) -> None:
    """Raises ContextOverflow for a text whose tokens cannot fit."""
    if limit and num_chars > limit * MAX_CHARS_PER_TOKEN:
        raise ContextOverflow(
            f"the prompt has {num_chars} characters and the context holds {limit} tokens, "
            f"{MAX_CHARS_PER_TOKEN} characters each at most",
            "input",
            limit,
        )


def num_chars(message: inference_pb2.ChatMessage) -> int:
    """Characters of a chat message."""
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.role) + len(message.content) + len(message.reasoning) + calls


def fit_max_tokens(
    params: SamplingParams, prompt_tokens: int, limit: int, max_output: int, cut: bool
) -> SamplingParams:
    """With `cut` or FILL_CONTEXT, reduces max_tokens to `max_output` and the context's room.

    Otherwise the caller chose max_tokens, and ContextOverflow is raised if the context has no room
    for it. `limit`: tokens that the context holds; 0 if that is not known.
    """
    left = limit - prompt_tokens if limit else FILL_CONTEXT
    if cut or params.max_tokens == FILL_CONTEXT:
        return replace(params, max_tokens=min(params.max_tokens, left, max_output))
    if params.max_tokens > left:
        raise ContextOverflow(
            f"max_tokens is {params.max_tokens}, but the context of {limit} tokens leaves "
            f"{left} behind a prompt of {prompt_tokens}",
            "sampling.max_tokens",
            limit,
        )
    return params
