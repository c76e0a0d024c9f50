"""Deadlines, and work that a cancellation waits for."""

import asyncio

import pytest

from baton.errors import DeadlineExceeded
from kvtransfer.deadline import Deadline, uninterrupted


def test_a_wait_is_the_shorter_of_deadline_and_cap():
    assert Deadline(100.0).left_s(5.0) == 5.0
    assert 0.0 < Deadline(1.0).left_s(5.0) <= 1.0
    with pytest.raises(DeadlineExceeded):
        Deadline(0.0).left_s(5.0)


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
