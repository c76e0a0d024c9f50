"""Where a request would run now and why, for people: what placement computes, as one message."""

from __future__ import annotations

from baton.errors import Overloaded, Unavailable
from baton.v1 import fleet_pb2
from router.admission import feasibility
from router.admission.wait_queue import Line
from router.dispatch.request_state import Ask, Story
from router.fleet.snapshot import Snapshot
from router.placement import placement
from router.placement.placement import Choice, Wants


def explain(
    snapshot: Snapshot, ask: Ask, line: Line, local_prefill_max_tokens: int, now: float
) -> fleet_pb2.ExplainResponse:
    """Every pair with its numbers, and what keeps the request from running; nothing is run.

    `now` is time.monotonic().
    """
    wants = Story(ask).wants(local_prefill_max_tokens)
    choices = placement.judge(snapshot, wants)
    refused = _refusal(snapshot, ask, line, wants, now)
    return fleet_pb2.ExplainResponse(
        candidates=map(_candidate, choices),
        refused=refused,
        decode_prefills=any(c.decode_prefills for c in choices[:1] if not c.refused),
        prompt_tokens=len(ask.prompt),
        tenant=ask.tenant,
        queued=line.depth,
    )


def _refusal(snapshot: Snapshot, ask: Ask, line: Line, wants: Wants, now: float) -> str:
    """What a real request would meet, in the order in which it would."""
    try:
        line.check_room()
        feasibility.check(ask, snapshot, line, now, wants)
        placement.pick(snapshot, wants)
    except (Overloaded, Unavailable) as error:
        return str(error)
    return f"requests that stand in line for room: {line.depth}" if line.depth else ""


def _candidate(choice: Choice) -> fleet_pb2.Candidate:
    prefill, decode = choice.names
    return fleet_pb2.Candidate(
        prefill=prefill,
        decode=decode,
        refused=choice.refused,
        ttft_ms=choice.ttft_s * 1e3,
        tpot_ms=choice.tpot_s * 1e3,
        queue_tokens=choice.queue_tokens,
        prefill_cached_tokens=choice.prefill_cached,
        decode_cached_tokens=choice.decode_cached,
        same_host=choice.same_host,
        score=choice.score_ms,
    )
