"""Where a request would run now and why, for operators: what placement computes, as one message."""

from __future__ import annotations

from baton.errors import Overloaded, Unavailable
from baton.v1 import fleet_pb2
from router.admission import feasibility
from router.admission.wait_queue import WaitQueue
from router.dispatch.request_state import TokenizedRequest
from router.fleet.snapshot import Snapshot
from router.placement import placement
from router.placement.cost_model import PlacementRequest
from router.placement.scoring import Pair


def explain(
    snapshot: Snapshot,
    request: TokenizedRequest,
    queue: WaitQueue,
    needs: PlacementRequest,
    now: float,
) -> fleet_pb2.ExplainResponse:
    """Every pair with its numbers, and what keeps the request from running; nothing is run.

    `now` is time.monotonic().
    """
    refused = f"requests waiting for room: {queue.depth}" if queue.depth else ""
    try:  # in the order in which a real request would meet them
        queue.check_room()
        feasibility.check(request, snapshot, queue, now, needs)
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
    return fleet_pb2.Candidate(
        prefill=prefill,
        decode=decode,
        refused=pair.refused,
        ttft_ms=pair.ttft_s * 1e3,
        tpot_ms=pair.on_decode.tpot_s * 1e3,
        queue_tokens=pair.on_prefill.queue_tokens,
        prefill_cached_tokens=pair.on_prefill.cached,
        decode_cached_tokens=pair.on_decode.cached,
        same_host=pair.same_host,
        score=pair.score_ms,
    )
