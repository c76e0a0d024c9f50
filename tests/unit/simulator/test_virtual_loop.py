"""A virtual clock: sleeps and deadlines take no time and keep their order."""

import asyncio
import time

import pytest

from baton.simulator import virtual_loop


def test_sleeps_and_deadlines_of_days_take_no_time():
    async def sleep():
        loop, woke = asyncio.get_running_loop(), []

        async def until(at):
            await asyncio.sleep(at)
            woke.append(loop.time())

        await asyncio.gather(*(until(hour * 3600.0) for hour in (24, 1, 5)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return *woke, loop.time()

    began = time.process_time()
    hours = [found / 3600 for found in virtual_loop.run(sleep())]
    assert hours == pytest.approx([1, 5, 24, 25])
    assert time.process_time() - began < 60


def test_what_never_happens_is_an_error_and_no_endless_wait():
    async def wait():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never happens"):
        virtual_loop.run(wait())


def test_timers_of_one_time_run_in_the_order_of_their_setting():
    async def wait():
        loop, ran = asyncio.get_running_loop(), []
        for number in range(50):
            loop.call_at(5.0, ran.append, number)
        loop.call_at(4.0, ran.append, "first")
        await asyncio.sleep(6)
        return ran

    assert virtual_loop.run(wait()) == ["first", *range(50)]


def test_cancelled_timers_do_not_run_and_are_not_kept():
    async def wait():
        loop, ran = asyncio.get_running_loop(), []
        timers = [loop.call_at(1e6 + number, ran.append, number) for number in range(900)]
        for timer in timers[1:]:
            timer.cancel()
            assert timer.cancelled()
        for number in range(900):
            loop.call_at(2e6, ran.append, number).cancel()
        kept = len(loop._timers)
        await asyncio.sleep(3e6)
        return ran, kept

    ran, kept = virtual_loop.run(wait())
    assert ran == [0]
    assert kept < 1000


def test_an_exception_of_a_callback_ends_the_loop():
    async def wait():
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(2)

    with pytest.raises(ZeroDivisionError):
        virtual_loop.run(wait())
