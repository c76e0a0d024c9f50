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
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

from baton.bench.request import INTERRUPTED, Demand, Outcome
from baton.bench.servers import Server

_AHEAD_TOKENS = 4_000_000  # of prompts made before the clock starts: some 20 MB
_RECENT = 100  # requests whose TTFT is shown while a run goes on
_REFILL = 2  # bodies made after each one sent, while the next is not due
_CHECK_S = 0.01


@dataclass
class Run:
    """The outcomes of one run, and how well the generator kept time.

    The counts are of requests that have ended, for showing progress; results are made from
    outcomes.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0  # from its start to the end of the last request
    loop_late_s: list[float] = field(default_factory=list)  # of a timer every 10 ms
    cpu_s: float = 0.0
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


class _Prepared(Iterator[tuple[Demand, bytes]]):
    """Requests with their bodies, made before they are due as far as memory allows."""

    def __init__(self, demands: Iterable[Demand], server: Server) -> None:
        self._demands, self._server = iter(demands), server
        self._made: deque[tuple[Demand, bytes]] = deque()
        self._tokens = 0

    def fill(self, number: int | None) -> None:
        """Makes at most so many more bodies, None: as many as there may be."""
        for demand in islice(self._demands, number):
            self._made.append((demand, self._server.body(demand)))
            self._tokens += demand.prompt_tokens
            if self._tokens >= _AHEAD_TOKENS:
                break

    def __next__(self) -> tuple[Demand, bytes]:
        if not self._made:
            self.fill(1)
        if not self._made:
            raise StopIteration
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
        prepared.fill(None)
        async with self._timed(), asyncio.TaskGroup() as sends:
            for demand, body in prepared:
                if (left_s := demand.at_s - self._now_s()) > 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(left_s):
                            await self._stop.wait()
                if self._stop.is_set():
                    break
                sends.create_task(self._send(demand, body, demand.at_s))
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
            for demand, body in prepared:
                if self._stop.is_set() or (limit_s and self._now_s() >= limit_s):
                    break
                await self._send(demand, body, free_s)
                free_s = self._now_s()
                prepared.fill(_REFILL)

        async with self._timed(), asyncio.TaskGroup() as loops:
            for _ in range(concurrency):
                loops.create_task(loop())
        return self.run

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        """The clock of the run and what is measured beside it."""

        async def check_loop() -> None:
            while True:
                due = time.monotonic() + _CHECK_S
                await asyncio.sleep(_CHECK_S)
                self.run.loop_late_s.append(time.monotonic() - due)

        async def cancel_on_stop() -> None:
            await self._stop.wait()
            for task in self._sending:
                task.cancel()

        gc.freeze()  # what exists already is left out of the collections during the run
        self._began, cpu_s = time.monotonic(), time.process_time()
        tasks = [asyncio.create_task(check_loop()), asyncio.create_task(cancel_on_stop())]
        try:
            yield
        finally:
            self.run.seconds = self._now_s()
            self.run.cpu_s = time.process_time() - cpu_s
            for task in tasks:
                task.cancel()
            gc.unfreeze()

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    async def _send(self, demand: Demand, body: bytes, at_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        outcome = Outcome(at_s, self._now_s(), demand.prompt_tokens, demand.new_tokens)
        self.run.outcomes.append(outcome)
        self._sending.add(task)
        began = time.monotonic()
        try:
            await self._server.send(body, outcome, began)
        except asyncio.CancelledError:
            outcome.fail(INTERRUPTED, "the run was ended early")
            if not self._stop.is_set():
                raise
            task.uncancel()  # by `cancel_on_stop`: the run itself goes on to its report
        finally:
            outcome.ended_s = time.monotonic() - began
            self._sending.discard(task)
            self.run.count(outcome)
