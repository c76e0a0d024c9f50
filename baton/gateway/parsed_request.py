"""A parsed body of an endpoint that generates, and the fields that such endpoints share.

All functions raise InvalidRequest naming the body's field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.client.request import WHOLE_INTERVAL, structured_outputs
from baton.errors import InvalidRequest
from baton.gateway import openai
from baton.generation.enum_names import PRIORITIES
from baton.v1 import common_pb2, inference_pb2

MAX_CHOICES = 1024  # of all prompts
MAX_CHOICES_SIZE = 4 << 20  # n times the prompts' characters or token ids, if n > 1
_LEAST_TOP_P = 1e-6  # for 0: the likeliest token alone
_FUNCTION = re.compile(r"(tools\[\d+\]|tool_calls\[\d+\])\.")  # as the router names fields
# By OpenAI's service tier; other tiers have the tenant's priority.
_TIERS: Mapping[str | None, str] = {"flex": "low", "priority": "high"}
_GUIDED = ("json", "regex", "choice", "grammar")
# Fields with the name and meaning of those of SamplingParams.
_SAMPLING_FIELDS = (
    *("temperature", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids"),
)


@dataclass(frozen=True)
class ParsedRequest:
    """The requests of a body. Choice i belongs to prompt i // n."""

    base: inference_pb2.GenerateRequest  # without the prompt, unless it is a chat
    prompts: Sequence[str | Sequence[int] | inference_pb2.Chat]  # empty for one chat
    options: openai.GenerateOptions
    n: int  # choices run for each prompt
    kept: int  # choices returned for each prompt: the likeliest
    logprobs: int | None  # number of alternatives returned; None: no log-probabilities
    max_tokens_given: bool  # False: a default, which is cut to what the context leaves
    fields: Mapping[str, str]  # the body's field names, by those of the router
    prompt_logprobs: int | None = (
        None  # alternatives requested from the router, with the first choice
    )
    echoes: Sequence[str | Sequence[int]] = ()  # prompts that outputs begin with

    @property
    def num_prompts(self) -> int:
        """Number of prompts; a chat counts as one."""
        return len(self.prompts) or 1

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The router's error with the field's name in the body, also at the text's beginning."""
        name = error.field.removeprefix("sampling.").removeprefix("chat.")
        name = _FUNCTION.sub(r"\1.function.", name)
        named = error.renamed(self.fields.get(name, name))
        if (text := str(error)).startswith(f"{name} "):
            named.args = (named.field + text.removeprefix(name),)
        return named

    def request(self, index: int, number: int = 0) -> inference_pb2.GenerateRequest:
        """The request for choice `number` of a prompt; the next call changes the message.

        Copies for all choices would take a thousand times the body's size.
        """
        base = self.base
        if number:  # the prompt's log-probabilities are returned once
            base.sampling.ClearField("prompt_logprobs")
        elif self.prompts:
            prompt = self.prompts[index]
            if isinstance(prompt, str):
                base.text = prompt
            elif isinstance(prompt, inference_pb2.Chat):
                base.chat.CopyFrom(prompt)
            else:
                del base.token_ids.ids[:]
                base.token_ids.ids.extend(prompt)
            if self.prompt_logprobs is not None:
                base.sampling.prompt_logprobs = self.prompt_logprobs
        return base


def base_request(
    body: openai.GenerateOptions,
    max_tokens: int,
    logprobs: int | None,
    output: common_pb2.StructuredOutput | None,
    echoed: int | None = None,
) -> inference_pb2.GenerateRequest:
    """Builds a request without its prompt.

    `echoed`: number of alternatives for the echoed prompt; None without log-probabilities.
    """
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 64:
        raise InvalidRequest("seed must be an integer of 64 bits", "seed")
    sampling = common_pb2.SamplingParams(
        top_k=None if body.top_k is None else max(0, body.top_k),
        seed=None if body.seed is None else body.seed % (1 << 64),
        top_p=_LEAST_TOP_P if body.top_p == 0 else body.top_p,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=computed_prompt_logprobs(body, echoed),
        structured_output=output,
        **{name: getattr(body, name) for name in _SAMPLING_FIELDS},
    )
    request = inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=sampling,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        include_stop=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        session=body.prompt_cache_key or body.user or body.safety_identifier or "",
        user=body.user or body.safety_identifier or "",
        priority=priority_of(
            _TIERS.get(body.service_tier) if body.priority is None else body.priority
        ),
        ttft_target_ms=body.ttft_target_ms or 0,
        truncate_prompt_tokens=openai.truncation_of(body.truncate_prompt_tokens),
        show_special_tokens=body.skip_special_tokens is False,
        bad_words=body.bad_words,
        stream_interval=0 if body.stream else WHOLE_INTERVAL,
    )
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    return request


def structured_output_of(
    body: openai.GenerateOptions,
) -> tuple[common_pb2.StructuredOutput | None, str]:
    """The restriction of the output, and the body's field that asks for it."""
    vllm, name = body.structured_outputs or openai.StructuredOutputs(), "structured_outputs"
    asked = [
        ("response_format", *_openai_form(body.response_format)),
        *((f"guided_{form}", form, getattr(body, f"guided_{form}")) for form in _GUIDED),
        *((name, form, getattr(vllm, form)) for form in (*_GUIDED, "json_object")),
    ]
    found = [(field, form, value) for field, form, value in asked if value not in (None, False)]
    if body.structured_outputs and not any(field == name for field, *_ in found):
        raise InvalidRequest(f"{name} needs one of {', '.join(_GUIDED)}", name)
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise InvalidRequest(f"{first} and {second} both restrict the output: give one", second)
    for field, form, value in found:
        return structured_outputs({form: value}), field
    return None, name


def _openai_form(asked: openai.ResponseFormat | None) -> tuple[str, Any]:
    """`response_format` as one of vLLM's forms and its value."""
    if asked is None or asked.type == "text":
        return "json", None
    if asked.type == "json_object":
        return "json_object", True
    if asked.json_schema is None:
        raise InvalidRequest("response_format.json_schema is missing", "response_format")
    return "json", asked.json_schema.schema


def computed_prompt_logprobs(body: openai.GenerateOptions, echoed: int | None) -> int | None:
    """Number of alternatives to compute for each prompt token; None: no log-probabilities."""
    wanted = [top for top in (body.prompt_logprobs, echoed) if top is not None]
    return max(wanted, default=None)


def check_prompt_alone(body: openai.GenerateOptions, field: str) -> None:
    """Raises InvalidRequest for a request without output that would return nothing."""
    if body.prompt_logprobs is None:
        raise InvalidRequest(f"{field} must be at least 1 without echo or prompt_logprobs", field)


def check_choices(body: openai.GenerateOptions, n: int, prompts: int, size: int) -> None:
    """Checks limits of choices, and options of streams.

    `size`: characters or token ids of all prompts.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs cannot be streamed: leave stream out", "prompt_logprobs"
        )
    if prompts * n > MAX_CHOICES:
        raise InvalidRequest(f"the number of prompts times n may be at most {MAX_CHOICES}", "n")
    if n > 1 and size * n > MAX_CHOICES_SIZE:
        raise InvalidRequest(
            f"n times the prompts' length may be at most {MAX_CHOICES_SIZE} characters or token "
            f"ids, not {n} times {size}",
            "n",
        )
    stream_options = body.stream_options
    if stream_options and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if (
        stream_options
        and stream_options.continuous_usage_stats
        and not stream_options.include_usage
    ):
        name = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{name} needs include_usage to be true", name)


def priority_of(value: str | int | None) -> common_pb2.Priority:
    """The priority for a name, or for vLLM's number, where lower ones go first."""
    if isinstance(value, str):
        return PRIORITIES[value]
    if not value:
        return common_pb2.PRIORITY_UNSPECIFIED
    return common_pb2.PRIORITY_HIGH if value < 0 else common_pb2.PRIORITY_LOW
