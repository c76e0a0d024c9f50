"""A worker's load as others see it: the engine's counts plus measured rates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.engine.reports import Load, StepReport
from baton.v1 import worker_pb2

_SMOOTHING = 0.2  # weight of the newest step in the running means
_PREFILL_ROWS = 32  # a step with at least this many rows tells of prefill speed


class LoadMeter:
    """Follows step reports; wakes watchers when something changed. Event-loop thread only."""

    def __init__(self) -> None:
        self.load = worker_pb2.Load()
        self._watchers: set[_Watcher] = set()

    def update(self, report: StepReport) -> None:
        """Takes in one step."""
        load = load_proto(report.load)
        load.prefill_tokens_per_s = self.load.prefill_tokens_per_s
        load.step_ms = self.load.step_ms
        step_s = (report.ended_ns - report.started_ns) / 1e9
        if report.num_tokens >= _PREFILL_ROWS and step_s > 0:
            rate = report.num_tokens / step_s
            load.prefill_tokens_per_s = _smooth(load.prefill_tokens_per_s, rate)
        elif report.num_tokens:
            load.step_ms = _smooth(load.step_ms, step_s * 1e3)
        self.load = load
        for watcher in self._watchers:
            watcher.cache.stored.extend(report.cache.stored)
            watcher.cache.evicted.extend(report.cache.evicted)
        self.wake()

    def wake(self) -> None:
        """Tells every watcher that there is news."""
        for watcher in self._watchers:
            watcher.news.set()

    async def watch(self, interval_s: float) -> AsyncIterator[worker_pb2.CacheEvent]:
        """Cache changes, now and after each change of load, at most once in `interval_s`."""
        watcher = _Watcher()
        watcher.news.set()
        self._watchers.add(watcher)
        try:
            while True:
                await watcher.news.wait()
                watcher.news.clear()
                cache, watcher.cache = watcher.cache, worker_pb2.CacheEvent()
                yield cache
                await asyncio.sleep(interval_s)  # bounds the rate; the next wait is for an event
        finally:
            self._watchers.discard(watcher)


class _Watcher:
    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.cache = worker_pb2.CacheEvent()


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
