"""Sends requests to one server, each at its time or so many at once, and gathers the outcomes.

Bodies are made before they are due; a request is sent once. The generator also measures how late
it was itself: its own slowness must not be taken for the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from baton.bench.request import INTERRUPTED, Demand, Outcome
from baton.bench.servers import Server
from baton.bench.stats import percentile

_AHEAD_TOKENS = 4_000_000  # of prompts made before the clock starts: some 20 MB
_RECENT = 100  # requests whose TTFT is shown while a run goes on
_REFILL = 2  # bodies made after each one sent, while the next is not due
_CHECK_S = 0.01
_LATE_MS, _BUSY = 10.0, 0.85  # beyond these the results are in doubt


@dataclass
class Lag:
    """How well the generator kept time; lists are seconds.

    `late_s`: from a request's time, or the end of the one before it in a closed loop, to its send.
    `loop_late_s`: how late a timer of the event loop fired, every 10 ms.
    """

    late_s: list[float] = field(default_factory=list)
    loop_late_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def add(self, other: Lag) -> None:
        self.late_s += other.late_s
        self.loop_late_s += other.loop_late_s
        self.cpu_s += other.cpu_s
        self.wall_s += other.wall_s

    def complaints(self) -> list[str]:
        """Why the generator may have been the bottleneck; empty if it was not."""
        found = []
        late_ms, loop_ms = (percentile(s, 99) * 1e3 for s in (self.late_s, self.loop_late_s))
        if late_ms > _LATE_MS:
            found.append(f"requests were sent late (p99 {late_ms:.1f} ms)")
        if loop_ms > _LATE_MS:
            found.append(f"its event loop was late (p99 {loop_ms:.1f} ms)")
        if self.cpu_share > _BUSY:
            found.append(f"it kept a core busy ({self.cpu_share:.0%})")
        return found

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measures the event loop and the processor time as long as the block runs."""

        async def check_loop() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                while True:
                    due = time.monotonic() + _CHECK_S
                    await asyncio.sleep(_CHECK_S)
                    self.loop_late_s.append(time.monotonic() - due)

        began, cpu = time.monotonic(), time.process_time()
        task = asyncio.create_task(check_loop())
        try:
            yield
        finally:
            task.cancel()
            self.cpu_s += time.process_time() - cpu
            self.wall_s += time.monotonic() - began


@dataclass
class Run:
    """The outcomes of one run. `seconds`: from its start to the end of the last request.

    The counts are of requests that have ended, for showing progress; results are made from
    outcomes.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    lag: Lag = field(default_factory=Lag)
    ok: int = 0
    failed: int = 0
    output_tokens: int = 0
    recent_ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def count(self, outcome: Outcome) -> None:
        self.ok += outcome.ok
        self.failed += not outcome.ok
        self.output_tokens += outcome.output_tokens
        if outcome.ttft_s is not None:
            self.recent_ttfts_s.append(outcome.ttft_s)


class _Prepared:
    """Requests with their bodies, made before they are due as far as memory allows."""

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
    """One run against one server; `run` has its outcomes so far."""

    def __init__(self, server: Server, stop: asyncio.Event | None = None) -> None:
        self.run = Run()
        self._server = server
        self._stop = stop or asyncio.Event()  # set: nothing more is begun, what runs is cancelled
        self._began = 0.0
        self._sending: set[asyncio.Task[None]] = set()

    async def open_loop(self, demands: Iterable[Demand]) -> Run:
        """Each request at its time, whatever became of those before."""
        prepared = _Prepared(demands, self._server)
        prepared.fill()
        async with self._timed(), asyncio.TaskGroup() as sends:
            while not self._stop.is_set() and (taken := prepared.take()):
                await self._until(self._began + taken[0].at_s)
                if self._stop.is_set():
                    break
                sends.create_task(self._send(*taken, taken[0].at_s))
                await asyncio.sleep(0)  # what is due goes out before more is made
                prepared.fill(_REFILL)
        return self.run

    async def closed_loop(
        self, demands: Iterable[Demand], concurrency: int, limit_s: float = 0.0
    ) -> Run:
        """So many requests at a time; nothing is begun `limit_s` after the start, 0: no limit."""
        prepared = _Prepared(demands, self._server)
        prepared.fill(concurrency * 4)

        async def loop() -> None:
            free_s = 0.0
            while not self._stop.is_set() and not (limit_s and self._now_s() >= limit_s):
                if (taken := prepared.take()) is None:
                    break
                free_s = free_s or self._now_s()
                await self._send(*taken, free_s)
                free_s = self._now_s()
                prepared.fill(_REFILL)

        async with self._timed(), asyncio.TaskGroup() as loops:
            for _ in range(concurrency):
                loops.create_task(loop())
        return self.run

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        """The clock of the run and what is measured beside it."""
        gc.freeze()  # what exists already is left out of the collections during the run
        async with self.run.lag.measured():
            self._began = time.monotonic()
            task = asyncio.create_task(self._cancel_on_stop())
            try:
                yield
            finally:
                self.run.seconds = self._now_s()
                task.cancel()
                gc.unfreeze()

    async def _cancel_on_stop(self) -> None:
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
            outcome.fail(INTERRUPTED, "the run was ended early")
            if not self._stop.is_set():
                raise
            task.uncancel()  # by `_cancel_on_stop`: the run itself goes on to its report
        finally:
            self._sending.discard(task)
            self.run.count(outcome)
