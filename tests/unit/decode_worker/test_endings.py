"""Every way a sequence ends on the decode worker frees its blocks and informs its router."""

import asyncio
import contextlib

import pytest

from baton import rpc
from baton.errors import InvalidRequest, Stale, TransferFailed, Unavailable
from baton.v1 import decode_pb2
from baton.worker import node
from decode_worker import events
from tests.unit.worker.running import (
    PATIENCE_S,
    Router,
    Worker,
    Writer,
    granted,
    offer_of,
    prompt,
    spec,
)


async def test_cancel_frees_in_any_state_even_if_its_caller_hangs_up(decode, router):
    for name in ("a", "b", "c", "d"):
        await router.reserve(spec(name, prompt(20)))
    await router.reserve(spec("runs", prompt(20), max_tokens=200), local=20)
    await router.event("runs")
    await router.cancel("unknown", "a", "a", "b", "runs")
    load = await decode.blocks()
    assert (load.running, load.blocks_held) == (0, 4)
    gate = decode.hold_engine()
    call = decode.decode.Cancel(decode_pb2.CancelRequest(handoff_ids=["c", "d"]))
    await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    gate.set()


async def test_a_lease_ends_by_itself(directory, store):
    """But not while a sender may write; and of what is to be sent again when that never comes."""
    async with Worker("decode", directory, store, lease_s=0.5) as decode, Router(decode) as router:
        writing = await granted(decode, router, "writes")
        again = Writer(decode, "again", await router.reserve(spec("again", prompt(20))))
        await again.fail_to_commit()
        await again.abort(resend=True)
        began = asyncio.get_running_loop().time()
        await router.reserve(spec("a", prompt(20)))
        for name in ("a", "again"):
            assert "lease" in (await router.event(name)).abort_reason
        assert 0.5 <= asyncio.get_running_loop().time() - began < 2.5
        with pytest.raises(Stale):
            await again.abort(resend=True)
        load = await decode.blocks()
        assert (load.blocks_held, load.blocks_quarantined) == (2, 0)
        await writing.abort()
        assert await decode.clean()


async def test_a_deadline_ends_a_request_in_any_state(decode, router):
    with contextlib.suppress(Stale):  # on a slow machine it may pass during the call
        await router.reserve(spec("reserved", prompt(20), time_left_ms=50))
    failed = spec("failed", prompt(20), time_left_ms=700)
    await Writer(decode, "failed", await router.reserve(failed)).fail_to_commit()
    for name in ("reserved", "failed"):
        assert "deadline" in (await router.event(name)).abort_reason
    await router.reserve(spec("runs", prompt(20), max_tokens=200, time_left_ms=700), local=20)
    gate = decode.hold_engine()  # at once: it would soon have generated all tokens
    try:
        while not (event := await router.event("runs")).abort_reason:
            assert not event.finish_reason
    finally:
        gate.set()
    assert "deadline" in event.abort_reason


async def test_a_stream_that_breaks_or_is_replaced_ends_its_routers_sequences_alone(decode):
    async with Router(decode, "stays") as stays:
        async with Router(decode, "leaves") as leaves:
            await leaves.reserve(spec("a", prompt(20), max_tokens=200), local=20)
            await leaves.reserve(spec("b", prompt(20)))
            await leaves.event("a")
            await stays.reserve(spec("c", prompt(20), max_tokens=100), local=20)
        assert len(await stays.tokens("c")) == 100
        assert await decode.clean()
        await stays.reserve(spec("d", prompt(20)))
        async with Router(decode, "stays") as again:
            with pytest.raises(Unavailable):
                await stays.ended
            assert await decode.clean()
            await again.reserve(spec("e", prompt(20)), local=20)
            assert len(await again.tokens("e")) == 4


async def test_a_router_that_does_not_read_is_cut_off_at_once(decode, monkeypatch):
    async with Router(decode, "fast") as fast:
        await fast.reserve(spec("c", prompt(20), max_tokens=50), local=20)
        assert len(await fast.tokens("c")) == 50
        monkeypatch.setattr(events, "MAX_BACKLOG", 3)
        streams = decode.node._streams
        mute = Router(decode, "mute")
        unread = streams.register(mute.stream_id, "mute")  # as a stream whose write is stuck
        await mute.reserve(spec("b", prompt(20)))
        await mute.reserve(spec("a", prompt(20), max_tokens=200), local=20)
        assert await decode.clean()
        assert mute.stream_id not in streams and fast.stream_id in streams
        assert [unread.get_nowait() for _ in range(unread.qsize())] == [None]
        assert (await decode.blocks()).steps < 150


async def test_blocks_under_a_write_are_quarantined_until_the_abort(decode, router):
    writer = await granted(decode, router)
    await router.cancel("a")
    load = await decode.blocks()
    assert (load.blocks_quarantined, load.blocks_held) == (2, 0)
    with pytest.raises(Stale):
        await writer.commit()
    await writer.abort()


async def test_a_dead_writers_blocks_come_back(decode, router):
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    for name in "ab":
        await granted(decode, router, name, process.pid)
    await router.cancel("a")
    assert (await decode.blocks()).blocks_quarantined == 2
    process.kill()
    await process.wait()
    await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    receiver = decode.node._receiver
    while receiver._tasks:
        await asyncio.wait(set(receiver._tasks))


async def test_a_commit_with_an_impossible_token_is_refused(decode, router):
    reserved = await router.reserve(spec("a", prompt(20)))
    reservations = decode.node._reservations
    with pytest.raises(InvalidRequest):
        await reservations.committed("a", reserved.reservation_token, 320)
    await router.cancel("a")


async def test_reservations_are_given_back_when_draining_takes_too_long(directory, store):
    """The last event is on the wire before the stream ends."""
    async with Worker("decode", directory, store, drain_s=0.5) as decode, Router(decode) as router:
        await router.reserve(spec("stuck", prompt(20)))
        await router.reserve(spec("runs", prompt(20), max_tokens=20), local=20)
        decode.stop()
        with pytest.raises(Unavailable, match="draining"):
            await router.reserve(spec("new", prompt(20)))
        assert len(await router.tokens("runs")) == 20
        with pytest.raises(Unavailable):
            await router.ended
        assert "draining" in (await router.event("stuck")).abort_reason
        await asyncio.wait_for(decode.life, PATIENCE_S)


async def test_a_routers_public_name_takes_nothing_of_it(decode, router):
    """Whoever opens a stream in its name gets an own one, and its sequences go on."""
    await router.reserve(spec("a", prompt(20), max_tokens=100), local=20)
    await router.event("a")
    stranger = Router(decode, router.router_id)
    stranger.stream_id = router.router_id
    async with stranger:
        assert len(await router.tokens("a")) > 90
    assert stranger.messages == []
    stranger.stream_id = ""
    with pytest.raises(InvalidRequest) as refused:
        async with stranger:
            await stranger.ended
    assert refused.value.field == "stream_id"


async def test_only_a_registered_prefill_worker_gets_a_link(decode, router, store, monkeypatch):
    offering = decode.handoff.Offer(offer_of(decode, "new"), timeout=PATIENCE_S)
    asyncio.get_running_loop().call_later(0.05, decode.knows_prefill, "new")
    assert (await offering).epoch > 0
    monkeypatch.setattr(node, "RECORD_WAIT_S", 0.05)
    for incarnation in ("unknown", decode.node.record.incarnation):
        offer = offer_of(decode, incarnation)
        with pytest.raises(TransferFailed, match="no prefill worker"), rpc.translated():
            await decode.handoff.Offer(offer, timeout=PATIENCE_S)
    # What was registered stays known while the registry is away.
    decode.knows_prefill("writer")
    store.stop()
    monkeypatch.setattr(decode, "knows_prefill", lambda *_: None)
    await (await granted(decode, router)).abort()
    store.start()


async def test_a_pid_in_a_message_proves_no_death(decode, router):
    """The fields' old numbers; a process that has ended would give up what the true one writes."""
    writer = await granted(decode, router)
    offer = offer_of(decode, "writer")
    host = decode.node.record.host_id.encode()
    offer.MergeFromString(
        bytes([3 << 3 | 2, len(host)]) + host + bytes([6 << 3]) + b"\xff\xff\xff\x01"
    )
    await decode.handoff.Offer(offer, timeout=PATIENCE_S)
    await asyncio.sleep(0.1)
    assert decode.node._receiver.writing("a")
    await writer.abort()
