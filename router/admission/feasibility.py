"""Refuses at once what cannot have its first token in time; explains where a request would run."""

from __future__ import annotations

import math

from baton.errors import Overloaded, Unavailable
from baton.v1 import fleet_pb2
from router.admission.wait_queue import RETRY_AFTER_S, WaitQueue
from router.dispatch.request_state import TokenizedRequest
from router.fleet.snapshot import Snapshot
from router.placement import placement
from router.placement.cost_model import PlacementRequest
from router.placement.placement import Pair

# Rates are means and targets are kept at p99: the rest is jitter of steps, updates and calls.
SAFETY = 1.25
# A measured rate may be far from what this prompt will see, and an idle fleet that refuses never
# measures again: while nothing is queued, a prediction counts only if it is wrong beyond doubt.
DOUBT = 4.0


def check(
    request: TokenizedRequest,
    needs: PlacementRequest,
    snapshot: Snapshot,
    queue: WaitQueue,
    now: float,
) -> float:
    """The predicted seconds to the first token of `request`; 0 where nothing is known yet.

    Raises Overloaded, with the time by which it is expected to fit, if it cannot make it: if its
    own first token would be late, or if its tenant has requests waiting already and it would make
    an admitted one of them late. One that was accepted before ends by its deadline alone.
    `now` is time.monotonic().
    """
    limit_s = min(request.deadline - now, request.ttft_target_s or math.inf)
    rate = snapshot.prefill_rate
    drain_rate, before = queue.drain_rate(rate), queue.tokens_before(request.pending)
    own_s, has_room = placement.predict(snapshot, needs)
    expected_s = (before / drain_rate if drain_rate else 0.0) + own_s
    if drain_rate and (queue.depth or not has_room):  # it waits for room of its own, too
        expected_s = max(expected_s, (before + needs.num_tokens) / drain_rate)
    # Other tenants may yet come for their share: then it is served at its virtual finish and no
    # earlier. When that is can be said only where the rate behind it is known.
    fair_s = request.pending.fair_s if rate else 0.0
    idle = any(row.ready and not row.queued_tokens for row in snapshot.prefill_rows)
    safety = SAFETY / DOUBT if queue.depth == 0 and idle else SAFETY
    needed_s = max(expected_s, fair_s) * safety
    if request.accepted:
        return expected_s
    slack_s = queue.slack_s(request.pending, rate, SAFETY)
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


def explain(
    request: TokenizedRequest,
    needs: PlacementRequest,
    snapshot: Snapshot,
    queue: WaitQueue,
    now: float,
) -> fleet_pb2.ExplainResponse:
    """Where the request would run now: every pair with its numbers, and what keeps it from that."""
    refused = f"requests waiting for room: {queue.depth}" if queue.depth else ""
    try:  # in the order in which a real request would meet them
        queue.check_room(request.pending.flow)
        check(request, needs, snapshot, queue, now)
        placement.pick(snapshot, needs)
    except (Overloaded, Unavailable) as error:
        refused = str(error)
    pairs = placement.rank_all(snapshot, needs)
    return fleet_pb2.ExplainResponse(
        candidates=map(_candidate, pairs),
        refused=refused,
        decode_prefills=any(pair.decode_prefills for pair in pairs[:1] if not pair.refused),
        prompt_tokens=len(request.prompt),
        tenant=request.tenant,
        queued=queue.depth,
    )


def _candidate(pair: Pair) -> fleet_pb2.Candidate:
    prefill, decode = pair.names
    if pair.alone:
        prefill, decode = ("", decode) if pair.decode_prefills else (prefill, "")
    return fleet_pb2.Candidate(
        prefill=prefill,
        decode=decode,
        refused=pair.refused,
        ttft_ms=pair.ttft_s * 1e3,
        handed_over_ttft_ms=pair.handed_over_ttft_s * 1e3,
        decode_prefills=pair.decode_prefills,
        tpot_ms=pair.on_decode.tpot_s * 1e3,
        queue_tokens=pair.on_prefill.queue_tokens,
        prefill_cached_tokens=pair.on_prefill.cached,
        decode_cached_tokens=pair.on_decode.cached,
        same_host=pair.same_host,
        score=pair.score_ms,
    )
