"""Work that a cancellation waits for."""

import asyncio

import pytest

from baton.net.tasks import uninterrupted


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
