"""Handoffs between two OS processes, one of which may be killed, or stop and go on later.

A sender that stops between its grant and the end of its put never writes into blocks that others
got.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.errors import Overloaded, TransferFailed, Unavailable
from kvtransfer.deadline import Deadline
from tests.memory_registry import MemoryRegistry
from tests.namespaces import OWN_PIDS, needs_namespaces
from tests.processes import running
from tests.unit.worker.running import Router, Worker, directory, prompt, spec
from tests.unit.worker.running import target as target_at
from tests.waiting import WAIT_S, eventually

from .kvtransfer_parts import TRANSPORTS, Prefill, register, slots, target

__all__ = ["directory"]

NUM_TOKENS = 40  # of the sender that stops: two and a half blocks


def peer(*arguments, first=()):
    """A process of `kvtransfer_peer`."""
    return running(*first, sys.executable, "-m", "tests.contract.kvtransfer_peer", *arguments)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("gloo", ()),
        *((name, ()) for name in ("shm", "cuda_ipc")),
        *(pytest.param(name, OWN_PIDS, marks=needs_namespaces) for name in ("shm", "cuda_ipc")),
    ],
)
async def test_handoff_to_another_process_that_is_killed_then(name, first):
    """The next handoff, and a put into its memory, fail at once."""
    async with (
        peer("decode", name, first=first) as process,
        Prefill(TRANSPORTS[name]()) as prefill,
    ):
        port = int(await process.line())
        (pid,) = [one.pid for one in psutil.Process(process.pid).children()] or [process.pid]
        register("d", port, pid)
        to = target("d", "h")
        stats = await prefill.hand_over(to, "h", slots(8, 1, 2), slots(10, 3, 8, 7))
        assert stats.transport == name
        link = await prefill.links.acquire(to, Deadline(WAIT_S))
        os.kill(pid, signal.SIGKILL)
        await process.process.wait()
        if link.transport.one_sided:
            with pytest.raises(TransferFailed, match="gone"):
                await link.put(slots(4, 1), slots(4, 4), link.new_checksum(), 1.0)
        prefill.links.release(link)
        to.reservation_token = "token-next"
        start = time.monotonic()
        with pytest.raises(TransferFailed):
            await prefill.hand_over(to, "next", slots(4, 1), timeout_s=WAIT_S)
        assert time.monotonic() - start < WAIT_S
        with pytest.raises(Unavailable):
            await prefill.hand_over(to, "next", slots(4, 1))
        assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]


def state_of(pid):
    """The kernel's letter for what the process does; T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("where", ["before", "amid"])
async def test_a_sender_that_goes_on_later_writes_into_quarantined_blocks_alone(directory, where):
    """No other request gets them, and they come back as zeroes."""
    async with Worker("decode", directory, MemoryRegistry()) as decode, Router(decode) as router:
        reserved = await router.reserve(spec("h", prompt(NUM_TOKENS, start=1)))
        pool, entries = decode.decoding._links.pools[0].tensor, decode.decoding._handoffs._handoffs
        blocks = list(entries["h"].block_ids)
        others = [n for n in range(len(pool)) if n not in blocks]

        def written():
            """Tokens of the sender's ones that lie in the blocks under the write, in order."""
            ones = (pool[blocks] == 1).all(dim=-1)  # [blocks, layers, 2, heads, tokens]
            return int(ones.all(dim=1).all(dim=1).all(dim=1).sum())

        to = target_at(decode, reserved).SerializeToString().hex()
        record = decode.node.record.SerializeToString().hex()
        async with peer("stop", where, str(NUM_TOKENS), to, record) as process:
            decode.knows_prefill("stopped")
            state = lambda: asyncio.to_thread(state_of, process.pid)  # noqa: E731
            await eventually(state, "T".__eq__, "did not stop")
            await router.cancel("h")
            assert (await decode.blocks()).blocks_quarantined == len(blocks)
            assert written() < NUM_TOKENS and (written() == 0) == (where == "before")
            await router.reserve(spec("x", prompt(111, start=3)))
            await router.reserve(spec("y", prompt(95, start=5)))
            assert {n for name in "xy" for n in entries[name].block_ids} == set(others)
            with pytest.raises(Overloaded):
                await router.reserve(spec("z", prompt(1, start=9)))
            before = pool[others].clone()
            gate = decode.hold_engine()  # so that the late bytes can be seen at all
            os.kill(process.pid, signal.SIGCONT)
            late = lambda: asyncio.to_thread(written)  # noqa: E731
            await eventually(late, NUM_TOKENS.__eq__, "no late write")
            gate.set()
            assert await process.line() == "Stale"
            none = lambda load: load.blocks_quarantined == 0  # noqa: E731
            # Aborts are repeated at most 5 s apart.
            await eventually(decode.blocks, none, "the blocks did not come back")
            assert not pool[blocks].any()
            assert bool((pool[others] == before).all())
            assert await asyncio.wait_for(process.process.wait(), WAIT_S) == 0
        await router.cancel("x", "y")
        assert await decode.clean()
