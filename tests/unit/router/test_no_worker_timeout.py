"""How long a request waits for workers that are not there."""

import asyncio

import pytest

from baton.errors import Overloaded, Unavailable
from router.dispatch.failover import NoWorkerTimeout


def nobody(recovery):
    with pytest.raises(Overloaded, match="nobody"), recovery.placing():
        raise Unavailable("nobody", 1.0)


async def test_the_clock_runs_out_with_what_was_missing():
    with pytest.raises(Unavailable, match="nobody") as caught:
        async with NoWorkerTimeout(0.05) as recovery:
            nobody(recovery)
            await asyncio.sleep(30)
    assert caught.value.retry_after_s == 1.0


async def test_the_last_word_counts_and_the_first_starts_the_clock():
    with pytest.raises(Unavailable, match="second"):
        async with NoWorkerTimeout(0.05) as recovery:
            nobody(recovery)
            with pytest.raises(Overloaded), recovery.placing():
                raise Unavailable("second")
            await asyncio.sleep(30)


@pytest.mark.parametrize("full", [True, False])
async def test_workers_that_came_back_stop_the_clock(full):
    async with NoWorkerTimeout(0.05) as recovery:
        nobody(recovery)
        if full:
            with pytest.raises(Overloaded, match="full"), recovery.placing():
                raise Overloaded("full")
        else:
            with recovery.placing():
                pass
        await asyncio.sleep(0.1)


async def test_without_a_missing_worker_there_is_no_clock():
    async with NoWorkerTimeout(0.0):
        await asyncio.sleep(0.02)


async def test_other_errors_and_cancellation_pass():
    with pytest.raises(ValueError, match="mine"):
        async with NoWorkerTimeout(0.05) as recovery:
            nobody(recovery)
            raise ValueError("mine")

    async def waits():
        async with NoWorkerTimeout(30) as recovery:
            nobody(recovery)
            await asyncio.sleep(30)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
