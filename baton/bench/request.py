"""One request of a run: what is sent and when (`Demand`), and what its client saw (`Outcome`).

Prompts are given by seeds, so that a long run needs little memory.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from baton.config import options
from baton.config.options import option
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.v1.inference_pb2 import Finish

_FORMS = ("ids", "text", "chat")
OK = "OK"
INTERRUPTED = "INTERRUPTED"  # cancelled by the generator, when the run was ended early


def _ids(text: str) -> range:
    first, _, end = text.partition("-")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise ConfigError(f"{text} is no range: write FIRST-END, as in 1000-4000")
    return range(int(first), int(end))


@dataclass(frozen=True)
class RequestOptions:
    """How requests to a server are built."""

    GROUP: ClassVar[str] = "requests"
    model: str = ""  # empty: the first one it lists
    api_key: str | None = None
    ttft_target_ms: int = 0  # over gRPC; 0: the router's
    stream: bool = True  # over HTTP
    prompt_form: str = option(
        "ids", "--prompt-as", "form of prompts; text and chat have as many words", choices=_FORMS
    )
    ids: range = option(
        range(1000, 4000), "--ids FIRST-END", "token ids in prompts (default: 1000-4000)", _ids
    )
    stop_at_eos: bool = option(False, "--stop-at-eos", "do not send ignore_eos")
    timeout_s: float = option(120.0, "--timeout S", "of a request", least=0.001, most=1e6)
    keep_alive: bool = option(True, "--keep-alive", "reuse HTTP connections")

    def __post_init__(self) -> None:
        options.check(self)


@dataclass(frozen=True, slots=True)
class Demand:
    """A request to send. Prompts that begin with equal parts share these tokens."""

    at_s: float  # after the start of the run
    parts: tuple[tuple[int, int], ...]  # (seed, tokens) each
    new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(length for _, length in self.parts)

    def prompt(self, ids: range) -> list[int]:
        prompt: list[int] = []
        first, span = ids.start, len(ids)
        for seed, length in self.parts:
            # Four bytes a token: a part is a prefix of longer ones with the same seed.
            words = array("I", random.Random(seed).randbytes(length * 4))  # noqa: S311
            prompt += [word % span + first for word in words]
        return prompt


def text_of(ids: Sequence[int]) -> str:
    """A text of about as many tokens: one short word for each id."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in ids)


# Common English words, one token each in most vocabularies.
_TEXT = (
    "the of and to in is was for on that with as his they be at one have this from or had by hot "
    "but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make"
)
_WORDS = _TEXT.split()


@dataclass(slots=True)
class Outcome:
    """The outcome of a request. `at_s` and `sent_s` are seconds from the run's start, others from
    `sent_s`.

    `token_times_s` has the time of each message with tokens, `token_counts` their number.
    """

    at_s: float  # when it was due: in a closed loop, at the end of the previous request
    sent_s: float = 0.0
    planned_prompt_tokens: int = 0
    planned_output_tokens: int = 0
    status: str = OK
    message: str = ""
    retry_after_s: float = 0.0  # Retry-After of a refusal; 0: none
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    token_counts: array[int] = field(default_factory=lambda: array("I"))
    ended_s: float = 0.0
    prompt_tokens: int = 0  # as the server counted them
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report it
    opened_connection: bool = False
    finish: Finish | None = None  # a Baton router's last message

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without tokens."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token; None without tokens."""
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens or messages."""
        if len(self.token_times_s) < 2 or self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    def add_tokens(self, tokens: int, now_s: float) -> None:
        """Records a message with tokens, `now_s` after the request was sent."""
        self.token_times_s.append(now_s)
        self.token_counts.append(tokens)

    def fail(self, status: str, message: str) -> None:
        self.status, self.message = status, message
