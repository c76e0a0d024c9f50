"""Tail sampling: keeps traces that were not sampled, of requests that failed or were slow.

The router knows that at the latest when a request ends. It keeps its own spans and calls the
workers that the request was on, which hold theirs for a while. A worker that died, or held too
much, has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from baton.errors import BatonError, InvalidRequest, ModelNotFound, Overloaded, Unauthenticated
from baton.slo import Slo
from baton.telemetry import Telemetry
from baton.v1 import worker_pb2
from router.fleet.fleet import Fleet
from router.telemetry.stats import CANCELLED, OK, Outcome, RequestListener, RequestRecord

log = logging.getLogger(__name__)

_CALL_S = 2.0
_MOST_PENDING = 512  # traces that wait for a call to one worker
# A refusal before any work is an answer, and under overload there are many.
_REFUSALS = (Overloaded, InvalidRequest, ModelNotFound, Unauthenticated)


class SamplingPolicy(RequestListener):
    """Decides at the end of requests. Event-loop thread only."""

    def __init__(self, trace: Telemetry, fleet: Fleet, slow_s: float, slos: Sequence[Slo]) -> None:
        self._trace = trace
        self._fleet = fleet
        self._slow_s = slow_s
        self._slos = slos
        self._pending: dict[str, dict[str, None]] = {}  # trace ids by worker
        self._calling: asyncio.Task[None] | None = None

    def first_token(self, record: RequestRecord) -> None:
        """Keeps the trace if it is slow already."""
        assert record.state is not None
        if record.held and record.state.ttft_s > self._slow_s:
            record.kept = True

    def ended(self, record: RequestRecord, outcome: Outcome) -> None:
        record.kept = record.held and (record.kept or self._is_wanted(record, outcome))
        if not record.kept:
            return
        self._trace.keep(record.trace_id)
        for incarnation in record.state.workers if record.state else ():
            pending = self._pending.setdefault(incarnation, {})
            if len(pending) < _MOST_PENDING:
                pending[record.trace_id] = None
        if self._pending and (self._calling is None or self._calling.done()):
            self._calling = asyncio.create_task(self._call_workers(), name="tail sampling")

    async def close(self) -> None:
        """Waits until all workers were called."""
        if self._calling is not None:
            await self._calling

    def _is_wanted(self, record: RequestRecord, outcome: Outcome) -> bool:
        state = record.state
        if outcome.status == CANCELLED:
            return False
        if outcome.status != OK or state is None:
            return record.placed or not isinstance(outcome.error, _REFUSALS)
        met_none = bool(self._slos) and not any(map(state.is_within, self._slos))
        return state.attempts > 1 or met_none

    async def _call_workers(self) -> None:
        """Calls all workers at once, again and again until nothing is pending."""
        while self._pending:
            pending, self._pending = self._pending, {}
            calls = [self._keep_on(name, list(ids)) for name, ids in pending.items()]
            await asyncio.gather(*calls)

    async def _keep_on(self, incarnation: str, trace_ids: Sequence[str]) -> None:
        request = worker_pb2.KeepTracesRequest(trace_ids=trace_ids)
        with contextlib.suppress(BatonError):  # it has left, or will not answer
            member = self._fleet.member(incarnation)
            with member.calling():
                await member.worker.KeepTraces(request, timeout=_CALL_S)
