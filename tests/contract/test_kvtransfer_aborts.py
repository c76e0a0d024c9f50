"""An Abort is answered in the end, and giving a handoff up does not wait for that."""

import asyncio
import time

import pytest

from baton.errors import Stale, Unavailable
from baton.v1 import handoff_pb2
from kvtransfer.links import Aborts

from .kvtransfer_parts import Decode, MemoryTransport, joined, slots


@pytest.fixture
def request_():
    return handoff_pb2.AbortRequest(handoff_id="h", reservation_token="token-h", incarnation="p")


class Answers:
    """Wraps the receiver's `abort`: raises `errors` in turn, and counts calls."""

    def __init__(self, decode, *errors):
        self.errors, self.calls, self.answered = list(errors), 0, asyncio.Event()
        abort = decode.receiver.abort

        async def answer(request):
            self.calls += 1
            if self.errors:
                raise self.errors.pop(0)
            response = await abort(request)
            self.answered.set()
            return response

        decode.receiver.abort = answer


@pytest.mark.parametrize("name", ["memory", "shm", "cuda_ipc"])
async def test_a_lost_abort_is_repeated_until_the_blocks_come_back(name):
    async with joined(name, prefill={"abort_wait_s": 0.0}) as (prefill, decode):
        answers = Answers(decode, Unavailable("lost"), Unavailable("lost again"))
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(0, slots(4, 5))
            await decode.asked()
            del decode.held.blocks["h"]
            decode.receiver.forget("h")
        assert decode.receiver.writing("h")  # quarantined, though the handoff is over at its sender
        await asyncio.wait_for(decode.held.ended.wait(), 10)
        assert answers.calls == 3
        assert not decode.receiver.writing("h")


async def test_giving_up_does_not_wait_for_a_peer_that_hangs():
    async with joined("memory", prefill={"abort_wait_s": 0.1}) as (prefill, decode):
        hung = asyncio.Event()
        abort = decode.receiver.abort

        async def hang(request):
            await hung.wait()
            return await abort(request)

        decode.receiver.abort = hang
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(0, slots(4, 5))
            await decode.asked()
            before = time.monotonic()
        assert time.monotonic() - before < 1.5  # a call alone would take two seconds
        assert "h" not in decode.held.reasons
        hung.set()
        await asyncio.wait_for(decode.held.ended.wait(), 10)


async def all_answered(aborts):
    await asyncio.wait_for(asyncio.gather(*aborts._tasks), 10)


@pytest.mark.parametrize("error", [None, Stale("another sender"), ValueError("a bug")])
async def test_any_answer_ends_it(request_, error):
    async with Decode(MemoryTransport()) as decode:
        answers = Answers(decode, *([error] if error else []))
        aborts = Aborts()
        aborts.send(f"127.0.0.1:{decode.port}", request_, ())
        await all_answered(aborts)
        assert answers.calls == 1
        assert not aborts._channels


async def test_patience_ends(request_):
    async with Decode(MemoryTransport()) as decode:
        answers = Answers(decode, *[Unavailable("no")] * 1000)
        aborts = Aborts(give_up_s=0.5)
        tried = aborts.send(f"127.0.0.1:{decode.port}", request_, ())
        await asyncio.wait_for(tried, 10)
        assert answers.calls
        await all_answered(aborts)
        assert 1 < answers.calls < 1000
        assert not aborts._channels


async def test_closing_waits_shortly_and_ends_what_is_not_answered(request_):
    aborts = Aborts()
    async with Decode(MemoryTransport()) as decode:
        port = decode.port
        answers = Answers(decode, Unavailable("once"))
        await asyncio.wait_for(aborts.send(f"127.0.0.1:{port}", request_, ()), 10)
        await aborts.close()
        assert answers.answered.is_set() and answers.calls == 2
    aborts = Aborts()
    tried = aborts.send(f"127.0.0.1:{port}", request_, ())
    await asyncio.wait_for(aborts.close(), 3)  # a second for the last try, and slack
    assert tried.done()
    assert not aborts._channels and not aborts._tasks


async def test_messages_to_one_peer_share_a_channel(request_):
    async with Decode(MemoryTransport()) as decode:
        answers, aborts = Answers(decode), Aborts()
        for _ in range(20):
            aborts.send(f"127.0.0.1:{decode.port}", request_, ())
        await asyncio.sleep(0)
        assert len(aborts._channels) == 1
        await all_answered(aborts)
        assert answers.calls == 20
        assert not aborts._channels
