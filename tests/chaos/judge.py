"""Checks of a chaos run: what each request may get, and the stats. Knows no cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from baton.client import Completion
from baton.errors import Cancelled, DeadlineExceeded, ModelNotFound, Overloaded, Unavailable
from tests.chaos import load
from tests.chaos.load import ChaosRequest, Outcome
from tests.cluster.oracle import LAGS, SLACK_S

DEADLINE_SLACK_S = 10.0  # a passed deadline is reported within this, on a busy machine
MISMATCH = "other tokens than the oracle's"
_LOGPROB_TOLERANCE = 1e-3


def violation(
    request: ChaosRequest,
    outcome: Outcome,
    router_down: bool,
    workers_down: bool,
    model_gone: bool = False,
    excused_s: Callable[[float, float], float] = lambda from_s, until_s: 0.0,
) -> str:
    """What is wrong with how a request ended; empty if nothing is.

    `router_down` and `workers_down` tell whether, while it ran, there was a moment without a
    healthy router, or worker that could serve it. Of a stream over HTTP `router_down` is about
    its own router: killed, where it was cut. `model_gone`: its adapter may not have been loaded.
    `excused_s`: seconds of a pause between two times that faults explain.
    """
    if outcome.end == load.NO_END:
        return "it did not end"
    tokens = tuple(outcome.token_ids)
    if (whole := request.run.answer(tokens)) is None:
        return f"{MISMATCH}: {tokens}"
    if len(tokens) > (most := request.tokens_of(whole)):
        return f"{len(tokens)} tokens, of which the last should be the {most}th"
    if pause := _wrong_pause(outcome, excused_s):
        return pause
    if outcome.completion is not None:
        return _wrong_completion(request, whole, tokens, outcome.completion)
    return _wrong_error(request, outcome, router_down, workers_down, model_gone)


def _wrong_pause(outcome: Outcome, excused_s: Callable[[float, float], float]) -> str:
    slack_s = SLACK_S + LAGS * outcome.lag_s
    for from_s, until_s in pairwise((outcome.began_s, *outcome.times, outcome.ended_s)):
        late = until_s - from_s > slack_s + excused_s(from_s, until_s)
        if late and not isinstance(outcome.error, DeadlineExceeded):  # which is bounded itself
            at_s = from_s - outcome.began_s
            return f"nothing came for {until_s - from_s:.1f} s from {at_s:.1f} s on ({outcome.end})"
    return ""


def _wrong_error(
    request: ChaosRequest, outcome: Outcome, router_down: bool, workers_down: bool, model_gone: bool
) -> str:
    tokens, error, lasted_s = outcome.token_ids, outcome.error, outcome.ended_s - outcome.began_s
    down, hasty = router_down or workers_down, request.timeout_s < load.LONG_TIMEOUT_S
    match error:
        case None:
            allowed = outcome.end == load.CANCELLED
        case DeadlineExceeded():
            late = lasted_s > request.timeout_s + DEADLINE_SLACK_S + LAGS * outcome.lag_s
            # Over HTTP it counts from when the router takes the request, which may have to start.
            late = late and not (request.http and router_down)
            allowed = hasty and not late
        case Overloaded():  # also of one whose first token is expected after its deadline
            allowed = (down or hasty) and not tokens and error.retry_after_s > 0
        case ModelNotFound():
            allowed = model_gone and not tokens
        case Unavailable() if outcome.end not in (load.CUT, load.UNREACHED):
            allowed = down and (outcome.end != load.REFUSED or error.retry_after_s > 0)
        case _:  # CANCELLED is gRPC's status for a call whose server was stopped
            allowed = isinstance(error, (Unavailable, Cancelled)) and router_down
    if allowed:
        return ""
    return f"{type(error).__name__} after {lasted_s:.1f} s and {len(tokens)} tokens: {error}"


def _wrong_completion(
    request: ChaosRequest, whole: Completion, tokens: tuple[int, ...], done: Completion
) -> str:
    count, usage, reason = request.tokens_of(whole), done.usage, "stop" if request.stop else ""
    prompt_tokens = len(request.run.prompt)
    wanted = (reason or "length", request.stop, count, count, prompt_tokens)
    got = (done.finish_reason, done.stop, len(tokens), usage.completion_tokens, usage.prompt_tokens)
    if got != wanted:
        return f"(reason, stop, tokens, usage's tokens, prompt's tokens): {got}, not {wanted}"
    text = request.run.decode(tokens)
    text = text.partition(request.stop)[0] if request.stop else text
    # Of the last character's bytes some may be missing.
    ends = [(done.token_ids, done.text.rstrip("\ufffd")), (tokens, text.rstrip("\ufffd"))]
    if ends[0] != ends[1]:
        return f"other tokens or other text in the end: {ends[0]}, not {ends[1]}"
    if len(done.logprobs) != (request.max_tokens if request.logprobs else 0):
        return f"log-probabilities of {len(done.logprobs)} of {request.max_tokens} tokens"
    for position, (ours, theirs) in enumerate(zip(whole.logprobs, done.logprobs, strict=False)):
        close = abs(ours.logprob - theirs.logprob) < _LOGPROB_TOLERANCE
        if ours.token_id != theirs.token_id or not close:
            return f"at token {position} the oracle has {ours} and the cluster {theirs}"
    return ""


@dataclass
class ChaosStats:
    """Counts of one or several rounds. `violations` is empty exactly when the promise was kept."""

    counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    largest_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    violations: list[str] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        """Adds one request."""
        end = type(outcome.error).__name__ if outcome.end == load.FAILED else outcome.end
        self.counts["requests"][end] += 1
        if outcome.router:
            self.counts["of them over HTTP"][end] += 1
        if outcome.completion is not None:
            attempts = outcome.completion.route.attempts
            self.counts["attempts of those complete"][f"with {attempts or 1}"] += 1
        first_s, *gaps_s = [b - a for a, b in pairwise((outcome.began_s, *outcome.times))] or [0.0]
        for name, seconds in (("gap", gaps_s), ("time to first token", [first_s])):
            self.largest_s[name] = max(self.largest_s[name], *seconds, 0.0)

    def render(self) -> str:
        """The figures, one a line."""
        rows = [
            (name, f"{of.total()} ({', '.join(f'{n} {kind}' for kind, n in of.most_common())})")
            for name, of in self.counts.items()
        ]
        rows += [(f"largest {name}", f"{value:.2f} s") for name, value in self.largest_s.items()]
        rows.append(("violations", f"{len(self.violations)}"))
        return "\n".join(f"  {name:45} {value}" for name, value in rows)
