"""Refuses at once what cannot have its first token in time."""

from __future__ import annotations

import math
import statistics

from baton.errors import Overloaded
from router.admission.wait_queue import RETRY_AFTER_S, WaitQueue
from router.dispatch.request_state import TokenizedRequest
from router.fleet.snapshot import Snapshot
from router.placement import placement
from router.placement.cost_model import PlacementRequest

# Rates are means and targets are kept at p99: the rest is jitter of steps, updates and calls.
SAFETY = 1.25
# A measured rate may be far from what this prompt will see, and an idle fleet that refuses never
# measures again: while nothing is queued, a prediction counts only if it is wrong beyond doubt.
DOUBT = 4.0


def first_token_by(request: TokenizedRequest, started: float) -> float:
    """When a request that came at `started` must have its first token (time.monotonic()).

    One that resumes another stream has had its first token.
    """
    target_s = 0.0 if request.resumed else request.ttft_target_s
    return min(request.deadline, started + (target_s or math.inf))


def prefill_rate(snapshot: Snapshot) -> float:
    """Tokens a second that the ready prefill workers compute together; 0 when not measured yet.

    A worker without a measurement counts as the mean of the others.
    """
    rates = [worker.load.prefill_tokens_per_s for worker in snapshot.prefill if worker.ready]
    known = [rate for rate in rates if rate > 0]
    return statistics.fmean(known) * len(rates) if known else 0.0


def check(
    request: TokenizedRequest,
    snapshot: Snapshot,
    queue: WaitQueue,
    now: float,
    needs: PlacementRequest | None = None,
) -> float:
    """The predicted seconds to the first token of `request`; 0 where nothing is known yet.

    Raises Overloaded, with the time by which it is expected to fit, if it cannot make it: if its
    own first token would be late, or if its tenant has requests waiting already and it would make
    an admitted one of them late. `needs` saves hashing the prompt again where the caller has it.
    """
    limit_s = first_token_by(request, now) - now
    rate = prefill_rate(snapshot)
    needs = needs or PlacementRequest(
        (*request.prompt, *request.resumed),
        request.virtual_finish,
        request.cache_salt,
        request.params.max_tokens,
    )
    drain_rate, before = queue.drain_rate(rate), queue.tokens_before(request.virtual_finish)
    own_s = placement.predicted_ttft_s(snapshot, needs)
    expected_s = (before / drain_rate if drain_rate else 0.0) + own_s
    # It waits for room of its own, too.
    if drain_rate and (queue.depth or not placement.has_room(snapshot, needs)):
        expected_s = max(expected_s, (before + needs.num_tokens) / drain_rate)
    # Other tenants may yet come for their share: then it is served at its virtual finish and no
    # earlier. Virtual finish times are times only where the rate behind them is known.
    fair_s = request.virtual_finish - now if rate else 0.0
    idle = any(worker.ready and not worker.queue_tokens for worker in snapshot.prefill)
    safety = SAFETY / DOUBT if queue.depth == 0 and idle else SAFETY
    needed_s = max(expected_s, fair_s) * safety
    slack_s = math.inf
    if not request.resumed:
        slack_s = queue.slack_s(request.virtual_finish, request.tenant, rate, SAFETY)
    late_s = max(needed_s - limit_s, own_s * SAFETY - slack_s)
    if late_s <= 0:
        return expected_s
    if needed_s > limit_s:
        why = (
            f"the first token is expected in {needed_s:.2f} s and wanted in {limit_s:.2f} s: "
            f"{before} tokens go first at {drain_rate:.0f} tokens/s, the best pair takes "
            f"{own_s:.2f} s, its tenant's fair share gives it {max(0.0, fair_s):.2f} s, "
            f"times {safety:.2f} for safety"
        )
    else:
        why = (
            f"the first token of an earlier request of its tenant would be late: that one has "
            f"{slack_s:.2f} s to spare and this one takes {own_s * SAFETY:.2f} s"
        )
    shortest, longest = RETRY_AFTER_S
    raise Overloaded(why, min(longest, max(shortest, late_s)))
