"""Every way a sequence ends on the decode worker frees its blocks, and the right router hears."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton import rpc
from baton.errors import InvalidRequest, Stale, TransferFailed, Unavailable
from baton.registry.memory import MemoryStore
from baton.v1 import common_pb2, decode_pb2, handoff_pb2
from baton.worker import node
from decode_worker import events
from tests.unit.worker.running import PATIENCE_S, Router, Worker, prompt, spec


@pytest.fixture
async def decode(directory: Path, store: MemoryStore) -> AsyncIterator[Worker]:
    async with Worker("decode", directory, store) as worker:
        yield worker


class Writer:
    """A prefill process that has been granted a one-sided write, and does nothing more."""

    def __init__(self, decode: Worker, pid: int = 0) -> None:
        self._decode, self._pid = decode, pid

    async def grant(self, handoff_id: str, reserved: Any, num_tokens: int) -> None:
        self._named = {
            "handoff_id": handoff_id,
            "reservation_token": reserved.reservation_token,
            "incarnation": "writer",
        }
        record = self._decode.node.record
        self._decode.knows_prefill("writer", self._pid)
        offer = handoff_pb2.OfferRequest(
            incarnation="writer", target_incarnation=record.incarnation,
            kv=record.kv, transports=[common_pb2.TRANSPORT_SHM],
        )  # fmt: skip
        self._epoch = (await self._decode.handoff.Offer(offer, timeout=PATIENCE_S)).epoch
        ready = handoff_pb2.ReadyRequest(
            **self._named, epoch=self._epoch, first_token=0, num_tokens=num_tokens
        )
        await self._decode.handoff.Ready(ready, timeout=PATIENCE_S)

    async def commit(self, first_token_id: int = 5) -> None:
        request = handoff_pb2.CommitRequest(
            **self._named, epoch=self._epoch, num_tokens=20, first_token_id=first_token_id
        )
        with rpc.translated():
            await self._decode.handoff.Commit(request, timeout=PATIENCE_S)

    async def abort(self) -> None:
        request = handoff_pb2.AbortRequest(**self._named, reason="test")
        with rpc.translated():
            await self._decode.handoff.Abort(request, timeout=PATIENCE_S)


async def test_cancel_of_a_reserved_one(decode: Worker) -> None:
    async with Router(decode) as router:
        await router.reserve(spec("a", prompt(20)))
        assert (await decode.blocks()).blocks_held == 2
        await router.cancel("a")
        assert await decode.clean()


async def test_cancel_of_one_that_decodes(decode: Worker) -> None:
    async with Router(decode) as router:
        await router.reserve(spec("a", prompt(20), max_tokens=200), local=20)
        await router.event("a")
        await router.cancel("a")
        load = await decode.blocks()
        assert (load.running, load.blocks_held) == (0, 0)


async def test_cancel_of_unknown_and_known_ones_together(decode: Worker) -> None:
    async with Router(decode) as router:
        for name in ("a", "b"):
            await router.reserve(spec(name, prompt(20)))
        await router.cancel("nobody", "a", "a", "b")
        assert await decode.clean()


async def test_a_cancel_whose_caller_hangs_up_still_frees(decode: Worker) -> None:
    async with Router(decode) as router:
        for name in ("a", "b"):
            await router.reserve(spec(name, prompt(20)))
        gate = threading.Event()
        decode.node.engine.submit(gate.wait)
        call = decode.decode.Cancel(decode_pb2.CancelRequest(handoff_ids=["a", "b"]))
        await asyncio.wait_for(decode.node.role.idle(), PATIENCE_S)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        gate.set()
        assert await decode.clean()


async def test_a_lease_ends_by_itself(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store, lease_s=0.5) as decode, Router(decode) as router:
        await router.reserve(spec("a", prompt(20)))
        assert "lease" in (await router.event("a")).abort_reason
        assert await decode.clean()


async def test_a_deadline_ends_a_reservation_before_its_lease(decode: Worker) -> None:
    async with Router(decode) as router:
        with contextlib.suppress(Stale):  # on a slow machine it may pass during the call
            await router.reserve(spec("a", prompt(20), time_left_ms=50))
        assert "deadline" in (await router.event("a")).abort_reason
        assert await decode.clean()


async def test_a_deadline_ends_decoding(decode: Worker) -> None:
    async with Router(decode) as router:
        gate = threading.Event()
        await router.reserve(spec("a", prompt(20), max_tokens=200, time_left_ms=2000), local=20)
        await router.event("a")
        decode.node.engine.submit(gate.wait)
        while not (event := await router.event("a")).abort_reason:
            assert not event.finish_reason
        gate.set()
        assert "deadline" in event.abort_reason
        assert await decode.clean()


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
        streams = decode.node.role._streams  # type: ignore[attr-defined]
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
    streams = decode.node.role._streams  # type: ignore[attr-defined]
    mute = Router(decode, "mute")
    unread = streams.register(mute.stream_id, "mute")  # as a stream whose write is stuck
    await mute.reserve(spec("b", prompt(20)))
    await mute.reserve(spec("a", prompt(20), max_tokens=200), local=20)
    assert await decode.clean()
    assert mute.stream_id not in streams
    assert [unread.get_nowait() for _ in range(unread.qsize())] == [None]
    assert (await decode.blocks()).steps < 100


async def test_blocks_under_a_write_are_quarantined_until_the_abort(decode: Worker) -> None:
    async with Router(decode) as router:
        writer = Writer(decode)
        await writer.grant("a", await router.reserve(spec("a", prompt(20))), 20)
        await router.cancel("a")
        load = await decode.blocks()
        assert (load.blocks_quarantined, load.blocks_held) == (2, 0)
        await writer.abort()
        assert await decode.clean()


async def test_an_abort_that_overtakes_the_release(decode: Worker) -> None:
    async with Router(decode) as router:
        writer = Writer(decode)
        await writer.grant("a", await router.reserve(spec("a", prompt(20))), 20)
        gate = threading.Event()
        decode.node.engine.submit(gate.wait)
        cancelling = asyncio.create_task(router.cancel("a"))
        await asyncio.wait_for(decode.node.role.idle(), PATIENCE_S)
        await writer.abort()
        gate.set()
        await cancelling
        assert await decode.clean()


async def test_a_dead_writers_blocks_come_back(decode: Worker) -> None:
    async with Router(decode) as router:
        process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        writer = Writer(decode, process.pid)
        await writer.grant("a", await router.reserve(spec("a", prompt(20))), 20)
        await writer.grant("b", await router.reserve(spec("b", prompt(20))), 20)
        await router.cancel("a")
        assert (await decode.blocks()).blocks_quarantined == 2
        process.kill()
        await process.wait()
        await asyncio.wait_for(decode.node.role.idle(), PATIENCE_S)
        role = decode.node.role
        while role._receiver._tasks:  # type: ignore[attr-defined]
            await asyncio.wait(set(role._receiver._tasks))  # type: ignore[attr-defined]
        assert await decode.clean()


async def test_a_granted_writer_keeps_its_lease(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store, lease_s=0.5) as decode, Router(decode) as router:
        writer = Writer(decode)
        await writer.grant("long", await router.reserve(spec("long", prompt(20))), 20)
        await router.reserve(spec("other", prompt(20)))
        assert "lease" in (await router.event("other")).abort_reason
        assert (await decode.blocks()).blocks_held == 2
        await writer.abort()
        assert await decode.clean()


async def test_commit_after_cancel_is_stale(decode: Worker) -> None:
    async with Router(decode) as router:
        writer = Writer(decode)
        await writer.grant("a", await router.reserve(spec("a", prompt(20))), 20)
        await router.cancel("a")
        with pytest.raises(Stale):
            await writer.commit()
        await writer.abort()
        assert await decode.clean()


async def test_a_commit_with_an_impossible_token_is_refused(decode: Worker) -> None:
    async with Router(decode) as router:
        reserved = await router.reserve(spec("a", prompt(20)))
        role = decode.node.role
        with pytest.raises(InvalidRequest):
            await role._reservations.committed("a", reserved.reservation_token, 320)  # type: ignore[attr-defined]
        await router.cancel("a")
        assert await decode.clean()


async def test_reservations_are_given_back_when_draining_takes_too_long(
    directory: Path, store: MemoryStore
) -> None:
    """The last event is on the wire before the stream ends."""
    async with Worker("decode", directory, store, drain_s=1.0) as decode, Router(decode) as router:
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


async def test_a_routers_public_name_takes_nothing_of_it(decode: Worker) -> None:
    """Whoever opens a stream in its name gets an own one, and its sequences go on."""
    async with Router(decode) as router:
        await router.reserve(spec("a", prompt(20), max_tokens=100), local=20)
        await router.event("a")
        stranger = Router(decode, router.router_id)
        stranger.stream_id = router.router_id
        async with stranger:
            assert len(await router.tokens("a")) > 90
        assert stranger.messages == []
        assert await decode.clean()


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
    record = decode.node.record
    for incarnation in ("nobody", record.incarnation):
        offer = handoff_pb2.OfferRequest(
            incarnation=incarnation, target_incarnation=record.incarnation,
            kv=record.kv, transports=record.transports,
        )  # fmt: skip
        with pytest.raises(TransferFailed, match="no prefill worker"), rpc.translated():
            await decode.handoff.Offer(offer, timeout=PATIENCE_S)


async def test_a_prefill_worker_that_has_just_come_gets_its_link(decode: Worker) -> None:
    record = decode.node.record
    offer = handoff_pb2.OfferRequest(
        incarnation="new", target_incarnation=record.incarnation,
        kv=record.kv, transports=record.transports,
    )  # fmt: skip
    offering = decode.handoff.Offer(offer, timeout=PATIENCE_S)
    asyncio.get_running_loop().call_later(0.1, decode.knows_prefill, "new")
    assert (await offering).epoch > 0


async def test_links_go_on_while_the_registry_is_away(decode: Worker, store: MemoryStore) -> None:
    async with Router(decode) as router:
        writer = Writer(decode)
        decode.knows_prefill("writer")
        store.stop()
        decode.knows_prefill = lambda *_: None  # type: ignore[method-assign]
        await writer.grant("a", await router.reserve(spec("a", prompt(20))), 20)
        await writer.abort()
        store.start()
        assert await decode.clean()


async def test_a_pid_in_a_message_proves_no_death(decode: Worker) -> None:
    """The fields' old numbers; a process that has ended would give up what the true one writes."""
    async with Router(decode) as router:
        writer = Writer(decode)
        await writer.grant("a", await router.reserve(spec("a", prompt(20))), 20)
        record = decode.node.record
        offer = handoff_pb2.OfferRequest(
            incarnation="writer", target_incarnation=record.incarnation,
            kv=record.kv, transports=record.transports,
        )  # fmt: skip
        host = record.host_id.encode()
        offer.MergeFromString(
            bytes([3 << 3 | 2, len(host)]) + host + bytes([6 << 3]) + b"\xff\xff\xff\x01"
        )
        await decode.handoff.Offer(offer, timeout=PATIENCE_S)
        await asyncio.sleep(0.1)
        assert decode.node.role._receiver.writing("a")  # type: ignore[attr-defined]
        await writer.abort()
        assert await decode.clean()
