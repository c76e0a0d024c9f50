"""Liveness of workers: a stream on which a worker must send heartbeats, opened again when it ends.

Silence is counted in ticks of the router's own event loop, not read from a clock: a router that was
itself stopped or starved counts one late tick and takes no worker for dead.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

from baton.config import RouterLimits
from baton.errors import BatonError, InternalError, Stale, Unavailable
from baton.v1 import worker_pb2
from router.fleet.snapshot import SILENT, UNREACHABLE

log = logging.getLogger(__name__)

NOT_TRIED = "not connected yet"  # until the first try to connect has ended
_RECONNECT_S = (0.1, 2.0)
_LONG_STEPS = 20  # a step may take as long as that many usual ones


@dataclass(frozen=True)
class LivenessConfig:
    """How long a worker may send no heartbeat, and how long its engine may take for a step."""

    silence_s: float = RouterLimits.silence_s
    stall_s: float = RouterLimits.stall_s

    @cached_property
    def tick_s(self) -> float:
        """Interval of the check of all workers."""
        return min(0.1, self.silence_s / 10)

    @property
    def heartbeat_ms(self) -> int:
        """Interval requested of workers. One that is late by half of it is suspected, one that has
        missed three is lost. A heartbeat costs a router about 0.14 ms: hence no shorter interval.

        Any other message from the worker counts as a heartbeat, too.
        """
        return int(1000 * self.silence_s / 3)

    @cached_property
    def lost_ticks(self) -> int:
        """Silent ticks after which a worker is lost; after half of them it gets nothing new."""
        return self.ticks_in(self.silence_s)

    def ticks_in(self, time_s: float) -> int:
        """Ticks in a span of time, if none is late."""
        return max(1, round(time_s / self.tick_s))

    def why_stalled(self, load: worker_pb2.Load) -> str:
        """Why a worker's engine counts as stuck; empty when it does not."""
        rate = load.prefill_tokens_per_s
        usual_ms = max(load.step_ms, 1000 * load.chunk_tokens / rate if rate > 0 else 0.0)
        if load.step_age_ms <= max(1000 * self.stall_s, _LONG_STEPS * usual_ms):
            return ""
        return f"its engine has been at one step for {load.step_age_ms / 1000:.1f} s"


class HeartbeatStream:
    """Keeps one stream of a worker open.

    `follow` opens the stream, calls `opened` and then `heard` at each message, and returns or
    raises at its end; then `lost` is called with whether that changes the stream's state. After
    Stale the stream is not opened again. Until the worker has answered once, attempts are at least
    `first_pause_s` apart.
    """

    def __init__(
        self,
        name: str,
        follow: Callable[[HeartbeatStream], Awaitable[None]],
        lost: Callable[[bool], None],
        first_pause_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.alive = False  # the worker has answered on the stream that is open
        self.state, self.why = UNREACHABLE, NOT_TRIED  # while it is not alive
        self.silent_ticks = 0
        self._has_failed = False  # as `tick` has said
        self._follow = follow
        self._lost = lost
        self._first_pause_s = first_pause_s
        self.answered = False  # ever
        self._limit: asyncio.Timeout | None = None  # of the stream that is open; `cut` sets it
        self._task = asyncio.create_task(self._run(), name=name)

    def opened(self) -> None:
        self.alive = self._limit is not None
        self.answered |= self.alive
        self.heard()

    def heard(self) -> None:
        self.silent_ticks = 0

    def tick(self) -> bool:
        """A tick has passed. Between two streams silence is not counted.

        Returns whether, since the last one, the first try has failed: this changes no state.
        """
        if self._limit is not None:
            self.silent_ticks += 1
        first_failed = not self._has_failed and self.why != NOT_TRIED
        self._has_failed |= first_failed
        return first_failed

    def cut(self, why: str) -> None:
        """Ends the silent stream, so that the worker finds it broken, and opens another."""
        self.alive, self.state, self.why = False, SILENT, why
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())
            self._limit = None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """One stream after another, with a growing pause and jitter while they end early."""
        shortest_s, longest_s = _RECONNECT_S
        pause_s = shortest_s
        while True:
            began = time.monotonic()
            error = await self._one_stream()
            if error is not None:
                changed = self.alive or self.state != UNREACHABLE or isinstance(error, Stale)
                self.alive, self.state, self.why = False, UNREACHABLE, str(error)
                self._lost(changed)
            if isinstance(error, Stale):
                return
            if error is None or time.monotonic() - began > longest_s:  # it had worked
                pause_s = shortest_s
            least_s = 0.0 if self.answered else self._first_pause_s()
            await asyncio.sleep(max(pause_s, least_s) * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause_s = min(pause_s * 2, longest_s)

    async def _one_stream(self) -> BatonError | None:
        """Why the stream ended; None when it was cut, which is known already."""
        self.silent_ticks = 0
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._follow(self)
        except TimeoutError:
            return None
        except BatonError as error:
            return error
        except Exception as error:  # a bug must not leave a worker without a watch
            log.exception("the stream %s failed", self._task.get_name())
            return InternalError(f"{type(error).__name__}: {error}")
        finally:
            self._limit = None
            self.silent_ticks = 0
        return Unavailable("the worker closed the stream")
