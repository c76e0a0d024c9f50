"""A worker's load as others see it: the engine's counts plus measured rates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable

from baton.engine.blocks import CacheChanges
from baton.engine.loop import StepReport
from baton.engine.sequence_table import Load
from baton.v1 import worker_pb2

_SMOOTHING = 0.2  # weight of the newest step in the running means
_PREFILL_ROWS = 32  # a step with at least this many rows tells of prefill speed


class LoadMeter:
    """Follows step reports; wakes watchers when something changed. Event-loop thread only."""

    def __init__(self) -> None:
        self.load = worker_pb2.Load()
        self.mean_step_s = 0.0  # over steps of every kind; 0 before the first
        self._cached: set[int] = set()  # every prefix hash that can be hit
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def update(self, report: StepReport) -> None:
        """Takes in one step."""
        load = load_proto(report.load)
        load.prefill_tokens_per_s = self.load.prefill_tokens_per_s
        load.step_ms = self.load.step_ms
        drawn = sum(len(progress.token_ids) for progress in report.progress)
        load.tokens_computed = self.load.tokens_computed + report.num_kept
        load.tokens_generated = self.load.tokens_generated + drawn
        step_s = (report.ended_ns - report.started_ns) / 1e9
        if report.num_tokens:
            self.mean_step_s = _smooth(self.mean_step_s, step_s)
        # Drafts tell nothing of the speed of prompts.
        if report.num_tokens - report.num_proposed >= _PREFILL_ROWS and step_s > 0:
            rate = report.num_tokens / step_s
            load.prefill_tokens_per_s = _smooth(load.prefill_tokens_per_s, rate)
        elif report.num_tokens:
            load.step_ms = _smooth(load.step_ms, step_s * 1e3)
        self.load = load
        # Within a step room is made before anything is stored.
        self._cached.difference_update(report.cache.evicted)
        self._cached.update(report.cache.stored)
        for watcher in self._watchers:
            watcher.take(report.cache)
        self.wake()

    def wake(self) -> None:
        """Tells every watcher that there is news."""
        for watcher in self._watchers:
            watcher.news.set()

    def close(self) -> None:
        """Ends every watch after its last news."""
        self._closed = True
        self.wake()

    async def watch(
        self, interval_s: float, heartbeat_s: float = 0.0
    ) -> AsyncGenerator[worker_pb2.CacheEvent, None]:
        """Cache changes, now and after each change of load, at most once in `interval_s`.

        The first event carries all that is cached. Without news an empty one comes after
        `heartbeat_s` (0: never), or after `interval_s` if that is longer.
        """
        silence_s = max(0.0, heartbeat_s - interval_s) if heartbeat_s else None
        watcher = _Watcher(self._cached)
        self._watchers.add(watcher)
        try:
            while True:
                last = self._closed
                yield watcher.event()
                if last:
                    return
                await asyncio.sleep(interval_s)  # bounds the rate; the next wait is for an event
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(silence_s):
                        await watcher.news.wait()
                watcher.news.clear()
        finally:
            self._watchers.discard(watcher)


class _Watcher:
    """What one watcher has not been told yet: the net effect, however far it is behind."""

    def __init__(self, cached: Iterable[int]) -> None:
        self.news = asyncio.Event()
        self._stored = dict.fromkeys(cached)
        self._evicted: dict[int, None] = {}
        self._cleared = True

    def take(self, changes: CacheChanges) -> None:
        """Adds one step's changes; what came and went unseen is left out."""
        for key in changes.evicted:
            if key in self._stored:
                del self._stored[key]
            else:
                self._evicted[key] = None
        for key in changes.stored:
            if key in self._evicted:
                del self._evicted[key]
            else:
                self._stored[key] = None

    def event(self) -> worker_pb2.CacheEvent:
        """All of it, which counts as told from now on."""
        event = worker_pb2.CacheEvent(
            stored=self._stored, evicted=self._evicted, cleared=self._cleared
        )
        self._stored, self._evicted, self._cleared = {}, {}, False
        return event


def _smooth(mean: float, value: float) -> float:
    return value if mean == 0 else mean + _SMOOTHING * (value - mean)


def load_proto(load: Load) -> worker_pb2.Load:
    """The engine's counts as a message."""
    return worker_pb2.Load(
        queue_tokens=load.queue_tokens,
        running=load.running,
        waiting=load.waiting,
        blocks_total=load.blocks_total,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_held=load.blocks_held,
        blocks_quarantined=load.blocks_quarantined,
        steps=load.steps,
        preemptions=load.preemptions,
    )
