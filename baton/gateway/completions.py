"""/v1/completions: parses bodies and formats outputs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidRequest
from baton.gateway import answers, openai
from baton.gateway.answers import CompletionLogprobs
from baton.gateway.output import MIN_LOGPROB, ChoiceOutput
from baton.gateway.parsed_request import (
    MAX_CHOICES_SIZE,
    ParsedRequest,
    base_request,
    check_choices,
    check_prompt_alone,
    computed_prompt_logprobs,
    structured_output_of,
)
from baton.v1 import common_pb2
from router.output.output_parser import ParsedOutput

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


def parse_completion(text: bytes) -> ParsedRequest:
    """Parses a body of /v1/completions. Raises InvalidRequest naming the field."""
    body = openai.decode(openai.CompletionRequest, text)
    kept, echoed = body.n or 1, body.logprobs if body.echo else None
    n = kept if body.best_of is None else body.best_of
    _check_best_of(body, kept, n)
    if body.echo and (body.suffix or body.truncate_prompt_tokens):
        raise InvalidRequest(
            "echo does not work with suffix or truncate_prompt_tokens: leave one out", "echo"
        )
    prompts = openai.prompts_of(body.prompt)
    output, restriction = structured_output_of(body)
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if not most and not body.echo:
        check_prompt_alone(body, "max_tokens")
    logprobs = 0 if n > kept and body.logprobs is None else body.logprobs
    base = base_request(body, most, logprobs, output, echoed)
    if body.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequest("suffix needs a prompt of text, not token ids", "suffix")
    base.suffix = body.suffix or ""
    suffixes = len(base.suffix) * len(prompts)
    if len(prompts) > 1 and suffixes > MAX_CHOICES_SIZE:
        raise InvalidRequest(
            f"suffix times the number of prompts may have {MAX_CHOICES_SIZE} characters, not "
            f"{suffixes}: send fewer prompts",
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


def _check_best_of(body: openai.CompletionRequest, kept: int, n: int) -> None:
    if n < kept:
        raise InvalidRequest(f"best_of must be at least n ({kept}), not {n}", "best_of")
    if n > kept and body.stream:
        raise InvalidRequest("best_of above n cannot be streamed: leave stream out", "best_of")


class CompletionOutput(ChoiceOutput):
    """The output of a completion's choice."""

    id_prefix = "cmpl-"
    answer = answers.Completion
    chunk_object = "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._echoed = False

    def logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> CompletionLogprobs:
        """Formats parallel lists; the first call begins with an echoed prompt's."""
        found, prompt = CompletionLogprobs([], [], [], []), self.prompt_output
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
        """Appends a token; a prompt's first one has no log-probability."""
        text, piece = self.token_text(token_id)
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
            best[self.token_text(other)[0]] = max(value, MIN_LOGPROB)
        found.top_logprobs.append(best)

    def _chunk(
        self, text: str, parsed: ParsedOutput | None, **members: Any
    ) -> answers.CompletionChoice:
        return answers.CompletionChoice(text=text, **members)

    def _whole(self, text: str, parsed: ParsedOutput, **members: Any) -> answers.CompletionChoice:
        return answers.CompletionChoice(
            text=text, prompt_logprobs=self.prompt_logprobs(), **members
        )
