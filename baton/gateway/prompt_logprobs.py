"""What answers say of a prompt: its text, and its tokens' log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from baton.gateway import api
from baton.v1 import common_pb2

MIN_LOGPROB = -9999.0  # JSON has no infinity
Position = tuple[int, float, int, list[tuple[int, float]]]


@dataclass
class PromptOutput:
    """Of one prompt, for all of its choices; the first of them brings the log-probabilities."""

    echo: str = ""  # what each output's text begins with
    echoed_top: int | None = None  # begin `logprobs` with the prompt's, with so many alternatives
    told_top: int | None = None  # the same of the field `prompt_logprobs`
    logprobs: common_pb2.PromptLogprobs | None = None

    @property
    def size(self) -> int:
        """How many log-probabilities there are, alternatives included."""
        found = self.logprobs
        return 0 if found is None else len(found.logprobs) + len(found.top_ids)

    def told(self, show: Callable[[int], str]) -> api.PromptLogprobs | UnsetType:
        """The field `prompt_logprobs`, as vLLM has it; `show` gives a token as text."""
        if self.told_top is None:
            return UNSET
        told: api.PromptLogprobs = [None]  # the first token has none
        for token_id, logprob, rank, top in self.positions(self.told_top):
            tokens = {other: (value, at) for at, (other, value) in enumerate(top, 1)}
            tokens.setdefault(token_id, (logprob, rank))
            told.append(
                {
                    str(other): api.PromptToken(max(value, MIN_LOGPROB), at, show(other))
                    for other, (value, at) in tokens.items()
                }
            )
        return told

    def positions(self, top: int) -> Iterator[Position]:
        """Of each token but the first: id, log-probability, rank, and the likeliest there."""
        found = self.logprobs
        assert found is not None, "it comes before any output"
        width = len(found.top_ids) // max(1, len(found.logprobs))
        likeliest = list(zip(found.top_ids, found.top_logprobs, strict=True))
        rows = zip(found.token_ids[1:], found.logprobs, found.ranks, strict=True)
        for first, row in enumerate(rows):
            yield *row, likeliest[first * width : first * width + min(top, width)]
