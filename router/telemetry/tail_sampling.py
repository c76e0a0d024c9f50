"""Tail sampling: exports traces that were not sampled if their request failed or was slow.

The decision is made when a request ends at the latest. The router then exports its own spans and
asks the request's workers, which hold theirs for a while, to do the same. A worker that died or
held too many spans has none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from baton.config.slo import Slo
from baton.errors import (
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from baton.telemetry.tracing import Telemetry
from router.telemetry.stats import (
    CANCELLED,
    OK,
    RequestListener,
    RequestOutcome,
    RequestRecord,
)

log = logging.getLogger(__name__)

# Refusals before any work; under overload there are many.
_REFUSALS = (Overloaded, InvalidRequest, ModelNotFound, Unauthenticated)


class SamplingPolicy(RequestListener):
    """Decides which traces to keep. Event-loop thread only."""

    def __init__(self, telemetry: Telemetry, slow_s: float, slos: Sequence[Slo]) -> None:
        self._telemetry = telemetry
        self._slow_s = slow_s
        self._slos = slos

    def first_token(self, record: RequestRecord) -> None:
        """Marks the trace to be kept if the first token was slow."""
        assert record.state is not None
        if record.held and not record.in_batch and record.state.ttft_s > self._slow_s:
            record.kept = True

    def ended(self, record: RequestRecord, outcome: RequestOutcome) -> None:
        record.kept = record.held and (record.kept or self._is_wanted(record, outcome))
        if not record.kept:
            return
        self._telemetry.keep(record.trace_id)
        if record.state is None or record.fleet is None:
            return
        for incarnation in record.state.workers:
            with contextlib.suppress(Unavailable):  # it has left
                record.fleet.member(incarnation).keep_traces([record.trace_id])

    def _is_wanted(self, record: RequestRecord, outcome: RequestOutcome) -> bool:
        state = record.state
        if outcome.status == CANCELLED:
            return False
        if outcome.status != OK or state is None:
            return record.placed or not isinstance(outcome.error, _REFUSALS)
        met_none = bool(self._slos) and not any(map(state.is_within, self._slos))
        return state.attempts > 1 or (met_none and not record.in_batch)
