"""What is asked of a cluster under chaos, and what it must answer: the oracle's, or a status.

A few long runs of the oracle are enough: each request wants the first tokens of one of them, up to
a number or a stop string. Knows no cluster.
"""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.client import Completion, TokenLogprobs
from baton.config import EngineConfig
from baton.errors import BatonError, Cancelled, DeadlineExceeded, Overloaded, Unavailable
from baton.local.single import SingleProcess
from baton.sampling import SamplingParams

LENGTHS = (1, 15, 17, 40, 90, 200, 450, 1500)
SAMPLING: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "seed": 1234},
    {"temperature": 0.0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
)
PATIENT_S = 90.0  # nobody may need this long
PROMPTNESS_S = 10.0  # a passed deadline is told within this, on a machine that has much to do
MISMATCH = "other tokens than the oracle's"
HTTP_SHARE = 0.4  # of requests that ask for no log-probabilities
# How a stream over HTTP fails: a status that is an error; no answer at all; its connection ends
# after the first byte, but before its last event; an event tells the error.
REFUSED, UNREACHED, CUT, TOLD = "refused", "not reached", "cut", "ended by an error event"
_LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Run:
    """One run of the oracle: what every request for its first tokens must get."""

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    whole: Completion


@dataclass(frozen=True)
class Wish:
    """One request: the first `max_tokens` of a run, or less if `stop` is met.

    `cancel_after` tokens the caller gives it up. With a `timeout_s` below PATIENT_S it may end with
    DEADLINE_EXCEEDED. With `http` it is a stream of one router's gateway, which nobody resumes.
    """

    run: Run
    max_tokens: int
    salt: str = ""
    stop: str = ""
    logprobs: bool = False
    cancel_after: int | None = None
    timeout_s: float = PATIENT_S
    http: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """For the SDK."""
        return {
            **self.run.sampling,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "cache_salt": self.salt,
            "timeout": self.timeout_s,
            **({"stop": self.stop} if self.stop else {}),
            **({"logprobs": 1} if self.logprobs else {}),
        }

    @property
    def body(self) -> dict[str, Any]:
        """For `POST /v1/completions`."""
        options = {key: value for key, value in self.options.items() if key != "timeout"}
        return {
            **options,
            "prompt": list(self.run.prompt),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    @property
    def impatient(self) -> bool:
        """Whether its deadline may well pass."""
        return self.timeout_s < PATIENT_S


@dataclass(frozen=True)
class Ending:
    """How a request ended: with a completion, an error, by its caller, or (not `over`) never.

    `token_ids` are those that were delivered, whatever came then. Times are of the loop's clock.
    """

    token_ids: tuple[int, ...]
    began_s: float
    ended_s: float
    ttft_s: float = 0.0
    largest_gap_s: float = 0.0
    completion: Completion | None = None
    error: BatonError | None = None
    cancelled: bool = False
    over: bool = True
    router: str = ""  # whose gateway was asked; empty for the SDK, which asks any
    broke: str = ""  # how a stream of the gateway's failed: one of REFUSED, UNREACHED, CUT, TOLD

    @property
    def status(self) -> str:
        """For the tally."""
        if not self.over:
            return "NO END"
        if self.cancelled:
            return "cancelled by us"
        return "complete" if self.error is None else type(self.error).__name__


def oracle_runs(new_tokens: int, lengths: Sequence[int] = LENGTHS) -> list[Run]:
    """Runs the oracle once for each length, each second one after the same beginning."""
    runs = []
    with SingleProcess(EngineConfig(dtype="float32", threads=1, kv_cache_bytes=64 << 20)) as oracle:
        source = oracle.tokenizer.encode(inspect.getsource(ast) * 2)
        for i, length in enumerate(lengths):
            start = 0 if i % 2 else 7 * length
            sampling = SAMPLING[i % len(SAMPLING)]
            prompt = tuple(source[start : start + length])
            params = SamplingParams(**sampling, max_tokens=new_tokens, ignore_eos=True, logprobs=1)
            runs.append(Run(prompt, sampling, oracle.generate(prompt, params)))
    return runs


def wish(dice: random.Random, runs: Sequence[Run]) -> Wish:
    """The next request of a caller, whatever comes."""
    made = _wish(dice, runs)
    return replace(made, http=not made.logprobs and dice.random() < HTTP_SHARE)


def _wish(dice: random.Random, runs: Sequence[Run]) -> Wish:
    run = dice.choice(runs)
    most = len(run.whole.token_ids)
    max_tokens = dice.randint(1, most)
    salt = f"{dice.randrange(4)}"
    kind = dice.random()
    if kind < 0.10:
        return Wish(run, max_tokens, salt, timeout_s=dice.uniform(0.02, 1.5))
    if kind < 0.25:
        return Wish(run, max_tokens, salt, cancel_after=dice.randint(0, most // 2))
    if kind < 0.40 and (stop := _some_stop(dice, run)):
        return Wish(run, most, salt, stop=stop)
    return Wish(run, max_tokens, salt, logprobs=dice.random() < 0.3)


def complaint(wish: Wish, ending: Ending, router_hurt: bool, role_down: bool) -> str:
    """What is wrong with how a request ended; empty if nothing is.

    `router_hurt` and `role_down` tell whether, while it ran, there was a moment without a healthy
    router, or without a healthy worker of some role. Of a stream over HTTP `router_hurt` is about
    its own router: killed, where it was cut.
    """
    if not ending.over:
        return "it did not end"
    tokens = ending.token_ids
    if tokens != wish.run.whole.token_ids[: len(tokens)]:
        return f"{MISMATCH}: {tokens}"
    if ending.error is not None:
        return _complaint_of_error(wish, ending, ending.error, router_hurt, role_down)
    return _complaint_of_whole(wish, ending.completion) if ending.completion else ""


def _complaint_of_error(
    wish: Wish, ending: Ending, error: BatonError, router_hurt: bool, role_down: bool
) -> str:
    lasted_s = ending.ended_s - ending.began_s
    count = len(ending.token_ids)
    said = f"{type(error).__name__} after {lasted_s:.1f} s and {count} tokens: {error}"
    if isinstance(error, DeadlineExceeded):
        late = lasted_s > wish.timeout_s + PROMPTNESS_S
        return said if late or not wish.impatient else ""
    if isinstance(error, Overloaded):
        return said if count or error.retry_after_s <= 0 else ""
    if isinstance(error, Unavailable):
        return "" if _is_excused(ending, error, router_hurt, role_down) else said
    if isinstance(error, Cancelled) and router_hurt:
        return ""  # gRPC's word for a call whose server was stopped
    return said


def _is_excused(ending: Ending, error: Unavailable, router_hurt: bool, role_down: bool) -> bool:
    if ending.broke in (CUT, UNREACHED):
        return router_hurt
    if ending.broke == REFUSED:
        return error.retry_after_s > 0
    return router_hurt or role_down


def _complaint_of_whole(wish: Wish, done: Completion) -> str:
    if wish.stop:
        return _complaint_of_stop(wish, done)
    wanted = ("length", wish.max_tokens, wish.max_tokens, len(wish.run.prompt))
    usage = done.usage
    got = (
        done.finish_reason,
        len(done.token_ids),
        usage.completion_tokens,
        usage.prompt_tokens,
    )
    if got != wanted:
        return f"(reason, tokens, usage's tokens, prompt's tokens): {got}, not {wanted}"
    if not wish.run.whole.text.startswith(done.text.rstrip("\ufffd")):
        return f"other text than the oracle's: {done.text!r}"
    return _complaint_of_logprobs(wish, done)


def _complaint_of_stop(wish: Wish, done: Completion) -> str:
    text = wish.run.whole.text
    wanted = ("stop", wish.stop, text[: text.index(wish.stop)])
    got = (done.finish_reason, done.stop, done.text)
    return "" if got == wanted else f"(reason, stop, text): {got}, not {wanted}"


def _complaint_of_logprobs(wish: Wish, done: Completion) -> str:
    if not wish.logprobs:
        return f"{len(done.logprobs)} log-probabilities, unasked" if done.logprobs else ""
    if len(done.logprobs) != wish.max_tokens:
        return f"log-probabilities of {len(done.logprobs)} of {wish.max_tokens} tokens"
    for position, (ours, theirs) in enumerate(
        zip(wish.run.whole.logprobs, done.logprobs, strict=False)
    ):
        if not _same(ours, theirs):
            return f"at token {position} the oracle has {ours} and the cluster {theirs}"
    return ""


def _same(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    close = abs(one.logprob - other.logprob) < _LOGPROB_TOLERANCE
    return one.token_id == other.token_id and close


def _some_stop(dice: random.Random, run: Run) -> str:
    """A few characters out of the middle of what the oracle wrote; empty if it wrote too little."""
    text = run.whole.text
    if len(text) < 20 or "\ufffd" in text:
        return ""
    start = dice.randrange(4, len(text) - 6)
    return text[start : start + dice.randint(2, 6)]
