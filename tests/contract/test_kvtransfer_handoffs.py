"""Handoffs from a prefill to a decode side over real gRPC, for every transport."""

import asyncio
import threading

import pytest

from baton import rpc
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvCorrupted,
    KvMismatch,
    Overloaded,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.v1 import common_pb2
from baton.v1 import handoff_pb2 as pb
from kvtransfer import sender
from kvtransfer.deadline import Deadline
from kvtransfer.receiver import ReservedBlocks
from tests.waiting import eventually

from .kvtransfer_parts import (
    BLOCK_SIZE,
    DESCRIPTOR,
    TOKEN_BYTES,
    TRANSPORTS,
    Decode,
    Prefill,
    expect_only,
    joined,
    register,
    slots,
)

every_transport = pytest.mark.parametrize("name", list(TRANSPORTS))


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv-")}


@every_transport
async def test_chunk_by_chunk(name):
    async with joined(name) as (prefill, decode):
        to = decode.reserve("h", 18, 9, 4, 5, 6, 20)
        stats = await prefill.hand_over(to, "h", slots(8, 1, 2), slots(8, 3, 8), slots(2, 7))
        local, remote = slots(18, 1, 2, 3, 8, 7), slots(18, 9, 4, 5, 6, 20)
        expect_only(prefill.pool, local, decode.pool, remote, decode.before)
        assert decode.held.committed_tokens == {"h": 7}
        assert not decode.receiver.writing("h")
        assert (stats.num_bytes, stats.chunks) == (18 * TOKEN_BYTES, 3)
        assert stats.transport == name and stats.hidden_s < stats.wire_s
        [pair] = prefill.links.status()
        assert (pair.prefill, pair.decode, pair.state) == ("p", "d", "OPEN")
        assert pair.sent_bytes == stats.num_bytes
        assert pair.sent_ms == pytest.approx(stats.wire_s * 1e3)
    assert not threads()


@every_transport
async def test_what_was_sent_before_the_last_chunk_counts_as_hidden(name):
    async with joined(name) as (prefill, decode):
        async with prefill.opened(decode, 12, 9, 4, 5) as handoff:
            handoff.send(0, slots(8, 1, 2))

            async def sent_bytes():
                return [pair.sent_bytes for pair in prefill.links.status()]

            await eventually(sent_bytes, any, "the first chunk was not put")
            await asyncio.sleep(0.05)  # the put is over; a moment later what follows it is, too
            handoff.send(8, slots(4, 3))
            handoff.conclude(12, 7)
            assert decode.held.committed_tokens == {}
            stats = await handoff.committed()
        assert decode.held.committed_tokens == {"h": 7}
        assert 0 < stats.hidden_s < stats.wire_s


@every_transport
async def test_cached_blocks_are_neither_sent_nor_touched(name):
    async with joined(name) as (prefill, decode):
        to = decode.reserve("h", 14, 9, 4, 5, 6, cached=8)
        stats = await prefill.hand_over(to, "h", slots(6, 3, 8))
        expect_only(prefill.pool, slots(6, 3, 8), decode.pool, slots(6, 5, 6), decode.before)
        assert stats.num_bytes == 6 * TOKEN_BYTES


@every_transport
async def test_many_handoffs_at_once_share_one_link(name):
    async with joined(name) as (prefill, decode):
        targets = [decode.reserve(f"h{n}", 8, 2 * n, 2 * n + 1) for n in range(10)]
        await asyncio.gather(
            *(
                prefill.hand_over(to, f"h{n}", slots(4, n), slots(4, n + 10))
                for n, to in enumerate(targets)
            )
        )
        assert len(decode.held.committed_tokens) == 10
        assert [pair.epoch for pair in prefill.links.status()] == [1]


@every_transport
async def test_abort_in_the_middle_leaves_nothing_and_the_next_works(name):
    async with joined(name) as (prefill, decode):
        to = decode.reserve("h", 8, 1, 2)
        with pytest.raises(RuntimeError, match="cancelled"):
            async with prefill.open(to, "h", 8, 10.0) as handoff:
                handoff.send(0, slots(4, 1))
                await decode.asked()
                raise RuntimeError("cancelled")
        assert "cancelled" in decode.held.reasons["h"]
        assert not decode.receiver.writing("h")
        to = decode.reserve("next", 8, 1, 2)
        await prefill.hand_over(to, "next", slots(8, 5, 6))
        assert list(decode.held.committed_tokens) == ["next"]


@every_transport
async def test_cancelled_handoffs_release_both_ends(name):
    async with joined(name) as (prefill, decode):
        to = decode.reserve("first", 4, 0)
        await prefill.hand_over(to, "first", slots(4, 0))

        async def forever(n, to):
            async with prefill.open(to, f"h{n}", 8, 30.0) as handoff:
                handoff.send(0, slots(4, n))
                await asyncio.Event().wait()

        targets = [decode.reserve(f"h{n}", 8, 2 * n, 2 * n + 1) for n in range(6)]
        tasks = [asyncio.create_task(forever(n, to)) for n, to in enumerate(targets)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(decode.receiver.writing(f"h{n}") for n in range(6))
        assert [pair.state for pair in prefill.links.status()] == ["OPEN"]
        to = decode.reserve("last", 4, 0)
        await prefill.hand_over(to, "last", slots(4, 3))


@every_transport
@pytest.mark.parametrize("field", ["checksum", "num_bytes", "num_tokens"])
async def test_what_differs_from_the_commit_is_corrupted(name, field):
    def change(request):
        setattr(request, field, getattr(request, field) ^ 1)

    async with joined(name) as (prefill, decode):
        decode.before_call("commit", change)
        to = decode.reserve("h", 8, 1, 2)
        with pytest.raises(KvCorrupted, match=field.removeprefix("num_")):
            await prefill.hand_over(to, "h", slots(8, 5, 6))
        assert decode.held.committed_tokens == {}
        assert "h" in decode.held.reasons


@pytest.mark.parametrize("name", ["memory", "shm", "cuda_ipc"])
async def test_blocks_overwritten_before_commit_are_noticed(name):
    async with joined(name) as (prefill, decode):
        decode.before_call("commit", lambda request: decode.pool.tensor[2, 0, 0, 0, 0].add_(1))
        to = decode.reserve("h", 8, 1, 2)
        with pytest.raises(KvCorrupted, match="checksum"):
            await prefill.hand_over(to, "h", slots(8, 5, 6))


@every_transport
async def test_short_handoff_is_refused(name):
    async with joined(name) as (prefill, decode):
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(0, slots(4, 5))
            with pytest.raises(KvCorrupted):
                await handoff.commit(4, 7)
        assert "h" in decode.held.reasons


@every_transport
@pytest.mark.parametrize(
    "first, chunk", [(4, slots(4, 1)), (0, slots(3, 1)), (0, slots(12, 1, 2, 3))]
)
async def test_what_is_not_reserved_is_not_written(name, first, chunk):
    async with joined(name) as (prefill, decode):
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(first, chunk)
            handoff.send(first + chunk.num_tokens, slots(4, 9))
            with pytest.raises((InvalidRequest, KvCorrupted)):
                await handoff.commit(8, 7)
        assert [pair.state for pair in prefill.links.status()] == ["OPEN"]
        assert decode.held.committed_tokens == {}
    untouched = [n for n in range(decode.pool.num_blocks) if n not in (1, 2)]
    assert (decode.pool.tensor[untouched] == decode.before[untouched]).all()


@every_transport
async def test_wrong_token_is_stale_and_the_link_stays(name):
    async with joined(name) as (prefill, decode):
        to = decode.reserve("h", 4, 1)
        to.reservation_token = "guessed"
        with pytest.raises(Stale):
            await prefill.hand_over(to, "h", slots(4, 1))
        to = decode.reserve("h", 4, 1)
        await prefill.hand_over(to, "h", slots(4, 1))
        assert [pair.epoch for pair in prefill.links.status()] == [1]


async def test_another_incarnation_is_stale():
    async with joined("memory") as (prefill, decode):
        to = decode.reserve("h", 4, 1)
        to.incarnation = "before"
        register("before", decode.port)
        with pytest.raises(Stale):
            await prefill.hand_over(to, "h", slots(4, 1))


def ready_request(link, num_tokens):
    names = {"handoff_id": "h", "reservation_token": "token-h", "incarnation": "p"}
    return pb.ReadyRequest(**names, epoch=link.epoch, num_tokens=num_tokens)


@every_transport
async def test_old_epoch_is_refused_and_a_new_one_works(name):
    async with joined(name) as (prefill, decode):
        to = decode.reserve("h", 4, 1)
        link = await prefill.links.acquire(to, Deadline(5.0))
        decode.receiver._peers.drop("p")
        with pytest.raises(Unavailable, match="epoch 1"), rpc.translated():
            await link.stub.Ready(ready_request(link, 4))
        assert not decode.receiver.writing("h")
        prefill.links.remove(link, quarantine=False)
        prefill.links.release(link)
        await prefill.hand_over(to, "h", slots(4, 1))
        assert [pair.epoch for pair in prefill.links.status()] == [2]


async def test_descriptors_that_differ_are_named_before_anything_is_sent():
    other = common_pb2.KvDescriptor()
    other.CopyFrom(DESCRIPTOR)
    other.num_kv_heads = 3
    async with joined("memory", prefill={"descriptor": other}) as (prefill, decode):
        aborts = []
        decode.before_call("abort", aborts.append)
        with pytest.raises(KvMismatch, match=r"prefill p and decode d.*num_kv_heads: 3 != 0"):
            await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 1))
        assert aborts == []  # nothing was granted, so there is nothing to take back


@pytest.mark.parametrize("pid", [1 << 31, (1 << 32) - 1])
async def test_a_number_that_no_process_has_is_refused_and_leaves_no_link(pid):
    async with Decode(TRANSPORTS["shm"]()) as decode:
        register("p", pid=pid)
        offer = pb.OfferRequest(
            incarnation="p", target_incarnation="d", kv=DESCRIPTOR,
            transports=[common_pb2.TRANSPORT_SHM],
        )  # fmt: skip
        with pytest.raises(InvalidRequest, match="pid") as refused:
            await decode.receiver.offer(offer)
        assert refused.value.field == "pid"
        with pytest.raises(Unavailable, match="is gone"):
            await decode.receiver.ready(pb.ReadyRequest(incarnation="p", epoch=1))


@pytest.mark.parametrize("host", ["elsewhere", "other/pid:1/0"])
async def test_shm_is_not_chosen_between_hosts(host):
    async with joined("shm", decode={"host": host}) as (prefill, decode):
        with pytest.raises(KvMismatch, match=r"different hosts.*different machines"):
            await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 1))


async def test_receiver_that_never_posts_fails_on_time_and_is_quarantined():
    async with joined("gloo", prefill={"step_s": 0.3, "backoff_s": 60.0}) as (prefill, decode):
        to = decode.reserve("h1", 4, 1)
        await prefill.hand_over(to, "h1", slots(4, 1))
        stuck = threading.Event()
        decode.receiver._peers._peers["p"].thread.submit(stuck.wait, 10)
        to = decode.reserve("h2", 4, 1)
        try:
            with pytest.raises(TransferFailed, match="did not answer"):
                await asyncio.wait_for(prefill.hand_over(to, "h2", slots(4, 1)), 4)
        finally:
            stuck.set()
        with pytest.raises(Unavailable):
            await prefill.hand_over(to, "h2", slots(4, 1))


async def test_a_failed_or_ended_handoff_takes_no_more_chunks():
    async with joined("shm") as (prefill, decode):
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            with pytest.raises(InvalidRequest):
                handoff.send(0, slots(5, 1))
            await handoff.abort("changed my mind")
            with pytest.raises(Cancelled):
                handoff.send(0, slots(4, 1))
        assert decode.held.reasons == {"h": "changed my mind"} or not decode.held.asked.is_set()


async def test_deadline_ends_a_handoff_that_waits_for_chunks():
    async with joined("shm") as (prefill, decode):
        to = decode.reserve("h", 8, 1, 2)
        async with prefill.open(to, "h", 8, 0.3) as handoff:
            handoff.send(0, slots(4, 1))
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(asyncio.shield(handoff._task), 5)
        assert "h" in decode.held.reasons
        assert [pair.state for pair in prefill.links.status()] == ["OPEN"]


@every_transport
async def test_least_recently_used_link_is_closed(name):
    transport = TRANSPORTS[name]()
    async with (
        Prefill(transport, cap=2) as prefill,
        Decode(transport, incarnation="a") as a,
        Decode(transport, incarnation="b") as b,
        Decode(transport, incarnation="c") as c,
    ):
        for n, decode in enumerate((a, b, a, c)):
            to = decode.reserve(f"h{n}", 4, 1)
            await prefill.hand_over(to, f"h{n}", slots(4, 1))
        assert [pair.decode for pair in prefill.links.status()] == ["a", "c"]
        for decode in (a, c):
            decode.held.asked.clear()
        async with (
            prefill.open(a.reserve("x", 8, 1, 2), "x", 8, 5.0) as one,
            prefill.open(c.reserve("y", 8, 1, 2), "y", 8, 5.0) as two,
        ):
            for handoff, decode in ((one, a), (two, c)):
                handoff.send(0, slots(4, 1))
                await decode.asked()
            with pytest.raises(Overloaded):
                await prefill.hand_over(b.reserve("z", 4, 1), "z", slots(4, 1))


async def test_a_receiver_keeps_no_more_links_than_their_transport_can():
    transport = TRANSPORTS["gloo"]()
    transport.max_links = 1
    async with (
        Decode(transport) as decode,
        Prefill(transport) as p,
        Prefill(transport, incarnation="q") as q,
    ):
        for n, prefill in enumerate((p, q, p)):
            await prefill.hand_over(decode.reserve(f"h{n}", 4, n), f"h{n}", slots(4, n))
            assert list(decode.receiver._peers._peers) == [prefill.links.incarnation]


@pytest.mark.parametrize("name", ["memory", "shm", "cuda_ipc"])
async def test_cancelled_reservation_is_quarantined_until_the_sender_lets_go(name):
    async with joined(name) as (prefill, decode):
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(0, slots(4, 5))
            await decode.asked()
            del decode.held.blocks["h"]
            decode.receiver.forget("h")
            assert decode.receiver.writing("h")
            assert decode.held.reasons == {}
        assert not decode.receiver.writing("h")
        assert "h" in decode.held.reasons


@pytest.mark.parametrize("during_commit", [False, True])
async def test_peer_gone_ends_and_names_what_it_leaves(during_commit):
    async with joined("shm") as (prefill, decode):
        arrived, left = decode.receiver._arrived, []

        async def gone_meanwhile(peer, record):
            digest = await arrived(peer, record)
            left.extend(await decode.receiver.peer_gone("p"))
            return digest

        async with prefill.opened(decode, 4, 1) as handoff:
            handoff.send(0, slots(4, 5))
            await decode.asked()
            if during_commit:
                decode.receiver._arrived = gone_meanwhile
                with pytest.raises(Stale):
                    await handoff.commit(4, 7)
            else:
                left += await decode.receiver.peer_gone("p")
            assert left == ["h"]
            assert not decode.receiver.writing("h")
            assert "has ended" in decode.held.reasons["h"]
        assert decode.held.committed_tokens == {}


async def test_sender_lost_between_ready_and_put_frees_the_blocks_at_the_timeout():
    async with joined("gloo", decode={"timeout_s": 0.3}) as (prefill, decode):
        to = decode.reserve("h", 8, 1, 2)
        link = await prefill.links.acquire(to, Deadline(5.0))
        assert (await link.stub.Ready(ready_request(link, 8))).block_ids == [1, 2]
        assert decode.receiver.writing("h")
        del decode.held.blocks["h"]
        decode.receiver.forget("h")
        assert decode.receiver.writing("h")
        await asyncio.wait_for(decode.held.ended.wait(), 5)
        assert not decode.receiver.writing("h")
        prefill.links.release(link)


async def test_reservation_that_changes_under_a_receive_discards_it():
    async with joined("gloo") as (prefill, decode):
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(0, slots(4, 5))
            await decode.asked()
            decode.held.blocks["h"] = ReservedBlocks((1, 3), 8, 0, BLOCK_SIZE, b"")
            handoff.send(4, slots(4, 6))
            with pytest.raises(Stale):
                await handoff.commit(8, 7)
        assert decode.held.committed_tokens == {}


async def test_other_tokens_than_reserved_are_refused_and_the_link_stays():
    async with joined("shm") as (prefill, decode):
        to = decode.reserve("h", 4, 1)
        async with prefill.open(to, "h", 4, 10.0, token_digest=b"others") as handoff:
            handoff.send(0, slots(4, 5))
            with pytest.raises(InvalidRequest, match="other tokens") as refused:
                await handoff.commit(4, 7)
        assert refused.value.field == "token_digest"
        assert decode.held.committed_tokens == {}
        assert "other tokens" in decode.held.reasons["h"]
        assert [pair.state for pair in prefill.links.status()] == ["OPEN"]


async def test_a_worker_that_is_not_registered_gets_no_link_and_shuts_no_pair():
    async with joined("shm") as (prefill, decode):
        to = decode.reserve("h", 4, 1)
        to.incarnation = "stranger"
        with pytest.raises(TransferFailed, match="registry has no worker stranger"):
            await prefill.hand_over(to, "h", slots(4, 1))
        assert prefill.links.status() == []


@pytest.mark.parametrize("timeout_s, error", [(0.3, DeadlineExceeded), (30.0, TransferFailed)])
async def test_a_put_that_never_ends_blocks_no_caller_beyond_its_timeout(
    monkeypatch, timeout_s, error
):
    """As one that waits for a GPU that hangs. The Abort is sent only when it ends."""
    monkeypatch.setattr(sender, "_PUT_GRACE_S", 0.1)
    async with joined("memory", prefill={"step_s": 0.5}) as (prefill, decode):
        link = await prefill.links.acquire(decode.reserve("h", 8, 1, 2), Deadline(5.0))
        put, hangs = link._link.put, threading.Event()

        def hanging(*arguments):
            hangs.wait(10)
            return put(*arguments)

        link._link.put = hanging

        async def run():
            to = decode.reserve("h", 8, 1, 2)
            async with prefill.open(to, "h", 8, timeout_s) as handoff:
                handoff.send(0, slots(8, 5, 6))
                await handoff.commit(8, 7)

        bound_s = min(timeout_s, 0.5) + 0.1 + 1.5  # one put or the deadline, its grace, and slack
        try:
            with pytest.raises(error):
                await asyncio.wait_for(run(), bound_s)
            assert decode.receiver.writing("h")
            assert decode.held.reasons == {}
            assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]
        finally:
            hangs.set()
        await asyncio.wait_for(decode.held.ended.wait(), 5)
        assert not decode.receiver.writing("h")
        prefill.links.release(link)
