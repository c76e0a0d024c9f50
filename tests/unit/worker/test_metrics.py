"""A worker's metrics of steps, transfers and reservations, and its load as watchers get it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import ClassVar

import pytest
from opentelemetry.context import Context

from baton.config import WorkerConfig
from baton.engine.blocks import CacheChanges
from baton.engine.loop import Progress, StepReport
from baton.engine.runner import Runner
from baton.engine.sequence_table import Load
from baton.errors import Stale
from baton.v1 import worker_pb2
from baton.worker.metrics import LoadTracker, WorkerMetrics, kind_of

LOAD = Load(0, 0, 0, 8, 8, 0, 0, 0, 1, 0)


def step(num_tokens: int, *sampled: bool, ended_ns: int = 5_000_000) -> StepReport:
    """A step whose sequences have sampled a token or not."""
    progress = [Progress(str(n), 1, (7,) if one else ()) for n, one in enumerate(sampled)]
    return StepReport(0, ended_ns, num_tokens, progress, LOAD)


def text(metrics: WorkerMetrics) -> list[str]:
    lines = metrics.render("")[1].decode().splitlines()
    return [line.removesuffix(".0") for line in lines]


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        (step(3, True, True, True), "decode"),
        (step(512, False), "prefill"),
        (step(100, True), "prefill"),  # the last chunk samples the first token
        (step(102, True, True, False), "mixed"),
        (step(150, False, False), "prefill"),
    ],
)
def test_what_a_step_computed(report: StepReport, kind: str) -> None:
    assert kind_of(report) == kind


def test_drafts_are_counted_and_make_no_step_a_prefill() -> None:
    progress = [Progress("a", 9, (7, 8, 9)), Progress("b", 1, (7,))]
    report = StepReport(0, 5_000_000, 6, progress, LOAD, num_proposed=4, num_accepted=2)
    assert kind_of(report) == "decode"
    assert kind_of(dataclasses.replace(report, num_tokens=66)) == "mixed"
    metrics = WorkerMetrics(WorkerConfig("decode"))
    assert 'baton_engine_drafts_total{right="yes"} 0' in text(metrics)
    metrics.stepped(report)
    metrics.stepped(report)
    page = text(metrics)
    assert 'baton_engine_drafts_total{right="yes"} 4' in page
    assert 'baton_engine_drafts_total{right="no"} 4' in page


def test_steps_are_measured_and_empty_ones_are_not() -> None:
    metrics = WorkerMetrics(WorkerConfig("decode"))
    metrics.stepped(step(2, True, True))
    metrics.stepped(step(0))
    page = text(metrics)
    assert 'baton_engine_step_duration_seconds_count{kind="decode"} 1' in page
    assert 'baton_engine_step_duration_seconds_bucket{kind="decode",le="0.004"} 0' in page
    assert 'baton_engine_step_duration_seconds_bucket{kind="decode",le="0.006"} 1' in page
    assert "baton_engine_batch_size_sum 2" in page
    assert "baton_engine_batch_size_count 1" in page


def test_transfers() -> None:
    metrics = WorkerMetrics(WorkerConfig("prefill"))
    stats = SimpleNamespace(
        num_bytes=3_000_000, transfer_s=0.02, wire_s=0.001, transport="shm", resends=1
    )
    metrics.transferred(stats, Context())
    with pytest.raises(Stale), metrics.transferring():
        raise Stale("gone")
    with pytest.raises(RuntimeError), metrics.transferring():
        raise RuntimeError("not a transfer's")
    page = text(metrics)
    assert 'baton_kv_transfer_io_bytes_total{transport="shm"} 3e+06' in page
    assert 'baton_kv_transfer_resends_total{transport="shm"} 1' in page
    assert 'baton_kv_transfer_duration_seconds_sum{transport="shm"} 0.02' in page
    name = "baton_kv_transfer_throughput_bytes_per_second"
    assert f'{name}_bucket{{le="2e+09",transport="shm"}} 0' in page
    assert f'{name}_bucket{{le="4e+09",transport="shm"}} 1' in page
    failures = [line for line in page if line.startswith("baton_kv_transfer_failures_total")]
    assert failures == ['baton_kv_transfer_failures_total{reason="Stale"} 1']


def test_reservations_by_outcome() -> None:
    metrics = WorkerMetrics(WorkerConfig("decode"))
    metrics.reserved("held")
    metrics.reserved("refused")
    page = text(metrics)
    for outcome, number in (("held", 1), ("started", 0), ("refused", 1), ("failed", 0)):
        assert f'baton_reservations_total{{outcome="{outcome}"}} {number}' in page
    with pytest.raises(AssertionError):
        metrics.reserved("lost")


@pytest.mark.parametrize("price", [0.0, 3_600_000.0])
def test_cost_grows_with_time(price: float) -> None:
    metrics = WorkerMetrics(WorkerConfig("decode", price_per_hour=price))
    (line,) = (one for one in text(metrics) if one.startswith("baton_worker_cost_total"))
    assert (float(line.split()[1]) > 0) == (price > 0)


class _OnGpu(Runner):
    """A runner that has computed some decode steps."""

    decode_rows: ClassVar = {"wanted": 10, "padding": 6, "wasted": 1}


def test_wasted_rows_are_counted_where_there_are_any() -> None:
    for kind, shown in ((Runner, False), (_OnGpu, True)):
        metrics = WorkerMetrics(WorkerConfig("decode"))
        metrics.observe_engine(worker_pb2.Load, kind.__new__(kind))
        assert ('baton_engine_gpu_rows_total{kind="padding"} 6' in text(metrics)) is shown
        metrics.close()


def cache_step(
    stored: tuple[int, ...] = (), evicted: tuple[int, ...] = (), tokens: int = 0, ms: int = 0
) -> StepReport:
    changes = CacheChanges(list(stored), list(evicted))
    return StepReport(0, ms * 1_000_000, tokens, [], LOAD, changes)


class Follower:
    """A watcher that applies the events it gets."""

    def __init__(self, tracker: LoadTracker) -> None:
        self.known: set[int] = set()
        self._events: AsyncGenerator[worker_pb2.CacheEvent, None] = tracker.watch(0.0)

    async def read(self) -> worker_pb2.CacheEvent:
        event = await anext(self._events)
        self.known = set() if event.cleared else self.known
        self.known -= set(event.evicted)
        self.known |= set(event.stored)
        return event

    async def close(self) -> None:
        await self._events.aclose()


async def test_the_first_event_has_all_that_is_cached() -> None:
    tracker = LoadTracker()
    tracker.update(cache_step((1, 2, 3)))
    tracker.update(cache_step((4,), (2,)))
    async with contextlib.aclosing(tracker.watch(0.0)) as events:
        event = await anext(events)
    assert event.cleared
    assert sorted(event.stored) == [1, 3, 4]


async def test_a_late_watcher_gets_the_net_effect() -> None:
    tracker = LoadTracker()
    tracker.update(cache_step((1,)))
    follower = Follower(tracker)
    await follower.read()
    for changes in (((2,), (1,)), ((1,), (2,)), ((3, 2), ()), ((), (3, 1)), ((1,), ()), ((), (1,))):
        tracker.update(cache_step(*changes))
    event = await follower.read()
    assert (list(event.stored), list(event.evicted)) == ([2], [1])
    assert follower.known == {2}
    tracker.update(cache_step((2,), (2,)))  # stored again in the step that evicted it
    await follower.read()
    assert follower.known == {2}
    await follower.close()


async def test_close_ends_a_watch_after_its_last_event() -> None:
    tracker = LoadTracker()
    follower = Follower(tracker)
    await follower.read()
    tracker.update(cache_step((7,)))
    tracker.close()
    await follower.read()
    assert follower.known == {7}
    assert await anext(follower._events, None) is None


async def test_without_changes_an_empty_event_is_a_heartbeat() -> None:
    tracker = LoadTracker()
    tracker.update(cache_step((1,)))
    async with contextlib.aclosing(tracker.watch(0.01, heartbeat_s=0.03)) as events:
        first = await anext(events)
        assert (first.cleared, list(first.stored)) == (True, [1])
        for _ in range(3):
            event = await asyncio.wait_for(anext(events), 10)
            assert event == worker_pb2.CacheEvent()
        tracker.update(cache_step((2,)))
        assert list((await asyncio.wait_for(anext(events), 10)).stored) == [2]


async def test_a_change_does_not_wait_for_the_next_heartbeat() -> None:
    tracker = LoadTracker()
    async with contextlib.aclosing(tracker.watch(0.0, heartbeat_s=3600)) as events:
        await anext(events)
        asyncio.get_running_loop().call_later(0.01, tracker.update, cache_step((2,)))
        assert list((await asyncio.wait_for(anext(events), 10)).stored) == [2]


def test_chunks_measure_prefill_speed_and_small_steps_decode() -> None:
    tracker = LoadTracker()
    tracker.update(cache_step(tokens=100, ms=50))
    assert (tracker.load.prefill_tokens_per_s, tracker.load.step_ms) == (2000, 0)
    tracker.update(cache_step(tokens=4, ms=10))
    assert (tracker.load.prefill_tokens_per_s, tracker.load.step_ms) == (2000, 10)
    assert 0.01 < tracker.mean_step_s < 0.05
    tracker.update(cache_step())
    assert tracker.load.step_ms == 10


def test_tokens_are_counted_since_start_and_drafts_only_if_right() -> None:
    tracker = LoadTracker()
    sampled = [Progress("a", 5, (0,)), Progress("b", 5), Progress("c", 5, (9,))]
    for tokens, progress in ((100, []), (3, sampled), (1, sampled[:1]), (0, [])):
        tracker.update(StepReport(0, 1, tokens, progress, LOAD))
    assert (tracker.load.tokens_computed, tracker.load.tokens_generated) == (104, 3)
    tracker, sampled = LoadTracker(), [Progress(name, 5, (1, 2, 3)) for name in "abcdefgh"]
    tracker.update(StepReport(0, 10_000_000, 40, sampled, LOAD, num_proposed=32, num_accepted=16))
    assert (tracker.load.tokens_computed, tracker.load.tokens_generated) == (24, 24)
    assert (tracker.load.prefill_tokens_per_s, tracker.load.step_ms) == (0, 10)
