"""What an attempt's spans tell of its way to its workers."""

from __future__ import annotations

from opentelemetry.trace import Span

from baton.v1 import decode_pb2
from router.dispatch.attempt import Attempt
from router.placement.scoring import Pair
from router.request import RequestState


def describe_place(span: Span, attempt: Attempt, depth: int) -> None:
    """`depth`: requests that waited for room when this one came."""
    if not span.is_recording():
        return
    attributes: dict[str, str | int] = {
        "baton.queue_depth": depth,
        "baton.tries": attempt.tries,
        "baton.refusals": attempt.refusals,
    }
    if attempt.last_refusal:
        attributes["baton.last_refusal"] = attempt.last_refusal
    span.set_attributes(attributes)


def describe_attempt(
    span: Span, pair: Pair, reserved: decode_pb2.ReserveResponse, state: RequestState
) -> None:
    """Where it runs, and why; `state.route` is known."""
    if not span.is_recording():
        return
    attributes: dict[str, str | int | float | bool] = {
        "attempt": state.attempts,
        "prefill": state.route.prefill or "(decode prefills)",
        "decode": state.route.decode or "(the prompt alone)",
        "decode_cached_tokens": reserved.cached_tokens,
        "placement.predicted_ttft_ms": round(pair.ttft_s * 1e3, 3),
        "placement.predicted_tpot_ms": round(pair.on_decode.tpot_s * 1e3, 3),
        "placement.score_ms": round(pair.score_ms, 3),
        "placement.queue_tokens": pair.on_prefill.queue_tokens,
        "placement.prefill_cached_tokens": pair.on_prefill.cached,
        "placement.decode_cached_tokens": pair.on_decode.cached,
        "placement.decode_prefills": pair.decode_prefills,
        "placement.same_host": pair.same_host,
        "placement.candidates": pair.candidates,
    }
    for name, value in attributes.items():
        span.set_attribute(f"baton.{name}", value)
