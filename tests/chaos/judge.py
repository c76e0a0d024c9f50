"""Checks of a chaos run: what each request may get, and the stats. Knows no cluster."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from baton.client import Completion
from baton.errors import Cancelled, DeadlineExceeded, ModelNotFound, Overloaded, Unavailable
from tests.chaos import load
from tests.chaos.load import ChaosRequest, Outcome
from tests.cluster.oracle import LAGS

DEADLINE_SLACK_S = 10.0  # a passed deadline is reported within this, on a busy machine
MISMATCH = "other tokens than the oracle's"
_LOGPROB_TOLERANCE = 1e-3


def violation(
    request: ChaosRequest,
    outcome: Outcome,
    router_down: bool,
    role_down: bool,
    model_gone: bool = False,
) -> str:
    """What is wrong with how a request ended; empty if nothing is.

    `router_down` and `role_down` tell whether, while it ran, there was a moment without a healthy
    router, or without a healthy worker of some role. Of a stream over HTTP `router_down` is about
    its own router: killed, where it was cut. `model_gone`: its adapter may not have been loaded.
    """
    if outcome.end == load.NO_END:
        return "it did not end"
    tokens = tuple(outcome.token_ids)
    if (whole := request.run.answer(tokens)) is None:
        return f"{MISMATCH}: {tokens}"
    if outcome.completion is not None:
        return _wrong_completion(request, whole, outcome.completion)
    error, lasted_s = outcome.error, outcome.ended_s - outcome.began_s
    match error:
        case None:
            allowed = True
        case DeadlineExceeded():
            late = lasted_s > request.timeout_s + DEADLINE_SLACK_S + LAGS * outcome.lag_s
            # Over HTTP it counts from when the router takes the request, which may have to start.
            late = late and not (request.http and router_down)
            allowed = request.timeout_s < load.LONG_TIMEOUT_S and not late
        case Overloaded():
            allowed = not tokens and error.retry_after_s > 0
        case Unavailable() if outcome.end == load.REFUSED:
            allowed = error.retry_after_s > 0
        case ModelNotFound():
            allowed = model_gone and not tokens
        case Unavailable() if outcome.end not in (load.CUT, load.UNREACHED):
            allowed = router_down or role_down
        case _:  # CANCELLED is gRPC's status for a call whose server was stopped
            allowed = isinstance(error, (Unavailable, Cancelled)) and router_down
    if allowed:
        return ""
    return f"{type(error).__name__} after {lasted_s:.1f} s and {len(tokens)} tokens: {error}"


def _wrong_completion(request: ChaosRequest, whole: Completion, done: Completion) -> str:
    if request.stop:
        wanted: tuple[Any, ...] = ("stop", request.stop, whole.text.partition(request.stop)[0])
        got: tuple[Any, ...] = (done.finish_reason, done.stop, done.text)
        return "" if got == wanted else f"(reason, stop, text): {got}, not {wanted}"
    usage = done.usage
    prompt_tokens = len(request.run.prompt)
    wanted = ("length", request.max_tokens, request.max_tokens, prompt_tokens)
    got = (done.finish_reason, len(done.token_ids), usage.completion_tokens, usage.prompt_tokens)
    if got != wanted:
        return f"(reason, tokens, usage's tokens, prompt's tokens): {got}, not {wanted}"
    if not whole.text.startswith(done.text.rstrip("\ufffd")):
        return f"other text than the oracle's: {done.text!r}"
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

    def count(self, outcome: Outcome, excused: bool) -> None:
        """Adds one request; `excused` if a router or a whole role was down while it ran."""
        end = type(outcome.error).__name__ if outcome.end == load.FAILED else outcome.end
        self.counts["requests"][end] += 1
        if outcome.router:
            self.counts["of them over HTTP"][end] += 1
        if outcome.completion is not None:
            attempts = outcome.completion.route.attempts
            self.counts["attempts of those complete"][f"with {attempts or 1}"] += 1
        gap = "gap while a router or a role was down" if excused else "gap"
        first_s = [outcome.times[0] - outcome.began_s] if outcome.times else []
        for name, seconds in (
            (gap, [b - a for a, b in pairwise(outcome.times)]),
            ("time to first token", first_s),
        ):
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
