"""Requests of a chaos run, what each must get (the oracle's tokens, or a status), and their stats.

A few long runs of the oracle are enough: each request wants the first tokens of one of them, up to
a number or a stop string. Knows no cluster.
"""

from __future__ import annotations

import ast
import inspect
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
LONG_TIMEOUT_S = 90.0  # no request may need this long
DEADLINE_SLACK_S = 10.0  # a passed deadline is reported within this, on a busy machine
MISMATCH = "other tokens than the oracle's"
HTTP_SHARE = 0.4  # of requests that ask for no log-probabilities
# How a stream over HTTP fails: a status that is an error; no answer at all; its connection ends
# after the first byte, but before its last event; an event tells the error.
REFUSED, UNREACHED, CUT, ERROR_EVENT = "refused", "not reached", "cut", "ended by an error event"
_LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Run:
    """One run of the oracle: what every request for its first tokens must get."""

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    whole: Completion


@dataclass(frozen=True)
class ChaosRequest:
    """One request: the first `max_tokens` of a run, or less if `stop` is met.

    Cancelled after `cancel_after` tokens. With a `timeout_s` under LONG_TIMEOUT_S it may
    end with DEADLINE_EXCEEDED. With `http` it is a stream of one router's gateway, not resumed.
    """

    run: Run
    max_tokens: int
    salt: str = ""
    stop: str = ""
    logprobs: bool = False
    cancel_after: int | None = None
    timeout_s: float = LONG_TIMEOUT_S
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
    def has_short_deadline(self) -> bool:
        """Whether its deadline may well pass."""
        return self.timeout_s < LONG_TIMEOUT_S


@dataclass(frozen=True)
class Outcome:
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
    router: str = ""  # of the gateway; empty for the SDK, which uses any
    failure: str = ""  # how a stream over HTTP failed: one of REFUSED, UNREACHED, CUT, ERROR_EVENT

    @property
    def status(self) -> str:
        """For the stats."""
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


def next_request(dice: random.Random, runs: Sequence[Run]) -> ChaosRequest:
    """The next request of a caller."""
    made = _request(dice, runs)
    return replace(made, http=not made.logprobs and dice.random() < HTTP_SHARE)


def _request(dice: random.Random, runs: Sequence[Run]) -> ChaosRequest:
    run = dice.choice(runs)
    most = len(run.whole.token_ids)
    max_tokens = dice.randint(1, most)
    salt = f"{dice.randrange(4)}"
    kind = dice.random()
    if kind < 0.10:
        return ChaosRequest(run, max_tokens, salt, timeout_s=dice.uniform(0.02, 1.5))
    if kind < 0.25:
        return ChaosRequest(run, max_tokens, salt, cancel_after=dice.randint(0, most // 2))
    if kind < 0.40 and (stop := _some_stop(dice, run)):
        return ChaosRequest(run, most, salt, stop=stop)
    return ChaosRequest(run, max_tokens, salt, logprobs=dice.random() < 0.3)


def violation(request: ChaosRequest, outcome: Outcome, router_down: bool, role_down: bool) -> str:
    """What is wrong with how a request ended; empty if nothing is.

    `router_down` and `role_down` tell whether, while it ran, there was a moment without a healthy
    router, or without a healthy worker of some role. Of a stream over HTTP `router_down` is about
    its own router: killed, where it was cut.
    """
    if not outcome.over:
        return "it did not end"
    tokens = outcome.token_ids
    if tokens != request.run.whole.token_ids[: len(tokens)]:
        return f"{MISMATCH}: {tokens}"
    if outcome.error is not None:
        return _violation_of_error(request, outcome, outcome.error, router_down, role_down)
    return _violation_of_whole(request, outcome.completion) if outcome.completion else ""


def _violation_of_error(
    request: ChaosRequest, outcome: Outcome, error: BatonError, router_down: bool, role_down: bool
) -> str:
    lasted_s = outcome.ended_s - outcome.began_s
    count = len(outcome.token_ids)
    said = f"{type(error).__name__} after {lasted_s:.1f} s and {count} tokens: {error}"
    if isinstance(error, DeadlineExceeded):
        late = lasted_s > request.timeout_s + DEADLINE_SLACK_S
        return said if late or not request.has_short_deadline else ""
    if isinstance(error, Overloaded):
        return said if count or error.retry_after_s <= 0 else ""
    if isinstance(error, Unavailable):
        return "" if _is_expected(outcome, error, router_down, role_down) else said
    if isinstance(error, Cancelled) and router_down:
        return ""  # gRPC's status for a call whose server was stopped
    return said


def _is_expected(outcome: Outcome, error: Unavailable, router_down: bool, role_down: bool) -> bool:
    if outcome.failure in (CUT, UNREACHED):
        return router_down
    if outcome.failure == REFUSED:
        return error.retry_after_s > 0
    return router_down or role_down


def _violation_of_whole(request: ChaosRequest, done: Completion) -> str:
    run = request.run
    if request.stop:
        wanted: tuple[Any, ...] = ("stop", request.stop, run.whole.text.partition(request.stop)[0])
        got: tuple[Any, ...] = (done.finish_reason, done.stop, done.text)
        return "" if got == wanted else f"(reason, stop, text): {got}, not {wanted}"
    usage = done.usage
    wanted = ("length", request.max_tokens, request.max_tokens, len(run.prompt))
    got = (done.finish_reason, len(done.token_ids), usage.completion_tokens, usage.prompt_tokens)
    if got != wanted:
        return f"(reason, tokens, usage's tokens, prompt's tokens): {got}, not {wanted}"
    if not run.whole.text.startswith(done.text.rstrip("\ufffd")):
        return f"other text than the oracle's: {done.text!r}"
    if len(done.logprobs) != (request.max_tokens if request.logprobs else 0):
        return f"log-probabilities of {len(done.logprobs)} of {request.max_tokens} tokens"
    for position, (ours, theirs) in enumerate(zip(run.whole.logprobs, done.logprobs, strict=False)):
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


@dataclass
class ChaosStats:
    """Counts of one or several rounds. `violations` is empty exactly when the promise was kept."""

    faults: Counter[str] = field(default_factory=Counter)
    kv_faults: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    http: Counter[str] = field(default_factory=Counter)  # of the outcomes, streams over HTTP
    failovers: int = 0
    mismatches: int = 0
    endless: int = 0
    busy_workers: int = 0
    traces: int = 0
    torn_traces: int = 0
    excused_traces: int = 0
    largest_gap_s: float = 0.0
    largest_excused_gap_s: float = 0.0
    largest_ttft_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that were asked."""
        return self.outcomes.total()

    def count(self, outcome: Outcome, violation: str, excused: bool) -> None:
        """Adds one request; `excused` if a router or a whole role was down while it ran."""
        self.outcomes[outcome.status] += 1
        if outcome.router:
            self.http[outcome.failure or outcome.status] += 1
        self.endless += not outcome.over
        self.mismatches += violation.startswith(MISMATCH)
        if outcome.completion is not None and outcome.completion.route.attempts > 1:
            self.failovers += 1
        if excused:
            longest_s = max(self.largest_excused_gap_s, outcome.largest_gap_s)
            self.largest_excused_gap_s = longest_s
        else:
            self.largest_gap_s = max(self.largest_gap_s, outcome.largest_gap_s)
        self.largest_ttft_s = max(self.largest_ttft_s, outcome.ttft_s)

    def render(self) -> str:
        """The figures, one a line."""
        rows: list[tuple[str, object]] = [
            ("faults", f"{self.faults.total()} ({_listed(self.faults)}), {self.skipped} skipped"),
            ("faulty KV transfers", f"{self.kv_faults.total()} ({_listed(self.kv_faults)})"),
            ("requests", f"{self.requests} ({_listed(self.outcomes)})"),
            ("of them over HTTP", f"{self.http.total()} ({_listed(self.http)})"),
            ("failovers", f"{self.failovers} requests completed after more than one attempt"),
            ("mismatches", self.mismatches),
            ("requests without an end", self.endless),
            ("workers with blocks leaked", self.busy_workers),
            ("traces", f"{self.traces}, torn {self.torn_traces}"
             f" (and {self.excused_traces} around a kill)"),
            ("largest gap", f"{self.largest_gap_s:.2f} s"
             f" (a router or a role down: {self.largest_excused_gap_s:.2f} s)"),
            ("largest time to first token", f"{self.largest_ttft_s:.2f} s"),
            ("violations", len(self.violations)),
        ]  # fmt: skip
        return "\n".join(f"  {name:28} {value}" for name, value in rows)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"
