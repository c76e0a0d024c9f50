"""Handoffs from a prefill to a decode side over real gRPC, for every transport."""

import asyncio
import contextlib
import gc
import threading
import time
from types import SimpleNamespace

import pytest

from baton import errors
from baton.cuda import CudaError
from baton.kv_groups import KvGroups
from baton.v1 import common_pb2
from baton.v1 import handoff_pb2 as pb
from baton.worker.messages import ModelLimits
from kvtransfer import deadline, sender, shared_pool
from kvtransfer.deadline import Deadline
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tests.waiting import WAIT_S, eventually

from .kvtransfer_driver import StandIn
from .kvtransfer_parts import (
    BLOCK_SIZE,
    DESCRIPTOR,
    TOKEN_BYTES,
    TRANSPORTS,
    Decode,
    Prefill,
    Times,
    answer,
    expect_only,
    make_pool,
    register,
    slots,
)

every_transport = pytest.mark.parametrize("name", list(TRANSPORTS))


def pairs(prefill):
    """(epoch, state) of each link."""
    return [(pair.epoch, pair.state) for pair in prefill.links.status()]


@every_transport
async def test_handoffs_over_one_link(join, name):
    """Chunk by chunk, behind cached blocks, many at once; one aborted, some cancelled, one refused.

    The link stays.
    """
    prefill, decode = await join(name)
    to = decode.reserve("h", 18, 9, 4, 5, 6, 20)
    stats = await prefill.hand_over(to, "h", slots(8, 1, 2), slots(8, 3, 8), slots(2, 7))
    local, remote = slots(18, 1, 2, 3, 8, 7), slots(18, 9, 4, 5, 6, 20)
    expect_only(prefill.pool, local, decode.pool, remote, decode.content)
    assert decode.committed_tokens == {"h": 7}
    assert not decode.writing("h")
    assert (stats.num_bytes, stats.chunks) == (18 * TOKEN_BYTES, 3)
    assert stats.transport == name and stats.hidden_s < stats.wire_s
    [pair] = prefill.links.status()
    assert (pair.prefill, pair.decode, pair.state) == ("p", "d", "OPEN")
    assert pair.sent_bytes == stats.num_bytes
    assert pair.sent_ms == pytest.approx(stats.wire_s * 1e3)

    async with prefill.open(decode.reserve("slow", 8, 4, 5), "slow", 8, 10.0) as handoff:
        handoff.send(slots(4, 3))

        async def more_sent():
            return [pair.sent_bytes > stats.num_bytes for pair in prefill.links.status()]

        await eventually(more_sent, any, "the first chunk was not put")
        await asyncio.sleep(0.05)  # the put is over; a moment later what follows it is, too
        handoff.send(slots(4, 8))
        handoff.conclude(7)
        assert "slow" not in decode.committed_tokens
        slow = await handoff.committed()
    assert decode.committed_tokens["slow"] == 7
    assert 0 < slow.hidden_s < slow.wire_s, "what was sent before the last chunk is hidden"

    before = decode.pool.tensor.clone()
    to = decode.reserve("cached", 14, 9, 4, 15, 16, cached=8)
    stats = await prefill.hand_over(to, "cached", slots(6, 3, 8))
    expect_only(prefill.pool, slots(6, 3, 8), decode.pool, slots(6, 15, 16), before)
    assert stats.num_bytes == 6 * TOKEN_BYTES

    targets = [decode.reserve(f"h{n}", 8, 2 * n, 2 * n + 1) for n in range(10)]
    chunks = [(slots(4, n), slots(4, n + 10)) for n in range(10)]
    handoffs = zip(targets, chunks, strict=True)
    await asyncio.gather(
        *(prefill.hand_over(to, f"h{n}", *sent) for n, (to, sent) in enumerate(handoffs))
    )
    assert {f"h{n}" for n in range(10)} < decode.committed_tokens.keys()

    decode.service.asked.clear()
    with pytest.raises(RuntimeError, match="cancelled"):
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(slots(4, 1))
            await decode.asked()
            raise RuntimeError("cancelled")
    assert "cancelled" in decode.reasons["h"]
    assert not decode.writing("h")

    async def forever(n, to):
        async with prefill.open(to, f"c{n}", 8, 30.0) as handoff:
            handoff.send(slots(4, n))
            await asyncio.Event().wait()

    targets = [decode.reserve(f"c{n}", 8, 2 * n, 2 * n + 1) for n in range(6)]
    tasks = [asyncio.create_task(forever(n, to)) for n, to in enumerate(targets)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not any(decode.writing(f"c{n}") for n in range(6))

    to = decode.reserve("guessed", 4, 1)
    to.reservation_token = "guessed"
    with pytest.raises(errors.Stale):
        await prefill.hand_over(to, "guessed", slots(4, 1))
    await prefill.hand_over(decode.reserve("last", 4, 0), "last", slots(4, 3))
    assert pairs(prefill) == [(1, "OPEN")]


@every_transport
async def test_what_differs_from_the_commit_or_the_reservation_is_refused(join, name):
    """Checksum, bytes or tokens; bytes overwritten since a one-sided put; a handoff that is short.

    What is not reserved is not written, and the link stays.
    """
    changes = {
        field: lambda request, field=field: setattr(request, field, getattr(request, field) ^ 1)
        for field in ("checksum", "num_bytes", "num_tokens")
    }
    prefill, decode = await join(name)
    if TRANSPORTS[name]().one_sided:
        row = decode.pool.tensor[2, 0, 0, 0, 0]
        changes["overwritten: checksum"] = lambda request: row.add_(1)
    for field, change in changes.items():
        decode.before["commit"] = change
        to = decode.reserve("h", 8, 1, 2)
        with pytest.raises(errors.KvCorrupted, match=field.split("_")[-1].split(" ")[-1]):
            await prefill.hand_over(to, "h", slots(8, 5, 6))
        assert decode.reasons.pop("h")
    del decode.before["commit"]
    for chunk in (slots(3, 1), slots(12, 1, 2, 3)):  # ends in a block; more than is reserved
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(chunk)
            handoff.send(slots(4, 9))
            with pytest.raises((errors.InvalidRequest, errors.KvCorrupted)):
                await handoff.commit(7)
    async with prefill.opened(decode, 8, 1, 2) as handoff:
        handoff.send(slots(4, 5))
        with pytest.raises(errors.KvCorrupted):
            await handoff.commit(7)
    assert "h" in decode.reasons
    assert decode.committed_tokens == {}
    assert pairs(prefill) == [(1, "OPEN")]
    untouched = [n for n in range(decode.pool.num_blocks) if n not in (1, 2)]
    assert (decode.pool.tensor[untouched] == decode.content[untouched]).all()


async def test_other_incarnations_and_workers_without_a_record_get_nothing(join):
    prefill, decode = await join("shm")
    to = decode.reserve("h", 4, 1)
    to.incarnation = "stranger"
    with pytest.raises(errors.TransferFailed, match="registry has no worker stranger"):
        await prefill.hand_over(to, "h", slots(4, 1))
    assert prefill.links.status() == []
    to.incarnation = "before"
    register("before", decode.port)
    with pytest.raises(errors.Stale):
        await prefill.hand_over(to, "h", slots(4, 1))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"first_token": 4}, errors.InvalidRequest),
        *(({"num_tokens": number}, errors.InvalidRequest) for number in (0, 3, 12)),
        ({"epoch": 9}, errors.Unavailable),
        ({"reservation_token": "guessed"}, errors.Stale),
    ],
)
async def test_ready_for_what_is_not_next_or_over_no_link_grants_nothing(join, change, error):
    prefill, decode = await join("memory")
    link = await prefill.links.acquire(decode.reserve("h", 8, 1, 2), Deadline(WAIT_S))
    fields = {"handoff_id": "h", "reservation_token": "token-h", "incarnation": "p"}
    ready = {**fields, "epoch": link.epoch, "num_tokens": 8, **change}
    with pytest.raises(error):
        await answer(decode.service, "ready", pb.ReadyRequest(**ready))
    assert not decode.writing("h")
    prefill.links.release(link)


async def test_descriptors_that_differ_are_named_before_anything_is_sent(join):
    other = common_pb2.KvDescriptor()
    other.CopyFrom(DESCRIPTOR)
    other.layout_version = 3
    prefill, decode = await join("memory", prefill={"kv": other})
    aborts = []
    decode.before["abort"] = aborts.append
    with pytest.raises(errors.KvMismatch, match=r"prefill p and decode d.*layout_version: 3 != 0"):
        await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 1))
    assert aborts == []  # nothing was granted, so there is nothing to take back


async def test_a_link_that_fails_after_its_waiters_were_cancelled_is_not_reported(join):
    prefill, decode = await join("memory")
    asked, reported = asyncio.Event(), []
    # What gRPC's threads may still do to loops of other tests is not of interest.
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reported.append(context) if "future" in context else None
    )

    async def fails(incarnation):
        asked.set()
        await asyncio.sleep(0.01)
        raise errors.TransferFailed("no such worker")

    prefill.links.find_decode = fails
    to = decode.reserve("h", 4, 1)
    waits = asyncio.create_task(prefill.links.acquire(to, Deadline(WAIT_S)))
    await asked.wait()
    waits.cancel()
    opening = prefill.links._opening["d"]
    await asyncio.wait({opening, waits})
    del opening, waits
    gc.collect()
    assert reported == []


async def test_a_sender_that_offers_and_does_not_come_holds_up_nothing():
    async with Decode(TRANSPORTS["shm"]()) as decode:
        register("p")
        offer = pb.OfferRequest(
            incarnation="p", target_incarnation="d", kv=DESCRIPTOR,
            transports=[common_pb2.TRANSPORT_SHM],
        )  # fmt: skip
        endpoints = [(await answer(decode.service, "offer", offer)).endpoint for _ in range(2)]
        begun = time.monotonic()
    assert time.monotonic() - begun < WAIT_S
    for endpoint in endpoints:
        with pytest.raises(errors.TransferFailed, match="no such receiver"):
            TRANSPORTS["shm"]().connect(decode.pool, endpoint, 1.0)


async def test_shm_is_not_chosen_between_hosts(join):
    prefill, decode = await join("shm", decode={"host": "elsewhere"})
    with pytest.raises(errors.KvMismatch, match=r"different hosts.*different machines"):
        await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 1))


class Sightless(StandIn):
    """In a container that does not see the receiver's GPU."""

    def open(self, device, fd, size):
        raise CudaError("cuMemImportFromShareableHandle", 101, "invalid device ordinal")


@contextlib.asynccontextmanager
async def unopenable(*others):
    others = [TRANSPORTS[name]() for name in others]
    sightless = CudaIpcTransport(Sightless())
    async with (
        Decode(TRANSPORTS["cuda_ipc"](), *others, pools=[make_pool(2, "gpu")]) as decode,
        Prefill(sightless, *others, pools=[make_pool(1, "gpu")], backoff_s=60.0) as prefill,
    ):
        yield prefill, decode


async def uses_gloo(prefill, decode):
    """Two handoffs, each over a link of its own, use it without a resend."""
    for name in ("h", "i"):
        stats = await prefill.hand_over(decode.reserve(name, 4, 9), name, slots(4, 1))
        assert (stats.transport, stats.resends) == ("gloo", 0)
        if name == "h":
            prefill.links.remove(prefill.links._links["d"], quarantine=False)


async def test_memory_that_cannot_be_opened_is_left_out_and_the_pair_uses_the_next(caplog):
    async with unopenable("gloo") as (prefill, decode):
        await uses_gloo(prefill, decode)
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        fallback = (
            "not cuda_ipc: cuda_ipc: cannot open the receiver's memory:"
            " cuMemImportFromShareableHandle failed with CUDA error 101, invalid device ordinal"
            " (show every GPU of the machine to every worker)"
        )
        assert warning.getMessage() == f"link to decode d uses gloo, {fallback}"
        assert pairs(prefill) == [(3, "OPEN")]
        assert [pair.fallback for pair in prefill.links.status()] == [fallback]
    async with unopenable() as (prefill, decode):  # nothing else is left
        with pytest.raises(errors.TransferFailed, match="invalid device ordinal"):
            await prefill.hand_over(decode.reserve("h", 4, 9), "h", slots(4, 1))
        assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]


async def test_where_no_socket_can_be_made_the_pair_uses_the_next_transport(
    monkeypatch, tmp_path, caplog
):
    """As a full /dev/shm, which was good when the worker began."""
    (folder := tmp_path / ("x" * 100)).mkdir()  # a socket's path has 107 bytes at most
    monkeypatch.setattr(shared_pool, "SHARED_FOLDER", folder)
    shm, gloo = TRANSPORTS["shm"](), TRANSPORTS["gloo"]()
    async with Decode(shm, gloo) as decode, Prefill(shm, gloo) as prefill:
        await uses_gloo(prefill, decode)
        said = [one.getMessage() for one in caplog.records if "cannot listen" in one.getMessage()]
        assert len(said) == 1
    async with Decode(shm) as decode, Prefill(shm, backoff_s=60.0) as prefill:
        with pytest.raises(errors.TransferFailed, match="cannot listen"):  # nothing else is left
            await prefill.hand_over(decode.reserve("h", 4, 9), "h", slots(4, 1))


async def test_receiver_that_never_posts_fails_on_time_and_is_quarantined(join):
    prefill, decode = await join("gloo", prefill={"backoff_s": 600.0})
    to = decode.reserve("h1", 4, 1)
    await prefill.hand_over(to, "h1", slots(4, 1))
    prefill.waits["step_timeout_s"] = 0.3
    stuck = threading.Event()
    decode.links._links["p"]._thread.submit(stuck.wait, WAIT_S)
    to = decode.reserve("h2", 4, 1)
    try:
        with pytest.raises(errors.TransferFailed, match="did not answer"):
            await prefill.hand_over(to, "h2", slots(4, 1))
    finally:
        stuck.set()
    with pytest.raises(errors.Unavailable):
        await prefill.hand_over(to, "h2", slots(4, 1))


async def test_a_put_that_its_requests_deadline_ends_fails_no_other_request(join):
    """The link's ends may disagree now: the next request opens another one at once."""
    prefill, decode = await join("gloo", prefill={"backoff_s": 600.0})
    await prefill.hand_over(decode.reserve("h1", 4, 1), "h1", slots(4, 1))
    link, never = decode.links._links["p"], asyncio.Event()

    async def posts_nothing(slots, checksum, posted):
        posted.set()
        await never.wait()

    link.receive = posts_nothing
    with pytest.raises(errors.DeadlineExceeded):
        await prefill.hand_over(decode.reserve("h2", 4, 2), "h2", slots(4, 1), timeout_s=0.5)
    assert pairs(prefill) == []
    await prefill.hand_over(decode.reserve("h3", 4, 3), "h3", slots(4, 1))
    assert pairs(prefill) == [(2, "OPEN")]
    never.set()


@pytest.mark.parametrize("left_s, state", [(0.0015, "OPEN"), (0.1, "QUARANTINED")])
async def test_a_timer_that_is_early_at_a_requests_deadline_fails_no_link(
    join, monkeypatch, left_s, state
):
    prefill, decode = await join("shm")
    link = await prefill.links.acquire(decode.reserve("h", 4, 1), Deadline(WAIT_S))
    now = time.monotonic()
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now))
    end = Deadline(left_s)
    with (
        pytest.raises((errors.DeadlineExceeded, errors.TransferFailed)),
        prefill.links.closing_on_failure(link, end),
    ):
        raise errors.DeadlineExceeded("no answer within 1 s")
    assert [pair.state for pair in prefill.links.status()] == [state]
    prefill.links.release(link)


@pytest.mark.parametrize(
    ("method", "thread_name"), [("listen", "kv-receive"), ("connect", "kv-send")]
)
async def test_an_end_made_for_a_link_that_nobody_opens_any_more_is_closed(
    monkeypatch, method, thread_name
):
    transport, made, closed = TRANSPORTS["shm"](), [], []
    make, begun, go_on = getattr(transport, method), threading.Event(), threading.Event()

    def slow(*arguments):
        made.append(end := make(*arguments))
        close = end.close
        end.close = lambda: (close(), closed.append(end))
        begun.set()
        assert go_on.wait(WAIT_S)
        return end

    monkeypatch.setattr(transport, method, slow)
    async with Decode(transport) as decode, Prefill(transport) as prefill:
        offer, offered = decode.links.offer, asyncio.Event()

        async def noted(request):
            try:
                return await offer(request)
            finally:
                offered.set()

        decode.links.offer = noted
        opening = asyncio.create_task(prefill.links.open_ahead("d"))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        [thread] = [one for one in threading.enumerate() if one.name.startswith(thread_name)]
        await prefill.links.close()
        await asyncio.wait_for(offered.wait(), WAIT_S)
        await opening
        go_on.set()
        await asyncio.to_thread(thread.join, WAIT_S)
        assert closed == made and len(made) == 1


async def test_an_ended_handoff_takes_no_more_chunks_and_a_deadline_ends_one_that_waits(join):
    prefill, decode = await join("shm")
    async with prefill.opened(decode, 8, 1, 2) as handoff:
        with pytest.raises(errors.InvalidRequest):
            handoff.send(slots(5, 1))
    with pytest.raises(errors.Cancelled):
        handoff.send(slots(4, 1))
    assert decode.reasons == {"h": "not committed"} or not decode.service.asked.is_set()
    async with prefill.opened(decode, 8, 1, 2, timeout_s=0.3) as handoff:
        handoff.send(slots(4, 1))
        with pytest.raises(errors.DeadlineExceeded):
            await asyncio.wait_for(asyncio.shield(handoff._task), WAIT_S)
    assert "h" in decode.reasons
    assert pairs(prefill) == [(1, "OPEN")]


@every_transport
async def test_a_link_opened_ahead_is_the_first_handoffs_and_closes_no_other(name):
    transport = TRANSPORTS[name]()
    async with (
        Prefill(transport, cap=1) as prefill,
        Decode(transport, incarnation="a") as a,
        Decode(transport, incarnation="b") as b,
    ):
        for decode in (a, b, a):
            await prefill.links.open_ahead(decode.record.incarnation)
        assert [pair.decode for pair in prefill.links.status()] == ["a"]
        assert not b.links._links  # where there is no room nothing is offered
        await prefill.hand_over(a.reserve("h", 4, 1), "h", slots(4, 1))
        assert pairs(prefill) == [(1, "OPEN")]
        await prefill.hand_over(b.reserve("i", 4, 1), "i", slots(4, 1))
        assert [pair.decode for pair in prefill.links.status()] == ["b"]


@pytest.mark.parametrize("cls", [errors.TransferFailed, errors.KvMismatch, errors.Overloaded])
async def test_a_link_that_fails_ahead_is_logged_and_harms_no_handoff_that_comes_later(
    join, caplog, cls
):
    prefill, decode = await join("shm", prefill={"backoff_s": 60.0})
    decode.before["offer"] = offers = Times(1, cls("not now"))
    await prefill.links.open_ahead("d")
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage() == "no link from prefill p to decode d: not now"
    assert pairs(prefill) == []
    await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 1))
    assert (offers.calls, pairs(prefill)) == (2, [(1, "OPEN")])


async def test_a_handoff_waits_for_the_link_that_is_opened_ahead_and_fails_with_it(join):
    prefill, decode = await join("shm", prefill={"backoff_s": 60.0})
    offered, answered = asyncio.Event(), asyncio.Event()

    async def fails(request):
        offered.set()
        await answered.wait()
        raise errors.TransferFailed("not now")

    decode.before["offer"] = Times(1, fails)
    ahead = asyncio.create_task(prefill.links.open_ahead("d"))
    await offered.wait()
    to = decode.reserve("h", 4, 1)
    handoff = asyncio.create_task(prefill.links.acquire(to, Deadline(WAIT_S)))
    await asyncio.sleep(0)  # it waits now
    answered.set()
    await ahead
    with pytest.raises(errors.TransferFailed, match="not now"):
        await handoff
    assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]


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
            await prefill.hand_over(decode.reserve(f"h{n}", 4, 1), f"h{n}", slots(4, 1))
        assert [pair.decode for pair in prefill.links.status()] == ["a", "c"]
        for decode in (a, c):
            decode.service.asked.clear()
        async with (
            prefill.open(a.reserve("x", 8, 1, 2), "x", 8, 5.0) as one,
            prefill.open(c.reserve("y", 8, 1, 2), "y", 8, 5.0) as two,
        ):
            for handoff, decode in ((one, a), (two, c)):
                handoff.send(slots(4, 1))
                await decode.asked()
            with pytest.raises(errors.Overloaded):
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
            assert list(decode.links._links) == [prefill.links.record.incarnation]


async def test_a_peer_that_ends_while_its_kv_is_verified_has_sent_all_of_it(join):
    prefill, decode = await join("shm")
    verify = decode.handoffs._verify

    async def gone_meanwhile(*arguments):
        await decode.links.sender_exited("p")
        await verify(*arguments)

    decode.handoffs._verify = gone_meanwhile
    await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 5))
    assert not decode.writing("h")
    assert (decode.committed_tokens, decode.reasons) == ({"h": 7}, {})


@pytest.mark.parametrize("name", ["shm", "cuda_ipc"])
@pytest.mark.parametrize("state_blocks", [0, 1])
async def test_blocks_that_are_not_read_back_end_the_handoff(join, name, state_blocks):
    """With a state they are read back before the sequence decodes."""
    prefill, decode = await join(name)
    await prefill.hand_over(decode.reserve("first", 4, 3), "first", slots(4, 5))
    decode.handoffs._verify_timeout_s = 0.2
    decode.handoffs._limits = ModelLimits(1000, 64, KvGroups((0,), BLOCK_SIZE, state_blocks))
    local = slots(4 + state_blocks * BLOCK_SIZE, *(5, 6)[: 1 + state_blocks])
    stuck = threading.Event()
    decode.before["commit"] = lambda _: decode.links._links["p"]._thread.submit(stuck.wait, 10)
    try:
        with pytest.raises(errors.TransferFailed, match="not read back in time"):
            await prefill.hand_over(decode.reserve("h", 4, 1, 2), "h", local)
    finally:
        stuck.set()
    assert "not read back" in decode.reasons["h"]
    assert decode.committed_tokens == {"first": 7}


async def test_sender_lost_between_ready_and_put_frees_the_blocks_at_the_timeout(join):
    prefill, decode = await join("gloo", decode={"timeout_s": 1.0})
    link = await prefill.links.acquire(decode.reserve("h", 8, 1, 2), Deadline(WAIT_S))
    names = {"handoff_id": "h", "reservation_token": "token-h", "incarnation": "p"}
    ready = pb.ReadyRequest(**names, epoch=link.epoch, num_tokens=8)
    assert (await link.control.call(ready, WAIT_S)).block_ids == [1, 2]
    assert decode.writing("h")
    decode.cancel("h")
    assert decode.writing("h")
    await decode.freed()
    assert not decode.writing("h")
    prefill.links.release(link)


async def test_a_reservation_that_ends_under_a_receive_discards_it(join):
    prefill, decode = await join("gloo")
    async with prefill.opened(decode, 8, 1, 2) as handoff:
        handoff.send(slots(4, 5))
        await decode.asked()
        decode.cancel("h")
        handoff.send(slots(4, 6))
        with pytest.raises(errors.Stale):
            await handoff.commit(7)
    assert decode.committed_tokens == {}


@pytest.mark.parametrize(
    "timeout_s, error", [(0.3, errors.DeadlineExceeded), (WAIT_S, errors.TransferFailed)]
)
async def test_a_put_that_never_ends_blocks_no_caller_beyond_its_timeout(
    join, monkeypatch, timeout_s, error
):
    """As one that waits for a GPU that hangs. The Abort is sent only when it ends."""
    monkeypatch.setattr(sender, "_PUT_GRACE_S", 0.1)
    prefill, decode = await join("memory", prefill={"waits": {"step_timeout_s": 0.5}})
    link = await prefill.links.acquire(decode.reserve("h", 8, 1, 2), Deadline(WAIT_S))
    put, hangs = link.ends[0].put, threading.Event()

    def hanging(*arguments):
        hangs.wait(WAIT_S)
        return put(*arguments)

    link.ends[0].put = hanging

    async def run():
        async with prefill.opened(decode, 8, 1, 2, timeout_s=timeout_s) as handoff:
            handoff.send(slots(8, 5, 6))
            await handoff.commit(7)

    try:
        with pytest.raises(error):
            await run()
        assert decode.writing("h")
        assert decode.reasons == {}
        assert [pair.state for pair in prefill.links.status()] == ["QUARANTINED"]
    finally:
        hangs.set()
    await decode.freed()
    assert not decode.writing("h")
    prefill.links.release(link)
