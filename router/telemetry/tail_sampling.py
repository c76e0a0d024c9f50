"""Which traces are kept though they were not sampled: those of requests that failed or were slow.

The router knows that at the latest when a request ends. It keeps its own spans and tells the
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
from router.telemetry.stats import CANCELLED, OK, Ending, Listener, Seen

log = logging.getLogger(__name__)

_CALL_S = 2.0
_MOST_TOLD = 512  # traces that wait to be told to one worker
# A refusal before any work is an answer, and under overload there are many.
_ANSWERS = (Overloaded, InvalidRequest, ModelNotFound, Unauthenticated)


class TraceKeeping(Listener):
    """A listener of the tally that decides at the end of requests. Event-loop thread only."""

    def __init__(self, trace: Telemetry, fleet: Fleet, slow_s: float, slos: Sequence[Slo]) -> None:
        self._trace = trace
        self._fleet = fleet
        self._slow_s = slow_s
        self._slos = slos
        self._untold: dict[str, dict[str, None]] = {}  # trace ids by worker
        self._telling: asyncio.Task[None] | None = None

    def first_token(self, seen: Seen) -> None:
        """Slow already, whatever comes."""
        assert seen.story is not None
        if seen.held and seen.story.ttft_s > self._slow_s:
            seen.kept = True

    def ended(self, seen: Seen, ending: Ending) -> None:
        """Keeps the trace if it is worth it."""
        seen.kept = seen.held and (seen.kept or self._is_wanted(seen, ending))
        if not seen.kept:
            return
        self._trace.keep(seen.trace_id)
        for incarnation in seen.story.workers if seen.story else ():
            untold = self._untold.setdefault(incarnation, {})
            if len(untold) < _MOST_TOLD:
                untold[seen.trace_id] = None
        if self._untold and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._tell(), name="trace keeping")

    async def close(self) -> None:
        """Waits until all workers are told."""
        if self._telling is not None:
            await self._telling

    def _is_wanted(self, seen: Seen, ending: Ending) -> bool:
        story = seen.story
        if ending.status == CANCELLED:
            return False
        if ending.status != OK or story is None:
            return seen.placed or not isinstance(ending.error, _ANSWERS)
        met = [slo.met(story.ttft_s, story.tpot_s, story.e2e_s) for slo in self._slos]
        return story.attempts > 1 or (bool(met) and not any(met))

    async def _tell(self) -> None:
        """Tells all workers at once, again and again until nothing is left to tell."""
        while self._untold:
            untold, self._untold = self._untold, {}
            calls = [self._tell_one(name, list(ids)) for name, ids in untold.items()]
            await asyncio.gather(*calls)

    async def _tell_one(self, incarnation: str, trace_ids: Sequence[str]) -> None:
        request = worker_pb2.KeepTracesRequest(trace_ids=trace_ids)
        with contextlib.suppress(BatonError):  # it has left, or will not answer
            member = self._fleet.member(incarnation)
            with member.calling():
                await member.worker.KeepTraces(request, timeout=_CALL_S)
