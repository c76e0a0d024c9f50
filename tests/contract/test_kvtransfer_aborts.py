"""An Abort is answered in the end, and giving a handoff up does not wait for that."""

import asyncio
import time

import pytest

from baton.errors import Stale, Unavailable
from baton.v1 import handoff_pb2
from kvtransfer.links import Aborts

from .kvtransfer_parts import Decode, MemoryTransport, Times, slots

REQUEST = handoff_pb2.AbortRequest(handoff_id="h", reservation_token="token-h", incarnation="p")


@pytest.mark.parametrize("name", ["memory", "shm", "cuda_ipc"])
async def test_a_lost_abort_is_repeated_until_the_blocks_come_back(join, name):
    prefill, decode = await join(name, prefill={"abort_wait_s": 0.0})
    losses = Times(2, Unavailable("lost"))
    decode.before_call("abort", losses)
    async with prefill.opened(decode, 8, 1, 2) as handoff:
        handoff.send(0, slots(4, 5))
        await decode.asked()
        decode.cancel("h")
    assert decode.receiver.writing("h")  # quarantined, though the handoff is over at its sender
    await asyncio.wait_for(decode.held.ended.wait(), 10)
    assert losses.calls == 3
    assert not decode.receiver.writing("h")


async def test_giving_up_does_not_wait_for_a_peer_that_hangs(join):
    prefill, decode = await join("memory", prefill={"abort_wait_s": 0.1})
    hung = asyncio.Event()
    decode.before_call("abort", lambda request: hung.wait())
    async with prefill.opened(decode, 8, 1, 2) as handoff:
        handoff.send(0, slots(4, 5))
        await decode.asked()
        before = time.monotonic()
    assert time.monotonic() - before < 1.5  # a call alone would take two seconds
    assert "h" not in decode.held.reasons
    hung.set()
    await asyncio.wait_for(decode.held.ended.wait(), 10)


@pytest.mark.parametrize(
    ("error", "errors", "give_up_s", "count", "calls"),
    [
        (None, 0, 60.0, 1, range(1, 2)),
        (Stale("another sender"), 1, 60.0, 1, range(1, 2)),  # any answer ends it
        (ValueError("a bug"), 1, 60.0, 1, range(1, 2)),
        (Unavailable("no"), 1000, 0.5, 1, range(2, 1000)),  # patience ends
        (None, 0, 60.0, 20, range(20, 21)),  # messages to one peer share a channel
    ],
)
async def test_every_abort_ends_and_leaves_no_channel(error, errors, give_up_s, count, calls):
    async with Decode(MemoryTransport()) as decode:
        answers, aborts = Times(errors, error), Aborts(give_up_s=give_up_s)
        decode.before_call("abort", answers)
        for _ in range(count):
            aborts.send(f"127.0.0.1:{decode.port}", REQUEST, ())
        await asyncio.sleep(0)
        assert len(aborts._channels) == 1
        await asyncio.wait_for(asyncio.gather(*aborts._tasks), 10)
        assert answers.calls in calls
        assert not aborts._channels


async def test_closing_waits_shortly_and_ends_what_is_not_answered():
    aborts = Aborts()
    async with Decode(MemoryTransport()) as decode:
        address = f"127.0.0.1:{decode.port}"
        answers = Times(1, Unavailable("once"))
        decode.before_call("abort", answers)
        await asyncio.wait_for(aborts.send(address, REQUEST, ()), 10)
        await aborts.close()
        assert answers.calls == 2
    aborts = Aborts()
    tried = aborts.send(address, REQUEST, ())
    await asyncio.wait_for(aborts.close(), 3)  # a second for the last try, and slack
    assert tried.done()
    assert not aborts._channels and not aborts._tasks
