"""Whether a request can have its first token in time; what cannot is refused at once."""

from __future__ import annotations

import math
import statistics

from baton.errors import Overloaded
from router.admission.wait_queue import RETRY_AFTER_S, Line
from router.dispatch.request_state import Ask
from router.fleet.snapshot import Snapshot
from router.placement import placement
from router.placement.placement_request import Wants

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


def check(
    ask: Ask, snapshot: Snapshot, line: Line, now: float, wants: Wants | None = None
) -> float:
    """The predicted seconds to the first token of `ask`; 0 where nothing is known yet.

    Raises Overloaded, with the time by which it is expected to fit, if it cannot make it: if its
    own first token would be late, or if its tenant has requests waiting already and it made one
    late that was promised before. `wants` saves hashing the prompt again where the caller has one.
    """
    limit_s = promised(ask, now) - now
    rate = prefill_rate(snapshot)
    known = (*ask.prompt, *ask.resumed)
    wants = wants or Wants(known, ask.due, ask.cache_salt, ask.params.max_tokens)
    drain_rate, before = line.drain_rate(rate), line.tokens_before(ask.due)
    own_s = placement.predicted_ttft_s(snapshot, wants)
    expected_s = (before / drain_rate if drain_rate else 0.0) + own_s
    # It waits for room of its own, too.
    if drain_rate and (line.depth or not placement.has_room(snapshot, wants)):
        expected_s = max(expected_s, (before + wants.num_tokens) / drain_rate)
    # Others may yet come for their share: then it is served when its turn ends, and no earlier.
    # Dues are times only where the rate that they were made of is known.
    turn_s = ask.due - now if rate else 0.0
    safety = SAFETY / DOUBT if line.depth == 0 and _idle(snapshot) else SAFETY
    needed_s = max(expected_s, turn_s) * safety
    slack_s = math.inf if ask.resumed else line.slack_s(ask.due, ask.tenant, rate, SAFETY)
    late_s = max(needed_s - limit_s, own_s * SAFETY - slack_s)
    if late_s <= 0:
        return expected_s
    if needed_s > limit_s:
        why = (
            f"the first token is expected in {needed_s:.2f} s and wanted in {limit_s:.2f} s: "
            f"{before} tokens go first at {drain_rate:.0f} tokens/s, the best pair takes "
            f"{own_s:.2f} s, its tenant's turn ends in {max(0.0, turn_s):.2f} s, "
            f"times {safety:.2f} for safety"
        )
    else:
        why = (
            f"the first token of an earlier request of its tenant would be late: that one has "
            f"{slack_s:.2f} s to spare and this one takes {own_s * SAFETY:.2f} s"
        )
    shortest, longest = RETRY_AFTER_S
    raise Overloaded(why, min(longest, max(shortest, late_s)))


def _idle(snapshot: Snapshot) -> bool:
    """Whether a ready prefill worker has nothing to do."""
    return any(worker.ready and not worker.queue_tokens for worker in snapshot.prefill)
