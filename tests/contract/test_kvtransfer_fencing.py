"""A prefill process that stops and goes on later never writes into blocks that others got.

Two real processes over shared memory: a whole decode worker here, a sender there that stops itself
between its grant and the end of its put.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from baton.errors import Overloaded
from baton.registry.memory import MemoryStore
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.worker.running import PATIENCE_S, Router, Worker, prompt, spec, target
from tests.waiting import eventually

SENDER = Path(__file__).parent / "kvtransfer_stopping_sender.py"
NUM_TOKENS = 40  # two and a half blocks


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "LlamaForCausalLM", tokenizer=True)
    return path


@contextlib.asynccontextmanager
async def stopped_sender(decode, reserved, where):
    """The sender's process, once it has stopped itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SENDER.parents[2])}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SENDER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        decode.knows_prefill("stopped", process.pid)
        order = {
            "target": target(decode, reserved).SerializeToString().hex(),
            "decode": decode.node.record.SerializeToString().hex(),
            "num_tokens": NUM_TOKENS,
            "where": where,
        }
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await eventually(
            lambda: asyncio.to_thread(state_of, process.pid), "T".__eq__, "did not stop", 60.0
        )
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


def state_of(pid):
    """The kernel's letter for what the process does; T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Scene:
    """The decode worker's pool, the blocks under the write, and the content of all others."""

    def __init__(self, decode):
        self.decode, self.role = decode, decode.node
        self.pool = self.role._receiver._pool.tensor
        self.blocks = list(self.role._reservations._entries["h"].blocks.block_ids)
        self.others = [n for n in range(len(self.pool)) if n not in self.blocks]

    def remember(self):
        self.before = self.pool.clone()

    def others_untouched(self):
        return bool((self.pool[self.others] == self.before[self.others]).all())

    def written(self):
        """Tokens of the sender's ones that lie in the blocks under the write, in order."""
        ones = (self.pool[self.blocks] == 1).all(dim=-1)  # [blocks, layers, 2, heads, tokens]
        return int(ones.all(dim=1).all(dim=1).all(dim=1).sum())

    async def back_and_zero(self, within_s):
        await eventually(
            self.decode.blocks,
            lambda load: load.blocks_quarantined == 0,
            "the blocks did not come back",
            within_s,
        )
        assert bool((self.pool[self.blocks] == 0).all())

    async def hold_all_others(self, router):
        """Takes every block that can be had; returns the sequences' names."""
        await router.reserve(spec("x", prompt(111, start=3)))
        await router.reserve(spec("y", prompt(95, start=5)))
        entries = self.role._reservations._entries
        taken = {block for name in "xy" for block in entries[name].blocks.block_ids}
        assert taken == set(self.others)
        with pytest.raises(Overloaded):
            await router.reserve(spec("z", prompt(1, start=9)))
        return ["x", "y"]


@pytest.mark.parametrize("where", ["before", "amid"])
async def test_a_sender_that_goes_on_later_writes_into_quarantined_blocks_alone(directory, where):
    async with Worker("decode", directory, MemoryStore()) as decode, Router(decode) as router:
        await router.reserve(spec("first", prompt(100)), local=100)
        tokens = await router.tokens("first")  # leaves content in the prefix cache
        reserved = await router.reserve(spec("h", prompt(NUM_TOKENS, start=1)))
        scene = Scene(decode)
        async with stopped_sender(decode, reserved, where) as process:
            await router.cancel("h")
            assert (await decode.blocks()).blocks_quarantined == len(scene.blocks)
            early = scene.written()
            assert (early == 0) == (where == "before")
            assert early < NUM_TOKENS
            taken = await scene.hold_all_others(router)
            scene.remember()

            gate = threading.Event()
            decode.node.engine.submit(gate.wait)  # so that the late bytes can be seen at all
            process.send_signal(signal.SIGCONT)
            await eventually(
                lambda: asyncio.to_thread(scene.written), NUM_TOKENS.__eq__, "no late write", 30.0
            )
            assert scene.others_untouched()
            gate.set()
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"Stale\n"
            await scene.back_and_zero(10.0)  # Aborts are repeated at most 5 s apart
            assert scene.others_untouched()
            assert await asyncio.wait_for(process.wait(), 60) == 0
        await router.cancel(*taken)
        await router.reserve(spec("again", prompt(100), cache_salt="x"), local=100)
        assert await router.tokens("again") == tokens
        assert await decode.clean()


@pytest.mark.parametrize("where", ["before", "amid"])
async def test_a_stopped_sender_that_is_killed_gives_the_blocks_back(directory, where):
    async with Worker("decode", directory, MemoryStore()) as decode, Router(decode) as router:
        reserved = await router.reserve(spec("h", prompt(NUM_TOKENS, start=1)))
        scene = Scene(decode)
        async with stopped_sender(decode, reserved, where) as process:
            await router.cancel("h")
            assert (await decode.blocks()).blocks_quarantined == len(scene.blocks)
            taken = await scene.hold_all_others(router)
            scene.remember()
            process.kill()
            await asyncio.wait_for(process.wait(), PATIENCE_S)
            await scene.back_and_zero(3.0)  # its pidfd reports the exit at once
            assert scene.others_untouched()
        await router.cancel(*taken)
        assert await decode.clean()
