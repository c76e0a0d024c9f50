"""Tasks that run beside others, and waits that are bounded."""

import asyncio

import pytest

from baton.net.tasks import running, uninterrupted, wait_at_most


@pytest.mark.parametrize("fails", [False, True])
async def test_cancellation_comes_after_the_work_is_done(fails):
    go, done = asyncio.Event(), []

    async def work():
        await go.wait()
        done.append(True)
        if fails:
            raise ValueError("no")

    task = asyncio.create_task(uninterrupted(work()))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert done == [True]
    assert isinstance(cancelled.value.__cause__, ValueError) == fails


async def test_a_task_runs_beside_a_block_and_ends_with_it():
    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with running(work(), "work"):
        await asyncio.sleep(0)
        assert not ended.is_set()
    assert ended.is_set()


async def test_a_bounded_wait_says_whether_it_ended_in_time():
    waiting, done = asyncio.Event(), asyncio.Event()
    done.set()
    assert await wait_at_most(60.0, done.wait())
    assert not await wait_at_most(0.001, waiting.wait())
