"""Handoffs between two OS processes, one of which may be killed, or stop and go on later.

A sender that stops between its grant and the end of its put never writes into blocks that others
got.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.errors import Overloaded, TransferFailed, Unavailable
from kvtransfer.deadline import Deadline
from kvtransfer.pool import Digest
from tests.memory_registry import MemoryRegistry
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.worker.running import Router, Worker, prompt, spec
from tests.unit.worker.running import target as target_at
from tests.waiting import eventually

from .kvtransfer_parts import TRANSPORTS, Prefill, make_pool, register, slots, target

ROOT = Path(__file__).parents[2]
REMOTE = (9, 4, 5, 6, 20)
NUM_TOKENS = 40  # of the sender that stops: two and a half blocks


@contextlib.asynccontextmanager
async def peer(*arguments):
    """A process of `kvtransfer_peer` and a way to read its lines."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.contract.kvtransfer_peer", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
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
async def test_handoff_to_another_process_that_is_killed_then(name):
    """The next handoff, and a put into its memory, fail at once."""
    async with peer("decode", name) as (process, line), Prefill(TRANSPORTS[name]()) as prefill:
        register("d", int(await line()), process.pid)
        to = target("d", "h")
        stats = await prefill.hand_over(to, "h", slots(8, 1, 2), slots(10, 3, 8, 7))
        assert stats.transport == name
        assert await line() == expected_content(prefill.pool)
        link = await prefill.links.acquire(to, Deadline(5.0))
        process.kill()
        await process.wait()
        if link.transport.one_sided:
            with pytest.raises(TransferFailed, match="gone"):
                await link.put(slots(4, 1), slots(4, 4), prefill.pool.new_digest(), 1.0)
        prefill.links.release(link)
        to.reservation_token = "token-next"
        start = time.monotonic()
        with pytest.raises(TransferFailed):
            await prefill.hand_over(to, "next", slots(4, 1), timeout_s=30.0)
        assert time.monotonic() - start < 1.0
        with pytest.raises(Unavailable):
            await prefill.hand_over(to, "next", slots(4, 1))
        assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]


async def test_killed_sender_fails_the_receive_quickly():
    pool = make_pool(2)
    listener = TRANSPORTS["gloo"]().listen(pool, "p/1")
    async with peer("hang", listener.endpoint.hex()) as (process, line):
        await asyncio.to_thread(listener.accept, 30.0)
        assert await line() == "connected"
        posted, loop = asyncio.Event(), asyncio.get_running_loop()
        wake = lambda: loop.call_soon_threadsafe(posted.set)  # noqa: E731
        receive = asyncio.create_task(
            asyncio.to_thread(listener.receive, slots(4, 1), Digest(), 30.0, wake)
        )
        await asyncio.wait_for(posted.wait(), 10)
        start = time.monotonic()
        process.kill()
        with pytest.raises(TransferFailed):
            await receive
        assert time.monotonic() - start < 1.0
    listener.close()
    pool.area.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "LlamaForCausalLM", tokenizer=True)
    return path


def state_of(pid):
    """The kernel's letter for what the process does; T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Scene:
    """A decode worker's pool, the blocks under the write, and the content of all others."""

    def __init__(self, decode):
        self.decode, self.role = decode, decode.node
        self.pool = self.role._receiver._pool.tensor
        self.blocks = list(self.role._reservations._entries["h"].blocks.block_ids)
        self.others = [n for n in range(len(self.pool)) if n not in self.blocks]

    def others_untouched(self):
        return bool((self.pool[self.others] == self.before[self.others]).all())

    def written(self):
        """Tokens of the sender's ones that lie in the blocks under the write, in order."""
        ones = (self.pool[self.blocks] == 1).all(dim=-1)  # [blocks, layers, 2, heads, tokens]
        return int(ones.all(dim=1).all(dim=1).all(dim=1).sum())

    async def back_and_zero(self, within_s):
        none = lambda load: load.blocks_quarantined == 0  # noqa: E731
        await eventually(self.decode.blocks, none, "the blocks did not come back", within_s)
        assert bool((self.pool[self.blocks] == 0).all())
        assert self.others_untouched()

    async def hold_all_others(self, router):
        """Takes every block that can be had; returns the sequences' names."""
        await router.reserve(spec("x", prompt(111, start=3)))
        await router.reserve(spec("y", prompt(95, start=5)))
        entries = self.role._reservations._entries
        taken = {block for name in "xy" for block in entries[name].blocks.block_ids}
        assert taken == set(self.others)
        with pytest.raises(Overloaded):
            await router.reserve(spec("z", prompt(1, start=9)))
        self.before = self.pool.clone()
        return ["x", "y"]


@contextlib.asynccontextmanager
async def stopped_sender(decode, router, where):
    """A sender's process that has stopped itself, after which its handoff was cancelled."""
    reserved = await router.reserve(spec("h", prompt(NUM_TOKENS, start=1)))
    scene = Scene(decode)
    to = target_at(decode, reserved).SerializeToString().hex()
    record = decode.node.record.SerializeToString().hex()
    async with peer("stop", where, str(NUM_TOKENS), to, record) as (process, line):
        decode.knows_prefill("stopped", process.pid)
        state = lambda: asyncio.to_thread(state_of, process.pid)  # noqa: E731
        await eventually(state, "T".__eq__, "did not stop", 60.0)
        await router.cancel("h")
        assert (await decode.blocks()).blocks_quarantined == len(scene.blocks)
        yield process, line, scene


@pytest.mark.parametrize("where", ["before", "amid"])
async def test_a_sender_that_goes_on_later_writes_into_quarantined_blocks_alone(directory, where):
    async with Worker("decode", directory, MemoryRegistry()) as decode, Router(decode) as router:
        await router.reserve(spec("first", prompt(100)), local=100)
        tokens = await router.tokens("first")  # leaves content in the prefix cache
        async with stopped_sender(decode, router, where) as (process, line, scene):
            early = scene.written()
            assert (early == 0) == (where == "before")
            assert early < NUM_TOKENS
            taken = await scene.hold_all_others(router)
            gate = threading.Event()
            decode.node.engine.submit(gate.wait)  # so that the late bytes can be seen at all
            process.send_signal(signal.SIGCONT)
            written = lambda: asyncio.to_thread(scene.written)  # noqa: E731
            await eventually(written, NUM_TOKENS.__eq__, "no late write", 30.0)
            assert scene.others_untouched()
            gate.set()
            assert await line() == "Stale"
            await scene.back_and_zero(10.0)  # Aborts are repeated at most 5 s apart
            assert await asyncio.wait_for(process.wait(), 60) == 0
        await router.cancel(*taken)
        await router.reserve(spec("again", prompt(100), cache_salt="x"), local=100)
        assert await router.tokens("again") == tokens
        assert await decode.clean()
