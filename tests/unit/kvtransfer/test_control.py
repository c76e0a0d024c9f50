"""Calls over one stream: their order, their time, and what becomes of them when it breaks."""

import asyncio
import contextlib
import time
from contextlib import asynccontextmanager

import pytest

import kvtransfer.control
from baton.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvCorrupted,
    Overloaded,
    Stale,
    Unavailable,
)
from baton.net import rpc
from baton.v1 import handoff_pb2 as pb
from baton.v1.handoff_pb2_grpc import HandoffServiceStub, add_HandoffServiceServicer_to_server
from kvtransfer.control import Control, ControlServicer
from tests.proxy import Proxy
from tests.waiting import WAIT_S

READY, COMMIT, ABORT = pb.ReadyRequest(handoff_id="h"), pb.CommitRequest(), pb.AbortRequest()


@asynccontextmanager
async def served(**handle):
    """(the caller's end, the servicer, the address)"""
    server, servicer = rpc.server(), ControlServicer(handle)
    add_HandoffServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    control = Control(address)
    try:
        yield control, servicer, address
    finally:
        await control.close()
        await server.stop(0)


async def test_calls_are_answered_in_any_order_each_with_its_error():
    slow, seen = asyncio.Event(), []

    async def ready(request):
        seen.append(request.handoff_id)
        await slow.wait()
        return pb.ReadyResponse(block_ids=[3])

    async def commit(request):
        raise KvCorrupted("checksum: 1 != 2")

    async def abort(request):
        raise Overloaded("later", 1.5)

    async with served(ready=ready, commit=commit, abort=abort) as (control, _, _):
        first = asyncio.create_task(control.call(READY, 5.0))
        with pytest.raises(KvCorrupted, match="1 != 2"):
            await control.call(COMMIT, WAIT_S)
        with pytest.raises(Overloaded) as caught:
            await control.call(ABORT, WAIT_S)
        assert caught.value.retry_after_s == 1.5
        slow.set()
        assert (await first).block_ids == [3]
    assert seen == ["h"]


def never_answered():
    """(set when the call begins, set when it ends, what handles it)."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(request):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    return begun, ended, handle


async def committed(request):
    return pb.CommitResponse()


@pytest.mark.parametrize("how", ["in time", "cancelled"])
async def test_a_call_that_nobody_waits_for_is_cancelled_there_and_the_stream_goes_on(how):
    begun, ended, ready = never_answered()
    async with served(ready=ready, commit=committed) as (control, _, _):
        call = asyncio.create_task(control.call(READY, 1.0 if how == "in time" else WAIT_S))
        await asyncio.wait_for(begun.wait(), WAIT_S)
        stream = control._stream
        if how == "cancelled":
            call.cancel()
        with pytest.raises(DeadlineExceeded if how == "in time" else asyncio.CancelledError):
            await call
        await asyncio.wait_for(ended.wait(), WAIT_S)
        assert await control.call(COMMIT, WAIT_S) == pb.CommitResponse()
        assert control._stream is stream and not stream.waiting


async def test_a_stream_that_breaks_fails_what_waits_and_the_next_call_opens_another():
    begun, ended, ready = never_answered()
    async with served(ready=ready, commit=committed) as (control, servicer, _):
        call = asyncio.create_task(control.call(READY, WAIT_S))
        await asyncio.wait_for(begun.wait(), WAIT_S)
        (answers,) = servicer._streams
        answers.put_nowait(None)
        with pytest.raises(Unavailable, match="has ended"):
            await call
        await asyncio.wait_for(ended.wait(), WAIT_S)
        await control.call(COMMIT, WAIT_S)
        servicer.close_streams()  # the worker leaves
        with pytest.raises(Unavailable):
            while True:
                await control.call(COMMIT, WAIT_S)
    begun_at = time.monotonic()
    gone = Control("127.0.0.1:9")
    with pytest.raises(Unavailable):
        await gone.call(COMMIT, WAIT_S)
    assert time.monotonic() - begun_at < WAIT_S, "it is refused, and not waited for"
    await gone.close()


@pytest.mark.parametrize("found", ["by a call that waits", "by the next one"])
async def test_a_connection_that_has_fallen_silent_is_left_for_another_one(found):
    """Long before the time of calls is over, and before gRPC's own pings would find it."""
    begun, _, ready = never_answered()
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        _, _, address = await enter(served(ready=ready, commit=committed))
        proxy = await enter(Proxy(int(address.rpartition(":")[2])))
        control, calls = Control(proxy.address), []
        stack.push_async_callback(control.close)
        await control.call(COMMIT, WAIT_S)
        if found == "by a call that waits":
            calls.append(asyncio.create_task(control.call(READY, 2 * WAIT_S)))
            await asyncio.wait_for(begun.wait(), WAIT_S)
        (connection,) = proxy._connections
        proxy.hold(connection.caller)  # another one works
        calls.append(asyncio.create_task(control.call(COMMIT, 2 * WAIT_S)))
        async with asyncio.timeout(WAIT_S):
            for call in calls:
                with pytest.raises(Unavailable, match="silent"):
                    await call
            assert control.lost
            (silent,) = control._reading
            assert await control.call(COMMIT, WAIT_S) == pb.CommitResponse()
            assert not control.lost
            await asyncio.wait({silent})


@pytest.mark.parametrize("is_older", [False, True])
async def test_a_call_is_waited_for_while_the_other_end_answers_pings(monkeypatch, is_older):
    """An older worker does not know pings, and says so."""
    for name, value in (("_TICK_S", 0.01), ("_LOST_TICKS", 100), ("_PING_TICKS", 5)):
        monkeypatch.setattr(kvtransfer.control, name, value)
    pings, answer = 0, asyncio.Event()

    async def ping(request):
        nonlocal pings
        pings += 1
        if pings == 30:  # far more ticks than of one that is lost
            answer.set()
        if is_older:
            raise InvalidRequest("unknown kind of call", "call")
        return pb.PingResponse()

    async def ready(request):
        await answer.wait()
        return pb.ReadyResponse(block_ids=[3])

    async with served(ready=ready, ping=ping) as (control, _, _):
        assert (await control.call(READY, WAIT_S)).block_ids == [3]


@pytest.mark.parametrize("status", [InternalError("reset"), Overloaded("full", 1.0), Stale("old")])
async def test_a_stream_that_ends_with_any_status_is_no_answer_to_what_waits(status):
    async def broken(requests, answers):
        await anext(requests)
        answers.put_nowait(None)
        raise status

    async with served() as (control, servicer, _):
        servicer._take = broken
        with pytest.raises(Unavailable, match=str(status)):
            await control.call(ABORT, WAIT_S)


async def test_a_call_of_no_kind_is_refused_and_one_of_a_used_number_ends_the_stream():
    async def ready(request):
        await asyncio.Event().wait()

    async with served(ready=ready) as (_, _, address), rpc.channel(address) as channel:
        call = HandoffServiceStub(channel).Control()
        await call.write(pb.ControlRequest(call_id=4))
        answer = await call.read()
        assert (answer.call_id, answer.failure.error) == (4, InvalidRequest.__name__)
        for _ in range(2):
            await call.write(pb.ControlRequest(call_id=5, ready=READY))
        with pytest.raises(InvalidRequest, match="call 5 runs already"), rpc.translated():
            await call.read()
