"""Every way a sequence ends on the decode worker frees its blocks and informs its router."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from baton import rpc
from baton.errors import InvalidRequest, Stale, TransferFailed, Unavailable
from baton.registry.memory import MemoryStore
from baton.v1 import decode_pb2, handoff_pb2, prefill_pb2
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
    target,
)


async def test_cancel_of_unknown_reserved_and_running_ones_together(
    decode: Worker, router: Router
) -> None:
    for name in ("a", "b"):
        await router.reserve(spec(name, prompt(20)))
    assert (await decode.blocks()).blocks_held
    await router.reserve(spec("runs", prompt(20), max_tokens=200), local=20)
    await router.event("runs")
    await router.cancel("nobody", "a", "a", "b", "runs")
    load = await decode.blocks()
    assert (load.running, load.blocks_held) == (0, 0)


async def test_a_cancel_whose_caller_hangs_up_still_frees(decode: Worker, router: Router) -> None:
    for name in ("a", "b"):
        await router.reserve(spec(name, prompt(20)))
    gate = threading.Event()
    decode.node.engine.submit(gate.wait)
    call = decode.decode.Cancel(decode_pb2.CancelRequest(handoff_ids=["a", "b"]))
    await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    gate.set()


async def test_a_lease_ends_by_itself(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store, lease_s=0.5) as decode, Router(decode) as router:
        began = asyncio.get_running_loop().time()
        await router.reserve(spec("a", prompt(20)))
        assert "lease" in (await router.event("a")).abort_reason
        assert 0.5 <= asyncio.get_running_loop().time() - began < 2.5
        assert await decode.clean()


async def test_a_deadline_ends_a_reservation_before_its_lease(
    decode: Worker, router: Router
) -> None:
    with contextlib.suppress(Stale):  # on a slow machine it may pass during the call
        await router.reserve(spec("a", prompt(20), time_left_ms=50))
    assert "deadline" in (await router.event("a")).abort_reason


async def test_a_deadline_ends_decoding(decode: Worker, router: Router) -> None:
    gate = threading.Event()
    await router.reserve(spec("a", prompt(20), max_tokens=200, time_left_ms=700), local=20)
    decode.node.engine.submit(gate.wait)  # at once: it would soon have generated all tokens
    try:
        while not (event := await router.event("a")).abort_reason:
            assert not event.finish_reason
    finally:
        gate.set()
    assert "deadline" in event.abort_reason


async def test_a_broken_stream_ends_its_routers_sequences_alone(decode: Worker) -> None:
    async with Router(decode, "stays") as stays:
        async with Router(decode, "leaves") as leaves:
            await leaves.reserve(spec("a", prompt(20), max_tokens=200), local=20)
            await leaves.reserve(spec("b", prompt(20)))
            await leaves.event("a")
            await stays.reserve(spec("c", prompt(20), max_tokens=100), local=20)
        assert len(await stays.tokens("c")) == 100
        assert await decode.clean()


async def test_a_second_stream_gives_up_what_the_first_carried(decode: Worker) -> None:
    async with Router(decode) as first:
        await first.reserve(spec("a", prompt(20)))
        async with Router(decode) as second:
            with pytest.raises(Unavailable):
                await first.ended
            assert await decode.clean()
            await second.reserve(spec("b", prompt(20)), local=20)
            assert len(await second.tokens("b")) == 4


async def test_a_router_that_does_not_read_is_cut_off(
    decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Router(decode, "slow") as slow, Router(decode, "fast") as fast:
        await slow.reserve(spec("a", prompt(20), max_tokens=200))
        await fast.reserve(spec("b", prompt(20), max_tokens=50), local=20)
        monkeypatch.setattr(events, "MAX_BACKLOG", 0)  # nothing can be kept for later
        streams = decode.node._streams  # type: ignore[attr-defined]
        assert not streams.send(slow.stream_id, [decode_pb2.SequenceEvent(handoff_id="a")])
        monkeypatch.undo()
        with pytest.raises(Unavailable):
            await slow.ended
        assert len(await fast.tokens("b")) == 50
        assert await decode.clean()


async def test_cutting_off_does_not_wait_for_the_router_to_read(
    decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_BACKLOG", 3)
    streams = decode.node._streams  # type: ignore[attr-defined]
    mute = Router(decode, "mute")
    unread = streams.register(mute.stream_id, "mute")  # as a stream whose write is stuck
    await mute.reserve(spec("b", prompt(20)))
    await mute.reserve(spec("a", prompt(20), max_tokens=200), local=20)
    assert await decode.clean()
    assert mute.stream_id not in streams
    assert [unread.get_nowait() for _ in range(unread.qsize())] == [None]
    assert (await decode.blocks()).steps < 100


async def test_blocks_under_a_write_are_quarantined_until_the_abort(
    decode: Worker, router: Router
) -> None:
    writer = await granted(decode, router)
    await router.cancel("a")
    load = await decode.blocks()
    assert (load.blocks_quarantined, load.blocks_held) == (2, 0)
    await writer.abort()


async def test_an_abort_that_overtakes_the_release(decode: Worker, router: Router) -> None:
    writer = await granted(decode, router)
    gate = threading.Event()
    decode.node.engine.submit(gate.wait)
    cancelling = asyncio.create_task(router.cancel("a"))
    await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    await writer.abort()
    gate.set()
    await cancelling


async def test_a_dead_writers_blocks_come_back(decode: Worker, router: Router) -> None:
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    for name in "ab":
        await granted(decode, router, name, process.pid)
    await router.cancel("a")
    assert (await decode.blocks()).blocks_quarantined == 2
    process.kill()
    await process.wait()
    await asyncio.wait_for(decode.node.idle(), PATIENCE_S)
    role = decode.node
    while role._receiver._tasks:  # type: ignore[attr-defined]
        await asyncio.wait(set(role._receiver._tasks))  # type: ignore[attr-defined]


async def test_a_granted_writer_keeps_its_lease(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store, lease_s=0.5) as decode, Router(decode) as router:
        writer = await granted(decode, router, "long")
        await router.reserve(spec("other", prompt(20)))
        assert "lease" in (await router.event("other")).abort_reason
        assert (await decode.blocks()).blocks_held == 2
        await writer.abort()
        assert await decode.clean()


async def test_commit_after_cancel_is_stale(decode: Worker, router: Router) -> None:
    writer = await granted(decode, router)
    await router.cancel("a")
    with pytest.raises(Stale):
        await writer.commit()
    await writer.abort()


async def test_a_commit_with_an_impossible_token_is_refused(decode: Worker, router: Router) -> None:
    reserved = await router.reserve(spec("a", prompt(20)))
    role = decode.node
    with pytest.raises(InvalidRequest):
        await role._reservations.committed("a", reserved.reservation_token, 320)  # type: ignore[attr-defined]
    await router.cancel("a")


async def test_reservations_are_given_back_when_draining_takes_too_long(
    directory: Path, store: MemoryStore
) -> None:
    """The last event is on the wire before the stream ends."""
    async with Worker("decode", directory, store, drain_s=0.5) as decode, Router(decode) as router:
        await router.reserve(spec("stuck", prompt(20)))
        await router.reserve(spec("runs", prompt(20), max_tokens=20), local=20)
        decode.node._stop.set()
        with pytest.raises(Unavailable, match="draining"):
            await router.reserve(spec("new", prompt(20)))
        assert len(await router.tokens("runs")) == 20
        with pytest.raises(Unavailable):
            await router.ended
        assert "draining" in (await router.event("stuck")).abort_reason
        await asyncio.wait_for(decode.life, PATIENCE_S)


async def test_a_routers_public_name_takes_nothing_of_it(decode: Worker, router: Router) -> None:
    """Whoever opens a stream in its name gets an own one, and its sequences go on."""
    await router.reserve(spec("a", prompt(20), max_tokens=100), local=20)
    await router.event("a")
    stranger = Router(decode, router.router_id)
    stranger.stream_id = router.router_id
    async with stranger:
        assert len(await router.tokens("a")) > 90
    assert stranger.messages == []


async def test_a_stream_without_an_id_is_refused(decode: Worker) -> None:
    nameless = Router(decode)
    nameless.stream_id = ""
    with pytest.raises(InvalidRequest) as refused:
        async with nameless:
            await nameless.ended
    assert refused.value.field == "stream_id"


async def test_only_a_registered_prefill_worker_gets_a_link(
    decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "RECORD_WAIT_S", 0.05)
    for incarnation in ("nobody", decode.node.record.incarnation):
        offer = offer_of(decode, incarnation)
        with pytest.raises(TransferFailed, match="no prefill worker"), rpc.translated():
            await decode.handoff.Offer(offer, timeout=PATIENCE_S)


async def test_a_prefill_worker_that_has_just_come_gets_its_link(decode: Worker) -> None:
    offer = offer_of(decode, "new")
    offering = decode.handoff.Offer(offer, timeout=PATIENCE_S)
    asyncio.get_running_loop().call_later(0.05, decode.knows_prefill, "new")
    assert (await offering).epoch > 0


async def test_links_go_on_while_the_registry_is_away(
    decode: Worker, router: Router, store: MemoryStore
) -> None:
    decode.knows_prefill("writer")
    store.stop()
    decode.knows_prefill = lambda *_: None  # type: ignore[method-assign]
    writer = await granted(decode, router)
    await writer.abort()
    store.start()


async def test_a_pid_in_a_message_proves_no_death(decode: Worker, router: Router) -> None:
    """The fields' old numbers; a process that has ended would give up what the true one writes."""
    writer = await granted(decode, router)
    offer = offer_of(decode, "writer")
    host = decode.node.record.host_id.encode()
    offer.MergeFromString(
        bytes([3 << 3 | 2, len(host)]) + host + bytes([6 << 3]) + b"\xff\xff\xff\x01"
    )
    await decode.handoff.Offer(offer, timeout=PATIENCE_S)
    await asyncio.sleep(0.1)
    assert decode.node._receiver.writing("a")  # type: ignore[attr-defined]
    await writer.abort()


# A reservation outlives a transfer that failed, for as long as its lease and no longer.


async def test_a_failed_commit_leaves_the_blocks_reserved_and_unwritten(
    decode: Worker, router: Router
) -> None:
    writer = Writer(decode, "a", await router.reserve(spec("a", prompt(20))))
    await writer.fail_to_commit()
    load = await decode.blocks()
    assert (load.blocks_held, load.blocks_quarantined) == (2, 0)
    await writer.abort(resend=True)
    await writer.fail_to_commit()  # the second attempt is granted the same blocks
    assert (await decode.blocks()).blocks_held == 2
    await router.cancel("a")
    assert (await decode.blocks()).blocks_quarantined == 0


async def test_the_lease_ends_what_is_never_sent_again(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store, lease_s=0.5) as decode, Router(decode) as router:
        writer = Writer(decode, "a", await router.reserve(spec("a", prompt(20))))
        await writer.fail_to_commit()
        await writer.abort(resend=True)
        assert "lease" in (await router.event("a")).abort_reason
        assert await decode.clean()
        with pytest.raises(Stale):
            await writer.abort(resend=True)


async def test_an_abort_for_good_ends_what_was_to_be_sent_again(
    decode: Worker, router: Router
) -> None:
    writer = Writer(decode, "a", await router.reserve(spec("a", prompt(20))))
    await writer.fail_to_commit()
    await writer.abort(resend=True)
    await writer.abort(resend=False)


async def test_corrupted_kv_costs_a_resend_and_no_token(
    decode: Worker, directory: Path, store: MemoryStore
) -> None:
    receiver = decode.node._receiver  # type: ignore[attr-defined]
    commit, corrupted = receiver.commit, []

    async def corrupting(request: handoff_pb2.CommitRequest) -> Any:
        if not corrupted:
            block = receiver._incoming["a"].reserved.block_ids[0]
            receiver._pool.tensor[block] = float("nan")
            corrupted.append(block)
        return await commit(request)

    receiver.commit = corrupting
    wanted = spec("a", prompt(40), 6)
    async with Worker("prefill", directory, store) as prefill, Router(decode) as router:
        request = prefill_pb2.PrefillRequest(
            sequence=wanted, target=target(decode, await router.reserve(wanted))
        )
        call = prefill.prefill.Prefill(request, timeout=PATIENCE_S)
        responses = [message async for message in call]
        tokens = [responses[1].first_token.token_id, *await router.tokens("a")]
        assert responses[-1].HasField("committed") and corrupted
        await router.reserve(spec("alone", prompt(40), 6, cache_salt="other"), local=40)
        assert tokens == await router.tokens("alone")
        assert await decode.clean() and await prefill.clean()


async def test_a_deadline_ends_a_reservation_that_waits_for_a_resend(
    decode: Worker, router: Router
) -> None:
    wanted = spec("a", prompt(20), time_left_ms=700)
    writer = Writer(decode, "a", await router.reserve(wanted))
    await writer.fail_to_commit()
    event = await asyncio.wait_for(router.event("a"), PATIENCE_S)
    assert "deadline" in event.abort_reason
