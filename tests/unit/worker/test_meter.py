"""What watchers are told adds up to what is cached, however late they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from baton.engine.blocks import CacheChanges
from baton.engine.loop import Progress, StepReport
from baton.engine.sequence_table import Load
from baton.v1 import worker_pb2
from baton.worker.meter import LoadMeter

LOAD = Load(0, 0, 0, 8, 8, 0, 0, 0, 1, 0)


def step(
    stored: tuple[int, ...] = (), evicted: tuple[int, ...] = (), tokens: int = 0, ms: int = 0
) -> StepReport:
    changes = CacheChanges(list(stored), list(evicted))
    return StepReport(0, ms * 1_000_000, tokens, [], LOAD, changes)


class Follower:
    """A watcher that applies what it is told."""

    def __init__(self, meter: LoadMeter) -> None:
        self.known: set[int] = set()
        self._events: AsyncGenerator[worker_pb2.CacheEvent, None] = meter.watch(0.0)

    async def read(self) -> worker_pb2.CacheEvent:
        event = await anext(self._events)
        self.known = set() if event.cleared else self.known
        self.known -= set(event.evicted)
        self.known |= set(event.stored)
        return event

    async def close(self) -> None:
        await self._events.aclose()


async def test_the_first_event_has_all_that_is_cached() -> None:
    meter = LoadMeter()
    meter.update(step((1, 2, 3)))
    meter.update(step((4,), (2,)))
    async with contextlib.aclosing(meter.watch(0.0)) as events:
        event = await anext(events)
    assert event.cleared
    assert sorted(event.stored) == [1, 3, 4]


async def test_a_late_watcher_is_told_the_net_effect() -> None:
    meter = LoadMeter()
    meter.update(step((1,)))
    follower = Follower(meter)
    await follower.read()
    for changes in (((2,), (1,)), ((1,), (2,)), ((3, 2), ()), ((), (3, 1)), ((1,), ()), ((), (1,))):
        meter.update(step(*changes))
    event = await follower.read()
    assert (list(event.stored), list(event.evicted)) == ([2], [1])
    assert follower.known == {2}
    await follower.close()


async def test_stored_again_in_the_step_that_evicted_it() -> None:
    meter = LoadMeter()
    meter.update(step((1,)))
    follower = Follower(meter)
    await follower.read()
    meter.update(step((1,), (1,)))
    await follower.read()
    assert follower.known == {1}
    await follower.close()


async def test_close_ends_a_watch_after_its_news() -> None:
    meter = LoadMeter()
    follower = Follower(meter)
    await follower.read()
    meter.update(step((7,)))
    meter.close()
    await follower.read()
    assert follower.known == {7}
    assert await anext(follower._events, None) is None


async def test_without_news_an_empty_event_is_a_sign_of_life() -> None:
    meter = LoadMeter()
    meter.update(step((1,)))
    async with contextlib.aclosing(meter.watch(0.01, heartbeat_s=0.03)) as events:
        first = await anext(events)
        assert (first.cleared, list(first.stored)) == (True, [1])
        for _ in range(3):
            event = await asyncio.wait_for(anext(events), 10)
            assert event == worker_pb2.CacheEvent()
        meter.update(step((2,)))
        assert list((await asyncio.wait_for(anext(events), 10)).stored) == [2]


async def test_news_does_not_wait_for_the_next_sign_of_life() -> None:
    meter = LoadMeter()
    async with contextlib.aclosing(meter.watch(0.0, heartbeat_s=3600)) as events:
        await anext(events)
        asyncio.get_running_loop().call_later(0.01, meter.update, step((2,)))
        assert list((await asyncio.wait_for(anext(events), 10)).stored) == [2]


def test_chunks_tell_of_prefill_speed_and_small_steps_of_decode() -> None:
    meter = LoadMeter()
    meter.update(step(tokens=100, ms=50))
    assert (meter.load.prefill_tokens_per_s, meter.load.step_ms) == (2000, 0)
    meter.update(step(tokens=4, ms=10))
    assert (meter.load.prefill_tokens_per_s, meter.load.step_ms) == (2000, 10)
    assert 0.01 < meter.mean_step_s < 0.05
    meter.update(step())
    assert meter.load.step_ms == 10


def test_tokens_are_counted_since_start() -> None:
    meter = LoadMeter()
    drawn = [Progress("a", 5, (0,)), Progress("b", 5), Progress("c", 5, (9,))]
    for tokens, progress in ((100, []), (3, drawn), (1, drawn[:1]), (0, [])):
        meter.update(StepReport(0, 1, tokens, progress, LOAD))
    assert (meter.load.tokens_computed, meter.load.tokens_generated) == (104, 3)


def test_drafts_count_if_they_were_right_and_are_no_prompt() -> None:
    meter = LoadMeter()
    drawn = [Progress(name, 5, (1, 2, 3)) for name in "abcdefgh"]
    meter.update(StepReport(0, 10_000_000, 40, drawn, LOAD, num_proposed=32, num_accepted=16))
    assert (meter.load.tokens_computed, meter.load.tokens_generated) == (24, 24)
    assert (meter.load.prefill_tokens_per_s, meter.load.step_ms) == (0, 10)
