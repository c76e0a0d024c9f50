"""The access log: a line for each request that has ended, or for a sample of them."""

from __future__ import annotations

import logging
import random

from router.telemetry.stats import RequestListener, RequestOutcome, RequestRecord

log = logging.getLogger("baton.access")


class AccessLog(RequestListener):
    """Logs requests to `baton.access`. Lines have no text of prompts or answers."""

    def __init__(self, share: float) -> None:
        """share: of requests, 0 to 1."""
        self._share = share

    def ended(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        if self._share and random.random() < self._share:  # noqa: S311 (not for secrets)
            log.info("request", extra={"fields": self._fields(record, outcome)})

    def _fields(self, record: RequestRecord, outcome: RequestOutcome) -> dict[str, object]:
        state = record.state
        fields: dict[str, object] = {
            "tenant": state.request.tenant if state else record.tenant,
            "model": record.model or record.asked_model,  # the version that served it, if any
            "operation": record.operation,
            "status": outcome.status,
            "error": type(outcome.error).__name__ if outcome.error else "",
            "batch": record.in_batch,
            "request_id": record.request_id,
            "callers_id": record.callers_id,
            "trace_id": record.trace_id,
        }
        if state is not None:
            fields |= {
                "prompt_tokens": len(state.request.prompt),
                "cached_tokens": state.cached_tokens or 0,
                "output_tokens": len(state.delivered) - len(state.request.resumed),
                "ttft_ms": _ms(state.ttft_s) if state.first_at else None,
                "tpot_ms": _ms(state.tpot_s) if state.first_at else None,
                "duration_ms": _ms(state.e2e_s),
                "queue_ms": _ms(state.placed_at - state.started) if state.placed_at else None,
                "attempts": state.attempts,
                "prefill": state.route.prefill,
                "decode": state.route.decode,
            }
        return {name: value for name, value in fields.items() if value not in ("", None)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
