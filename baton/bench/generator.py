"""Sends requests to one server, in an open or closed loop, and collects their outcomes.

Bodies are built before they are due; requests are not retried. The generator measures its own
lateness, so that it is not mistaken for the server's.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, islice

from baton.bench.request import INTERRUPTED, Demand, Outcome
from baton.bench.servers import Server
from baton.net.tasks import wait_at_most

_AHEAD_TOKENS = 4_000_000  # prompt tokens prepared before the start: about 20 MB
_CHECK_S = 0.01


@dataclass
class Run:
    """Outcomes of one run, including running requests, and the generator's own lateness."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0  # from the start to the end of the last request
    loop_late_s: list[float] = field(default_factory=list)  # of a timer every 10 ms
    cpu_s: float = 0.0

    @property
    def ok(self) -> int:
        """Number of requests that succeeded."""
        return sum(outcome.ok for outcome in self.outcomes if outcome.ended_s)

    @property
    def failed(self) -> int:
        return sum(not outcome.ok for outcome in self.outcomes if outcome.ended_s)


def _prepared(
    demands: Iterable[Demand], server: Server, most: int | None
) -> Iterator[tuple[Demand, bytes]]:
    """Requests with their bodies: the first ones are built now, others when they are next."""
    made = ((demand, server.body(demand)) for demand in demands)
    ahead, tokens = list[tuple[Demand, bytes]](), 0
    for demand, body in islice(made, most):
        ahead.append((demand, body))
        tokens += demand.prompt_tokens
        if tokens >= _AHEAD_TOKENS:
            break
    return chain(ahead, made)


class Generator:
    """One run against one server; `run` has the outcomes so far."""

    def __init__(self, server: Server, stop: asyncio.Event | None = None) -> None:
        self.run = Run()
        self._server = server
        self._stop = stop or asyncio.Event()  # when set, running requests are cancelled
        self._began = 0.0
        self._sending: set[asyncio.Task[None]] = set()

    async def open_loop(self, demands: Iterable[Demand]) -> Run:
        """Sends each request at its time, whatever the state of earlier ones."""
        prepared = _prepared(demands, self._server, None)
        async with self._timed(), asyncio.TaskGroup() as sends:
            for demand, body in prepared:
                if (left_s := demand.at_s - self._now_s()) > 0:
                    await wait_at_most(left_s, self._stop.wait())
                if self._stop.is_set():
                    break
                sends.create_task(self._send(demand, body, demand.at_s))
                await asyncio.sleep(0)  # due requests are sent before more bodies are built
        return self.run

    async def closed_loop(
        self, demands: Iterable[Demand], concurrency: int, limit_s: float = 0.0
    ) -> Run:
        """Keeps a number of requests in flight; starts none after `limit_s` (0: no limit)."""
        prepared = _prepared(demands, self._server, concurrency * 4)

        async def loop() -> None:
            free_s = 0.0
            for demand, body in prepared:
                if self._stop.is_set() or (limit_s and self._now_s() >= limit_s):
                    break
                await self._send(demand, body, free_s)
                free_s = self._now_s()

        async with self._timed(), asyncio.TaskGroup() as loops:
            for _ in range(concurrency):
                loops.create_task(loop())
        return self.run

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        """Starts the run's clock, and measures event loop lag and CPU time."""

        async def check_loop() -> None:
            while True:
                due = time.monotonic() + _CHECK_S
                await asyncio.sleep(_CHECK_S)
                self.run.loop_late_s.append(time.monotonic() - due)

        async def cancel_on_stop() -> None:
            await self._stop.wait()
            for task in self._sending:
                task.cancel()

        gc.freeze()  # existing objects are not scanned during the run
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
            task.uncancel()  # cancelled by `cancel_on_stop`: the run itself continues
        finally:
            outcome.ended_s = time.monotonic() - began
            self._sending.discard(task)
