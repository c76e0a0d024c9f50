"""What became of one request, as its caller saw it: the raw material of every figure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

OK = "OK"
INTERRUPTED = "INTERRUPTED"  # given up by us, when the run was ended early


@dataclass(slots=True)
class Phases:
    """Where a Baton server says the time went, seconds."""

    queue_s: float
    ttft_s: float
    e2e_s: float
    transfer_s: float
    transfer_bytes: int


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds: `at_s`, `sent_s` from the run's start, others from `sent_s`.

    `token_times_s` has one time for each message that brought tokens, `token_counts` how many.
    """

    at_s: float  # when it was to be sent
    sent_s: float = 0.0
    planned_prompt: int = 0
    planned_output: int = 0
    status: str = OK
    message: str = ""
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    token_counts: array[int] = field(default_factory=lambda: array("I"))
    ended_s: float = 0.0
    prompt_tokens: int = 0  # as the server counted them
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not tell
    opened_connection: bool = False
    phases: Phases | None = None
    attempts: int = 0  # the router's; 0: not told
    prefilled_by_decode: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ended as it should."""
        return self.status == OK

    @property
    def received_tokens(self) -> int:
        """Tokens in its messages, where messages tell: else messages."""
        return sum(self.token_counts)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None if none came."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token; None if none came."""
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None of fewer than two tokens."""
        if not self.token_times_s or self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive messages with tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    def got(self, tokens: int, now_s: float) -> None:
        """Notes a message with tokens, `now_s` after the request was sent."""
        self.token_times_s.append(now_s)
        self.token_counts.append(tokens)

    def failed(self, status: str, message: str) -> None:
        """Notes how it went wrong."""
        self.status, self.message = status, message

    def to_json(self) -> dict[str, Any]:
        """A line of requests.jsonl."""
        return {
            "at_s": self.at_s,
            "sent_s": self.sent_s,
            "status": self.status,
            "message": self.message,
            "planned_prompt_tokens": self.planned_prompt,
            "planned_output_tokens": self.planned_output,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "token_times_s": [round(time_s, 6) for time_s in self.token_times_s],
            "token_counts": list(self.token_counts),
            "ended_s": self.ended_s,
        }
