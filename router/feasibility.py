"""Whether a request can have its first token in time; what cannot is refused at once."""

from __future__ import annotations

import math
import statistics

from baton.errors import Overloaded
from router import placement
from router.line import RETRY_AFTER_S, Line
from router.snapshot import Snapshot
from router.story import Ask
from router.wants import Wants

# Rates are means and promises are kept at p99: the rest is jitter of steps, news and calls.
SAFETY = 1.25
# A measured rate may be far from what this prompt will see, and an idle fleet that refuses never
# measures again: while nobody is in front, a prediction counts only if it is wrong beyond doubt.
DOUBT = 4.0


def promised(ask: Ask, started: float) -> float:
    """By when a request that came at `started` is to have its first token (time.monotonic()).

    One that goes on behind another stream has had its first token.
    """
    target_s = 0.0 if ask.resumed else ask.ttft_target_s
    return min(ask.deadline, started + (target_s or math.inf))


def prefill_rate(snapshot: Snapshot) -> float:
    """Tokens a second that the ready prefill workers compute together; 0 when not measured yet.

    One that has measured nothing counts as much as the others do on average.
    """
    rates = [worker.load.prefill_tokens_per_s for worker in snapshot.prefill if worker.ready]
    known = [rate for rate in rates if rate > 0]
    return statistics.fmean(known) * len(rates) if known else 0.0


def check(ask: Ask, snapshot: Snapshot, line: Line, now: float, wants: Wants | None = None) -> None:
    """Raises Overloaded, with the time by which `ask` is expected to fit, if it cannot make it.

    It cannot if its own first token would be late, or if its tenant has requests waiting already
    and it made one late that was promised before. `wants` saves hashing the prompt again where the
    caller has one already.
    """
    limit_s = promised(ask, now) - now
    rate = prefill_rate(snapshot)
    known = (*ask.prompt, *ask.resumed)
    wants = wants or Wants(known, ask.due, ask.cache_salt, ask.params.max_tokens)
    wait_s = line.wait_s(ask.due, rate)
    own_s = placement.predicted_ttft_s(snapshot, wants)
    # Others may yet come for their share: then it is served by its due, and no earlier.
    needed_s = max(wait_s + own_s, ask.due - now) * SAFETY
    if line.depth == 0 and _idle(snapshot):
        needed_s /= DOUBT
    slack_s = math.inf if ask.resumed else line.slack_s(ask.due, ask.tenant, rate, SAFETY)
    late_s = max(needed_s - limit_s, own_s * SAFETY - slack_s)
    if late_s > 0:
        shortest, longest = RETRY_AFTER_S
        raise Overloaded(
            f"the first token is expected in {wait_s + own_s:.2f} s, in {wait_s:.2f} s of them "
            f"others go first; it was wanted in {limit_s:.2f} s",
            min(longest, max(shortest, late_s)),
        )


def _idle(snapshot: Snapshot) -> bool:
    """Whether a ready prefill worker has nothing to do."""
    return any(worker.ready and not worker.queue_tokens for worker in snapshot.prefill)
