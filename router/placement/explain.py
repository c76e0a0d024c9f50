"""Answers `baton explain`: where a request would run now, every pair with its numbers."""

from __future__ import annotations

from baton.v1 import fleet_pb2
from router.fleet.snapshot import Snapshot
from router.placement import scoring
from router.placement.scoring import Pair
from router.request import Demand


def explain(snapshot: Snapshot, demand: Demand, refused: str) -> fleet_pb2.ExplainResponse:
    """The candidate pairs, best first. `refused`: why the request could not be placed now."""
    pairs = scoring.rank_all(snapshot, demand)
    return fleet_pb2.ExplainResponse(
        candidates=map(_candidate, pairs),
        refused=refused,
        decode_prefills=any(pair.decode_prefills for pair in pairs[:1] if not pair.refused),
        prompt_tokens=demand.num_tokens,
        tenant=demand.pending.owner.tenant,
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
