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


async def test_cancellation_comes_after_the_work_is_done():
    go, done = asyncio.Event(), []

    async def work():
        await go.wait()
        done.append(True)

    task = asyncio.create_task(uninterrupted(work()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_results_and_errors_pass_through():
    async def work(error):
        if error:
            raise ValueError("no")
        return 3

    assert await uninterrupted(work(False)) == 3
    with pytest.raises(ValueError, match="no"):
        await uninterrupted(work(True))
