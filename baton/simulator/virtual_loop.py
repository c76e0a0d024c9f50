"""An event loop on a virtual clock: where nothing is left to run now, time jumps to what is next.

Everything that takes its time from the loop runs unchanged: sleeps, deadlines, timers.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_COLLECT_AFTER = 50_000  # new objects: requests leave few cycles, and collections took a tenth
_RESOLUTION_S = 1e-9  # timers closer together than this run at one time
_FEW_TIMERS = 1000  # cancelled ones are removed where there are more, and twice as many as before


class _Call(TimerHandle):
    """A callback that is to run. A plain Handle takes twice as long to make."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self.callback, self.args, self.is_cancelled = callback, args, False
        self.context = context

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class VirtualLoop(asyncio.BaseEventLoop):
    """Starts at 0 s. A loop that waits for what no timer brings fails with RuntimeError.

    It waits for no files and has no threads. Timers of one time run in the order of their setting.
    An exception of a callback ends it. Callbacks without a context run in the loop's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._soon: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []  # heap, by time and number
        self._numbers = itertools.count()
        self._many_timers = _FEW_TIMERS

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> _Call:
        call = _Call(callback, args, context)
        self._soon.append(call)
        return call

    call_soon_threadsafe = call_soon  # from signal handlers

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Call:
        timer = _Call(callback, args, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        if len(self._timers) > self._many_timers:
            self._timers = [one for one in self._timers if not one[2].is_cancelled]
            heapq.heapify(self._timers)
            self._many_timers = max(_FEW_TIMERS, 2 * len(self._timers))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Call:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Runs what is due now, or next; `run_forever` calls it until the loop is stopped."""
        soon, timers = self._soon, self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not soon:
            if not timers:
                raise RuntimeError("the simulation waits for something that never happens")
            self._now += max(0.0, timers[0][0] - self._now)
        end = self._now + _RESOLUTION_S
        while timers and timers[0][0] < end:
            soon.append(heapq.heappop(timers)[2])
        for _ in range(len(soon)):  # what these add runs the next time
            call = soon.popleft()
            if call.is_cancelled:
                continue
            if call.context is None:
                call.callback(*call.args)
            else:
                call.context.run(call.callback, *call.args)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs to the end on a virtual clock of its own."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(coroutine)
    finally:
        gc.set_threshold(*before)
