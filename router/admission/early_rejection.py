"""Refuses requests that cannot have their first token in time."""

from __future__ import annotations

import math

from baton.errors import Overloaded, Unavailable
from router.fleet.snapshot import Snapshot
from router.placement import scoring
from router.queueing.wait_queue import RETRY_AFTER_S, WaitQueue
from router.request import Demand, TokenizedRequest

# Rates are means and targets are kept at p99: the rest is jitter of steps, updates and calls.
SAFETY = 1.25
# A measured rate may be far from this prompt's, and an idle fleet that refuses never measures
# again: while nothing is queued, only predictions that are wrong by less than this factor refuse.
DOUBT = 4.0


class Late(Overloaded):
    """The first token of a request, or of an earlier one of its tenant, could not come in time."""


def check(
    request: TokenizedRequest, demand: Demand, snapshot: Snapshot, queue: WaitQueue, now: float
) -> float:
    """Returns the predicted seconds to the request's first token; 0 if nothing is known yet.

    Raises Late, with the time until it should fit, if its first token would be late, or if
    its tenant has waiting requests and it would make one of them late. A request that was accepted
    before ends by its deadline only. `now`: time.monotonic().
    """
    limit_s = min(request.deadline - now, request.ttft_target_s or math.inf)
    rate = snapshot.prefill_rate
    drain_rate, tokens_before = queue.drain_rate(rate), queue.tokens_before(request.pending)
    prefill_s, has_room = scoring.predict(snapshot, demand)
    expected_s = (tokens_before / drain_rate if drain_rate else 0.0) + prefill_s
    if drain_rate and (queue.depth or not has_room):  # it waits until room for itself is free, too
        expected_s = max(expected_s, (tokens_before + demand.num_tokens) / drain_rate)
    # Other tenants may still claim their shares: then it is served at its virtual finish time and
    # not earlier. That time is known only if the fleet's rate is.
    fair_s = request.pending.fair_wait_s if rate else 0.0
    safety = SAFETY / DOUBT if queue.depth == 0 and snapshot.has_idle_prefill else SAFETY
    needed_s = max(expected_s, fair_s) * safety
    if request.accepted:
        return expected_s
    slack_s = queue.ttft_slack_s(request.pending, rate, SAFETY)
    excess_s = max(needed_s - limit_s, prefill_s * SAFETY - slack_s)
    if excess_s <= 0:
        return expected_s
    if needed_s > limit_s:
        why = (
            f"the first token is expected in {needed_s:.2f} s and wanted in {limit_s:.2f} s: "
            f"{tokens_before} tokens go first at {drain_rate:.0f} tokens/s, the best pair takes "
            f"{prefill_s:.2f} s, its tenant's fair share gives it {max(0.0, fair_s):.2f} s, "
            f"times {safety:.2f} for safety"
        )
    else:
        why = (
            "the first token of an earlier request of its tenant would be late: that one has "
            f"{slack_s:.2f} s to spare and this one takes {prefill_s * SAFETY:.2f} s"
        )
    shortest, longest = RETRY_AFTER_S
    raise Late(why, min(longest, max(shortest, excess_s)))


def why_refused(
    request: TokenizedRequest, demand: Demand, snapshot: Snapshot, queue: WaitQueue, now: float
) -> str:
    """Why the request could not be placed now, checked in the order of a real request; or empty."""
    try:
        queue.check_room(request.pending.owner)
        check(request, demand, snapshot, queue, now)
        scoring.pick(snapshot, demand)
    except (Overloaded, Unavailable) as error:
        return str(error)
    return f"requests waiting for room: {queue.depth}" if queue.depth else ""
