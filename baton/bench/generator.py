"""Sends requests to one server, each at its time or so many at once, and gathers what comes back.

Bodies are made ahead of their time; a request is sent once. Figures are made elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.bench.demand import Demand
from baton.bench.lag import Lag
from baton.bench.outcome import INTERRUPTED, Outcome
from baton.bench.server import Server

_AHEAD_TOKENS = 4_000_000  # of prompts made before the clock starts: some 20 MB
_RECENT = 100  # requests whose TTFT is told while a run goes on
_REFILL = 2  # bodies made after each one sent, while the next is not due


@dataclass
class Tally:
    """Counts for those who watch a run; figures are made from outcomes."""

    ok: int = 0
    failed: int = 0
    output_tokens: int = 0
    recent_ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, outcome: Outcome) -> None:
        """Counts a request that has ended."""
        self.ok += outcome.ok
        self.failed += not outcome.ok
        self.output_tokens += outcome.output_tokens
        if outcome.ttft_s is not None:
            self.recent_ttfts_s.append(outcome.ttft_s)


@dataclass
class Run:
    """What became of one run's requests. `seconds`: from its start to the end of the last."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    lag: Lag = field(default_factory=Lag)
    tally: Tally = field(default_factory=Tally)


class _Ahead:
    """Requests with their bodies, made ahead of their time as far as memory allows."""

    def __init__(self, demands: Iterable[Demand], server: Server) -> None:
        self._demands, self._server = iter(demands), server
        self._made: deque[tuple[Demand, bytes]] = deque()
        self._tokens = 0

    def fill(self, number: int | None = None) -> None:
        """Makes so many more bodies, or as many as may be held."""
        while self._tokens < _AHEAD_TOKENS and number != 0:
            if (demand := next(self._demands, None)) is None:
                return
            self._made.append((demand, self._server.body(demand)))
            self._tokens += demand.prompt_tokens
            number = None if number is None else number - 1

    def take(self) -> tuple[Demand, bytes] | None:
        """The next request, None after the last."""
        if not self._made:
            self.fill(1)
        if not self._made:
            return None
        demand, body = self._made.popleft()
        self._tokens -= demand.prompt_tokens
        return demand, body


class Generator:
    """One run against one server; `run` is what has become of it so far."""

    def __init__(self, server: Server, stop: asyncio.Event) -> None:
        self.run = Run()
        self._server = server
        self._stop = stop  # set: nothing more is begun, what runs is cancelled
        self._began = 0.0
        self._sending: set[asyncio.Task[None]] = set()

    async def open_loop(self, demands: Iterator[Demand]) -> Run:
        """Each request at its time, whatever became of those before."""
        ahead = _Ahead(demands, self._server)
        ahead.fill()
        async with self._timed(), asyncio.TaskGroup() as sends:
            while not self._stop.is_set() and (taken := ahead.take()):
                await self._until(self._began + taken[0].at_s)
                if self._stop.is_set():
                    break
                sends.create_task(self._send(*taken, taken[0].at_s))
                await asyncio.sleep(0)  # what is due goes out before more is made
                ahead.fill(_REFILL)
        return self.run

    async def closed_loop(self, demands: Iterator[Demand], most: int, limit_s: float) -> Run:
        """`most` requests at a time; nothing is begun `limit_s` after the start, 0: no limit."""
        ahead = _Ahead(demands, self._server)
        ahead.fill(most * 4)

        async def take_turns() -> None:
            free_s = 0.0
            while not self._stop.is_set() and not (limit_s and self._now_s() >= limit_s):
                if (taken := ahead.take()) is None:
                    break
                free_s = free_s or self._now_s()
                await self._send(*taken, free_s)
                free_s = self._now_s()
                ahead.fill(_REFILL)

        async with self._timed(), asyncio.TaskGroup() as turns:
            for _ in range(most):
                turns.create_task(take_turns())
        return self.run

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        """The clock of the run and what is measured beside it."""
        gc.freeze()  # what is there already need not be looked at again and again
        async with self.run.lag.measured():
            self._began = time.monotonic()
            watch = asyncio.create_task(self._end_early())
            try:
                yield
            finally:
                self.run.seconds = self._now_s()
                watch.cancel()
                gc.unfreeze()

    async def _end_early(self) -> None:
        await self._stop.wait()
        for task in self._sending:
            task.cancel()

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    async def _until(self, moment: float) -> None:
        """Sleeps up to that moment or the stop."""
        left_s = moment - time.monotonic()
        with contextlib.suppress(TimeoutError):
            if left_s > 0:
                async with asyncio.timeout(left_s):
                    await self._stop.wait()

    async def _send(self, demand: Demand, body: bytes, at_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        sent_s = self._now_s()
        outcome = Outcome(
            at_s, sent_s, planned_prompt=demand.prompt_tokens, planned_output=demand.new_tokens
        )
        self.run.outcomes.append(outcome)
        self.run.lag.late_s.append(sent_s - at_s)
        self._sending.add(task)
        try:
            await self._server.send(body, outcome)
        except asyncio.CancelledError:
            outcome.failed(INTERRUPTED, "the run was ended early")
            if not self._stop.is_set():
                raise
            task.uncancel()  # by `_end_early`: the run itself goes on to its report
        finally:
            self._sending.discard(task)
            self.run.tally.add(outcome)
