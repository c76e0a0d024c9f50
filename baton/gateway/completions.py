"""/v1/completions: its bodies become requests, and outputs become its answers."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidRequest
from baton.gateway import api
from baton.gateway.api import CompletionLogprobs
from baton.gateway.output import ChoiceOutput
from baton.gateway.parsed_request import (
    MAX_CHOICES_SIZE,
    ParsedRequest,
    base_request,
    check_choices,
    check_prompt_alone,
    computed_prompt_logprobs,
    structured_output_of,
)
from baton.gateway.prompt_logprobs import MIN_LOGPROB
from baton.v1 import common_pb2
from router.output.text_stream import ParsedOutput

_DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it


def parse_completion(text: bytes) -> ParsedRequest:
    """A body of /v1/completions."""
    body = api.decode(api.CompletionRequest, text)
    kept, echoed = body.n or 1, body.logprobs if body.echo else None
    n = kept if body.best_of is None else body.best_of
    _check_best_of(body, kept, n)
    if body.echo and (body.suffix or body.truncate_prompt_tokens):
        raise InvalidRequest("echo is not possible with suffix or truncate_prompt_tokens", "echo")
    prompts = api.prompts_of(body.prompt)
    output, restriction = structured_output_of(body)
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if not most and not body.echo:
        check_prompt_alone(body, "max_tokens")
    logprobs = 0 if n > kept and body.logprobs is None else body.logprobs
    base = base_request(body, most, logprobs, output, echoed)
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
    check_choices(body, n, len(prompts), sum(map(len, prompts)) + suffixes)
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
        prompt_logprobs=computed_prompt_logprobs(body, echoed),
    )


def _check_best_of(body: api.CompletionRequest, kept: int, n: int) -> None:
    if n < kept:
        raise InvalidRequest(f"best_of is {n} and must be at least n, {kept}", "best_of")
    if n > kept and body.stream:
        raise InvalidRequest(
            "best_of above n cannot be streamed: the best is known last", "best_of"
        )


class CompletionOutput(ChoiceOutput):
    """As /v1/completions has it."""

    id_prefix = "cmpl-"
    answer = api.Completion
    chunk_object = "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._echoed = False

    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> CompletionLogprobs:
        """Four parallel lists; the first ones begin with the prompt's, if that is echoed."""
        found, prompt = CompletionLogprobs([], [], [], []), self.of_prompt
        if prompt.logprobs is not None and prompt.echoed_top is not None and not self._echoed:
            self._echoed = True
            self._add(found, prompt.logprobs.token_ids[0])
            for token_id, logprob, _, top in prompt.positions(prompt.echoed_top):
                self._add(found, token_id, logprob, top)
        for position in positions:
            top = [(other.token_id, other.logprob) for other in position.top]
            self._add(found, position.chosen.token_id, position.chosen.logprob, top)
        return found

    def _add(
        self,
        found: CompletionLogprobs,
        token_id: int,
        logprob: float | None = None,
        top: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Appends a token; without a log-probability it is a prompt's first."""
        text, piece = self.shown(token_id)
        found.text_offset.append(self._offset)
        found.tokens.append(text)
        self._offset += len(self._utf8.decode(piece))
        if logprob is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            return
        found.token_logprobs.append(max(logprob, MIN_LOGPROB))
        best = {text: max(logprob, MIN_LOGPROB)}
        for other, value in top:
            best[self.shown(other)[0]] = max(value, MIN_LOGPROB)
        found.top_logprobs.append(best)

    def _chunk(
        self, text: str, parsed: ParsedOutput | None, **members: Any
    ) -> api.CompletionChoice:
        return api.CompletionChoice(text=text, **members)

    def _whole(self, text: str, parsed: ParsedOutput, **members: Any) -> api.CompletionChoice:
        return api.CompletionChoice(text=text, prompt_logprobs=self.prompt_logprobs(), **members)
