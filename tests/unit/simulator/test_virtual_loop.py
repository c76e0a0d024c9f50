"""A virtual clock: sleeps and deadlines take no time and keep their order."""

import asyncio
import time

import pytest

from baton.simulator import virtual_loop


def test_a_day_of_sleeps_takes_no_time():
    async def sleep():
        loop, woke = asyncio.get_running_loop(), []

        async def until(at):
            await asyncio.sleep(at)
            woke.append(loop.time())

        await asyncio.gather(*(until(hour * 3600.0) for hour in (24, 1, 5)))
        return woke

    began = time.process_time()
    assert virtual_loop.run(sleep()) == pytest.approx([3600, 5 * 3600, 24 * 3600])
    assert time.process_time() - began < 60


def test_deadlines_pass_by_the_virtual_clock():
    async def wait():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual_loop.run(wait()) == pytest.approx(1000)


def test_what_never_happens_is_an_error_and_no_endless_wait():
    async def wait():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never happens"):
        virtual_loop.run(wait())
