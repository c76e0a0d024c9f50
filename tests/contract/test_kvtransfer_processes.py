"""The contract of a transport between two OS processes, one of which may be killed."""

import asyncio
import contextlib
import hashlib
import os
import sys
import time
from pathlib import Path

import pytest

from baton.errors import TransferFailed, Unavailable
from kvtransfer.deadline import Deadline
from kvtransfer.pool import Digest

from .kvtransfer_parts import TRANSPORTS, Prefill, make_pool, register, slots, target

PEER = Path(__file__).parent / "kvtransfer_peer.py"
REMOTE = (9, 4, 5, 6, 20)


@contextlib.asynccontextmanager
async def peer(*arguments):
    """The peer process and a way to read its lines."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PEER.parents[2])}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PEER),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )

    async def line():
        return (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()

    try:
        yield process, line
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


def expected_content(source):
    pool = make_pool(2)
    for here, there, fill in zip((1, 2, 3, 8, 7), REMOTE, (4, 4, 4, 4, 2), strict=True):
        pool.tensor[there, ..., :fill, :] = source.tensor[here, ..., :fill, :]
    content = hashlib.sha256(pool.tensor.numpy()).hexdigest()
    pool.area.close()
    return content


@pytest.mark.parametrize("name", ["shm", "gloo", "cuda_ipc"])
async def test_handoff_to_another_process(name):
    async with peer("decode", name) as (process, line), Prefill(TRANSPORTS[name]()) as prefill:
        register("d", int(await line()), process.pid)
        to = target("d", "h")
        stats = await prefill.hand_over(to, "h", slots(8, 1, 2), slots(10, 3, 8, 7))
        assert stats.transport == name
        assert await line() == expected_content(prefill.pool)
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 20) == 0


@pytest.mark.parametrize("name", ["shm", "gloo", "cuda_ipc"])
async def test_killed_receiver_fails_the_handoff_at_once(name):
    async with peer("decode", name) as (process, line), Prefill(TRANSPORTS[name]()) as prefill:
        register("d", int(await line()), process.pid)
        to = target("d", "h")
        await prefill.hand_over(to, "h", slots(18, 1, 2, 3, 8, 7))
        process.kill()
        await process.wait()
        to.reservation_token = "token-next"
        start = time.monotonic()
        with pytest.raises(TransferFailed):
            await prefill.hand_over(to, "next", slots(4, 1), timeout_s=30.0)
        assert time.monotonic() - start < 1.0
        with pytest.raises(Unavailable):
            await prefill.hand_over(to, "next", slots(4, 1))
        assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]


@pytest.mark.parametrize("name", ["shm", "cuda_ipc"])
async def test_killed_receiver_fails_a_put_into_its_memory(name):
    async with peer("decode", name) as (process, line), Prefill(TRANSPORTS[name]()) as prefill:
        register("d", int(await line()), process.pid)
        to = target("d", "h")
        await prefill.hand_over(to, "h", slots(18, 1, 2, 3, 8, 7))
        link = await prefill.links.acquire(to, Deadline(5.0))
        process.kill()
        await process.wait()
        with pytest.raises(TransferFailed, match="gone"):
            await link.put(slots(4, 1), slots(4, 4), prefill.pool.new_digest(), 1.0)
        prefill.links.release(link)


async def test_killed_sender_fails_the_receive_quickly():
    pool = make_pool(2)
    listener = TRANSPORTS["gloo"]().listen(pool, "p/1")
    async with peer("hang", listener.endpoint.hex()) as (process, line):
        await asyncio.to_thread(listener.accept, 30.0)
        assert await line() == "connected"
        posted = asyncio.Event()
        wake = posted.set
        loop = asyncio.get_running_loop()
        receive = asyncio.ensure_future(
            asyncio.to_thread(
                listener.receive,
                slots(4, 1),
                Digest(),
                30.0,
                lambda: loop.call_soon_threadsafe(wake),
            )
        )
        await asyncio.wait_for(posted.wait(), 10)
        start = time.monotonic()
        process.kill()
        with pytest.raises(TransferFailed):
            await receive
        assert time.monotonic() - start < 1.0
    listener.close()
    pool.area.close()
