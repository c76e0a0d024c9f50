"""Requests without output: each input of a body is a prompt that is embedded or classified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.gateway import answers, openai
from baton.gateway.endpoint import Call
from baton.gateway.generation import run_choices
from baton.gateway.parsed_request import ParsedRequest, priority_of
from baton.v1 import common_pb2, inference_pb2
from router.output.sink import Piece

_WANTED = ("sampling.embedding", "sampling.classification")


@dataclass(frozen=True)
class InputRequests:
    """The requests of a body, one for each input."""

    requests: ParsedRequest
    request_id: str | None
    use_activation: bool = True  # False: labels have their logits

    def scores(self, end: inference_pb2.Finish) -> list[float]:
        """The score of each label, or its logit."""
        return [one.score if self.use_activation else one.logit for one in end.labels]


@dataclass(frozen=True)
class Answered:
    """The ends of all requests of a body, and what their answer has in common."""

    finishes: list[inference_pb2.Finish]
    model: str
    usage: answers.InputUsage
    request_id: str


def parse_inputs(
    body: openai.PoolingOptions,
    prompts: Sequence[str | Sequence[int] | inference_pb2.Chat],
    field: str,
    *,
    use_activation: bool = True,
) -> InputRequests:
    """The requests of a body whose inputs are in `field`; their sampling says what is wanted."""
    base = inference_pb2.GenerateRequest(
        model=body.model or "",
        sampling=common_pb2.SamplingParams(max_tokens=0),
        truncate_prompt_tokens=openai.truncation_of(body.truncate_prompt_tokens),
        cache_salt=body.cache_salt or "",
        priority=priority_of(body.priority),
        session=body.user or "",
        user=body.user or "",
    )
    if body.add_special_tokens is not None:
        base.add_special_tokens = body.add_special_tokens
    fields = dict.fromkeys(("input", "text", "token_ids", "chat"), field)
    requests = ParsedRequest(
        base,
        prompts,
        openai.GenerateOptions(model=body.model),
        n=1,
        kept=1,
        logprobs=None,
        max_tokens_given=True,
        fields={**fields, **dict.fromkeys(_WANTED, "model")},
    )
    return InputRequests(requests, body.request_id, use_activation)


async def run_inputs(inputs: InputRequests, call: Call) -> Answered:
    """Runs all requests of a body; cancelling it cancels them. Raises InvalidRequest by field."""
    call, parsed = call.with_request_id(inputs.request_id), inputs.requests
    base, exchange = parsed.base, call.exchange
    target = call.service.resolve(base.model, base.session, call.caller)
    sinks = [_FinishSink(call) for _ in range(parsed.num_prompts)]
    try:
        call.exchange.is_counted = True
        await run_choices(call.service, parsed, call.caller, sinks, target)
    except InvalidRequest as error:
        raise error.renamed(parsed.fields.get(error.field, error.field)) from error
    exchange.answer_headers |= call.limit_headers()
    tokens = sum(sink.end.usage.prompt_tokens for sink in sinks)
    return Answered(
        [sink.end for sink in sinks],
        base.model or target.version.name,
        answers.InputUsage(tokens, tokens),
        sinks[0].request_id,
    )


class _FinishSink:
    """Stores the `Finish` of a request, which has no output."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.end = inference_pb2.Finish()
        self.request_id = ""

    def start(self, started: inference_pb2.Started) -> None:
        self.request_id = started.request_id
        exchange = self._call.exchange
        # The trace of the first input that starts is kept.
        exchange.answer_headers = {
            **self._call.started_headers(started),
            **exchange.answer_headers,
        }

    def prompt(self, logprobs: common_pb2.PromptLogprobs) -> None:
        pass

    def put(self, piece: Piece) -> None:
        pass

    async def finish(self, finish: inference_pb2.Finish) -> None:
        self.end = finish
