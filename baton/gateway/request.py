"""Turns checked bodies into requests to the router. All raise InvalidRequest naming the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from baton.client.request import WHOLE_INTERVAL
from baton.errors import InvalidRequest
from baton.gateway import api
from baton.generation.sampling_params import FILL_CONTEXT
from baton.v1 import common_pb2, inference_pb2

MAX_CHOICES = 1024  # prompts times n
MAX_CHOICES_SIZE = 4 << 20  # n times the characters or token ids of the prompts, where n > 1
_DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it
_PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}
_ANY_OBJECT = {"type": "object"}
# Fields of the sampling settings that have the same name and meaning here.
_SAME = (
    *("temperature", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids"),
)


@dataclass(frozen=True)
class ParsedRequest:
    """What to generate and return. Choice i belongs to prompt i // n."""

    base: inference_pb2.GenerateRequest  # the request of a chat; else of each prompt, without it
    prompts: Sequence[str | Sequence[int]]  # none for a chat
    options: api.GenerateOptions
    n: int  # choices that are run for each prompt, of which
    kept: int  # so many are returned: the likeliest
    logprobs: int | None  # how many alternatives are shown; None: nothing of it
    max_tokens_given: bool  # by the caller; a default is cut to what the context leaves
    fields: Mapping[str, str]  # what the router's fields are called in this body
    prompt_logprobs: int | None = None  # of each prompt's first choice
    echoes: Sequence[str | Sequence[int]] = ()  # by prompt; what its text begins with

    @property
    def num_prompts(self) -> int:
        """How many there are, a chat being one."""
        return len(self.prompts) or 1

    def request(self, index: int, number: int = 0) -> inference_pb2.GenerateRequest:
        """The request for choice `number` of a prompt, until the next call.

        All have one message: a copy for each would take a thousand times the body's size.
        """
        base = self.base
        if number:  # its prompt is known, and its log-probabilities are told once
            base.sampling.ClearField("prompt_logprobs")
        elif self.prompts:
            prompt = self.prompts[index]
            if isinstance(prompt, str):
                base.text = prompt
            else:
                del base.token_ids.ids[:]
                base.token_ids.ids.extend(prompt)
            if self.prompt_logprobs is not None:
                base.sampling.prompt_logprobs = self.prompt_logprobs
        return base


def parse_completion(text: bytes) -> ParsedRequest:
    """A body of /v1/completions."""
    body = api.decode(api.CompletionRequest, text)
    kept, echoed = body.n or 1, body.logprobs if body.echo else None
    n = kept if body.best_of is None else body.best_of
    _check_best_of(body, kept, n)
    if body.echo and (body.suffix or body.truncate_prompt_tokens):
        raise InvalidRequest("echo is not possible with suffix or truncate_prompt_tokens", "echo")
    prompts = api.prompts_of(body.prompt)
    output, restriction = _structured_output(body)
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if not most and not body.echo:
        _check_prompt_alone(body, "max_tokens")
    logprobs = 0 if n > kept and body.logprobs is None else body.logprobs
    base = _base(body, most, logprobs, output, echoed)
    if body.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequest("suffix needs a prompt that is text", "suffix")
    base.suffix = body.suffix or ""
    suffixes = len(base.suffix) * len(prompts)
    if len(prompts) > 1 and suffixes > MAX_CHOICES_SIZE:
        raise InvalidRequest(
            f"suffix is tokenized with each prompt: all may have {MAX_CHOICES_SIZE} characters "
            f"together, not {suffixes}",
            "suffix",
        )
    _check_choices(body, n, len(prompts), sum(map(len, prompts)) + suffixes)
    return ParsedRequest(
        base,
        prompts,
        body,
        n=n,
        kept=kept,
        logprobs=body.logprobs,
        max_tokens_given=body.max_tokens is not None,
        fields={
            **dict.fromkeys(("input", "text", "token_ids"), "prompt"),
            "structured_output": restriction,
        },
        echoes=prompts if body.echo else (),
        prompt_logprobs=_prompt_logprobs(body, echoed),
    )


def parse_chat(text: bytes) -> ParsedRequest:
    """A body of /v1/chat/completions; without a limit it may fill the context."""
    return parsed_chat(api.decode(api.ChatRequest, text))


def parsed_chat(body: api.ChatRequest) -> ParsedRequest:
    """What a chat asks for."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = body.max_completion_tokens or body.max_tokens
    if most == 0:
        _check_prompt_alone(body, "max_tokens")
    output, restriction = _structured_output(body)
    request = _base(body, FILL_CONTEXT if most is None else most, logprobs, output)
    request.chat.CopyFrom(_chat(body, body.messages))
    _set_tool_choice(request.chat, body)
    n, size = body.n or 1, sum(len(message.content) for message in request.chat.messages)
    _check_choices(body, n, 1, size)
    older_name = body.max_tokens is not None and not body.max_completion_tokens
    return ParsedRequest(
        request,
        (),
        body,
        n=n,
        kept=n,
        logprobs=logprobs,
        max_tokens_given=most is not None,
        fields={
            **dict.fromkeys(("input", "chat", "token_ids"), "messages"),
            "max_tokens": "max_tokens" if older_name else "max_completion_tokens",
            "include_stop": "include_stop_str_in_output",
            "structured_output": restriction,
            "tool_name": "tool_choice",
            "max_thinking_tokens": (
                "max_thinking_tokens"
                if body.thinking_token_budget is None
                else "thinking_token_budget"
            ),
            "template_kwargs": "chat_template_kwargs",
        },
    )


def parse_tokenize(text: bytes) -> tuple[inference_pb2.TokenizeRequest, bool]:
    """A body of /tokenize, and whether it asks for the tokens' texts."""
    body = api.decode(api.TokenizeRequest, text)
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    request = inference_pb2.TokenizeRequest(model=body.model or "")
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    if body.messages is None:
        request.text = body.prompt or ""
    else:
        request.chat.CopyFrom(_chat(body, body.messages))
    return request, bool(body.return_token_strs)


def parse_detokenize(text: bytes) -> api.DetokenizeRequest:
    """A body of /detokenize."""
    return api.decode(api.DetokenizeRequest, text)


def _chat(
    body: api.ChatRequest | api.TokenizeRequest, messages: Sequence[api.Message]
) -> inference_pb2.Chat:
    chat = inference_pb2.Chat(continue_final_message=bool(body.continue_final_message))
    for message in messages:
        content = message.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        turn = chat.messages.add(role=message.role, content=content)
        turn.name, turn.tool_call_id = message.name or "", message.tool_call_id or ""
        turn.reasoning = message.reasoning or message.reasoning_content or ""
        for call in message.tool_calls or ():
            function = call.function
            name = "" if function.name is UNSET else function.name
            turn.tool_calls.add(id=call.id, name=name, arguments=function.arguments)
    for tool in body.tools or ():
        parameters = tool.function.parameters
        chat.tools.add(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    if isinstance(body, api.ChatRequest) and body.reasoning_effort:
        variables["reasoning_effort"] = body.reasoning_effort
    if variables:
        chat.template_kwargs = json.dumps(variables)
    return chat


def _set_tool_choice(chat: inference_pb2.Chat, body: api.ChatRequest) -> None:
    choice = body.tool_choice
    if isinstance(choice, api.NamedTool):
        chat.tool_name = choice.function.name
    elif choice == "required":
        chat.tool_choice = inference_pb2.TOOL_CHOICE_REQUIRED
    elif choice == "none":
        chat.tool_choice = inference_pb2.TOOL_CHOICE_NONE
    chat.single_tool_call = body.parallel_tool_calls is False
    most, budget = body.max_thinking_tokens, body.thinking_token_budget
    if most is not None and budget is not None:
        name = "thinking_token_budget"
        raise InvalidRequest(f"{name} is another name of max_thinking_tokens: give one", name)
    if most is None and budget != -1:
        most = budget
    if most is not None:
        chat.max_thinking_tokens = most


def _check_prompt_alone(body: api.GenerateOptions, field: str) -> None:
    """Raises InvalidRequest where no token is wanted and nothing would be told of the prompt."""
    if body.prompt_logprobs is None:
        raise InvalidRequest(f"{field} must be at least 1 without echo or prompt_logprobs", field)


def _check_best_of(body: api.CompletionRequest, kept: int, n: int) -> None:
    if n < kept:
        raise InvalidRequest(f"best_of is {n} and must be at least n, {kept}", "best_of")
    if n > kept and body.stream:
        raise InvalidRequest(
            "best_of above n cannot be streamed: the best is known last", "best_of"
        )


def _check_choices(body: api.GenerateOptions, n: int, prompts: int, size: int) -> None:
    """`size` is of all prompts, in characters or token ids."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs are not streamed: leave stream out", "prompt_logprobs"
        )
    if prompts * n > MAX_CHOICES:
        raise InvalidRequest(f"prompts times n may be {MAX_CHOICES} at most", "n")
    if n > 1 and size * n > MAX_CHOICES_SIZE:
        raise InvalidRequest(
            f"n times the prompts' length may be {MAX_CHOICES_SIZE} characters or token ids at "
            f"most, not {n} times {size}",
            "n",
        )
    told = body.stream_options
    if told and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if told and told.continuous_usage_stats and not told.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{name} needs include_usage to be true", name)


def _structured_output(
    body: api.GenerateOptions,
) -> tuple[common_pb2.StructuredOutput | None, str]:
    """What the output is restricted to, and the body's field that says so."""
    vllm, given = body.structured_outputs or api.StructuredOutputs(), "structured_outputs"
    form = body.response_format or api.ResponseFormat(type="text")
    if form.type == "json_schema" and form.json_schema is None:
        raise InvalidRequest("response_format.json_schema is missing", "response_format")
    openai = form.json_schema.schema if form.json_schema and form.type == "json_schema" else None
    asked: tuple[tuple[str, str, Any], ...] = (
        ("response_format", "json_schema", openai),
        ("response_format", "json_schema", _ANY_OBJECT if form.type == "json_object" else None),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        (given, "json_schema", vllm.json),
        (given, "json_schema", _ANY_OBJECT if vllm.json_object else None),
        (given, "regex", vllm.regex),
        (given, "choice", vllm.choice),
        (given, "grammar", vllm.grammar),
    )
    found = [(field, name, value) for field, name, value in asked if value is not None]
    if body.structured_outputs and not any(field == given for field, *_ in found):
        raise InvalidRequest(f"{given} needs one of json, regex, choice, grammar", given)
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise InvalidRequest(f"{first} and {second} restrict the output both: give one", second)
    for field, name, value in found:
        text = json.dumps(value) if isinstance(value, dict) else value
        return common_pb2.StructuredOutput(**{name: text}), field
    return None, given


def _base(
    body: api.GenerateOptions,
    max_tokens: int,
    logprobs: int | None,
    output: common_pb2.StructuredOutput | None,
    echoed: int | None = None,
) -> inference_pb2.GenerateRequest:
    """All but the prompt, of which log-probabilities with `echoed` alternatives are echoed."""
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 64:
        raise InvalidRequest("seed must be an integer of 64 bits", "seed")
    sampling = common_pb2.SamplingParams(
        top_k=None if body.top_k is None else max(0, body.top_k),
        seed=None if body.seed is None else body.seed % (1 << 64),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body, echoed),
        structured_output=output,
        **{name: getattr(body, name) for name in _SAME},
    )
    request = inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=sampling,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        include_stop=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt or "",
        priority=priority_of(body.priority),
        ttft_target_ms=body.ttft_target_ms or 0,
        truncate_prompt_tokens=body.truncate_prompt_tokens or 0,
        show_special_tokens=body.skip_special_tokens is False,
        bad_words=body.bad_words,
        stream_interval=0 if body.stream else WHOLE_INTERVAL,
    )
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    return request


def _prompt_logprobs(body: api.GenerateOptions, echoed: int | None) -> int | None:
    """How many alternatives at each position of a prompt are computed; None: nothing of it."""
    told = [top for top in (body.prompt_logprobs, echoed) if top is not None]
    return max(told, default=None)


def priority_of(value: str | int | None) -> common_pb2.Priority:
    """As the API has it: a name, or a number of which lower ones go first."""
    if isinstance(value, str):
        return _PRIORITIES[value]
    if not value:
        return common_pb2.PRIORITY_UNSPECIFIED
    return common_pb2.PRIORITY_HIGH if value < 0 else common_pb2.PRIORITY_LOW
