"""A transfer that failed is done again while prefill has the KV and decode holds the blocks; one
that is given up ends with an Abort that is answered, though giving up does not wait for that."""

import asyncio
import time

import pytest

from baton import errors
from baton.v1 import handoff_pb2
from kvtransfer import outgoing
from kvtransfer.deadline import Deadline
from kvtransfer.pool import Slots
from kvtransfer.sender import MAX_RESENDS
from tests.tracing import Traces
from tests.waiting import WAIT_S

from .kvtransfer_parts import TOKEN_BYTES, TRANSPORTS, Times, expect_only, slots

every_transport = pytest.mark.parametrize("name", list(TRANSPORTS))
# Others are verified beside decoding: a mismatch ends what runs on the KV, and its reservation.
verified_before_decoding = pytest.mark.parametrize(
    "name", [name for name, transport in TRANSPORTS.items() if not transport().one_sided]
)


def corrupt(request):
    request.checksum ^= 1


def short(request):
    request.num_tokens -= 1


def expect_sent_again(prefill, decode, stats):
    """Handoff "h" of blocks 5 and 6 into 1 and 2 is complete, and was never given up."""
    assert stats.resends == 1
    expect_only(prefill.pool, slots(8, 5, 6), decode.pool, slots(8, 1, 2), decode.content)
    assert (decode.committed_tokens, decode.reasons) == ({"h": 7}, {})


@verified_before_decoding
@pytest.mark.parametrize("cached", [0, 4])
async def test_corrupted_kv_is_sent_again_on_the_same_link(join, name, cached):
    prefill, decode = await join(name)
    decode.before["commit"] = Times(1, corrupt)
    to = decode.reserve("h", 18, 9, 4, 5, 6, 20, cached=cached)
    own, there = slots(18 - cached, *(1, 2, 3, 8, 7)[cached // 4 :]), (9, 4, 5, 6, 20)
    chunks = [Slots(own.block_ids[:2], 8), Slots(own.block_ids[2:], own.num_tokens - 8)]
    stats = await prefill.hand_over(to, "h", *chunks)
    assert (stats.resends, stats.chunks) == (1, 2)
    assert stats.num_bytes == (18 - cached) * TOKEN_BYTES
    remote = slots(18 - cached, *there[cached // 4 :])
    expect_only(prefill.pool, own, decode.pool, remote, decode.content)
    assert decode.committed_tokens == {"h": 7}
    assert decode.reasons == {}  # the reservation was never given up
    assert not decode.writing("h")
    assert [pair.epoch for pair in prefill.links.status()] == [1]


@every_transport
async def test_a_put_that_fails_halfway_is_done_again(join, name):
    prefill, decode = await join(name, prefill={"backoff_s": 60.0})
    to = decode.reserve("h", 8, 1, 2)
    link = await prefill.links.acquire(to, Deadline(WAIT_S))
    put = link.ends[0].put

    def halfway(local, remote, checksum, timeout_s):
        if link.transport.one_sided:
            put(Slots(local.block_ids[:1], 4), Slots(remote.block_ids[:1], 4), checksum, 1)
        raise errors.TransferFailed("cut in the middle")

    link.ends[0].put = halfway
    prefill.links.release(link)
    stats = await prefill.hand_over(to, "h", slots(8, 5, 6))
    expect_sent_again(prefill, decode, stats)


async def test_a_receive_that_failed_at_the_receiver_is_posted_again(join):
    prefill, decode = await join("gloo")
    await prefill.hand_over(decode.reserve("first", 4, 9), "first", slots(4, 7))
    decode.content = decode.pool.tensor.clone()
    decode.committed_tokens.clear()
    listener = decode.links._links["p"].ends[0]
    receive = listener.receive

    fails = Times(1, errors.TransferFailed("the receive was cut"))
    listener.receive = lambda *arguments: fails() or receive(*arguments)
    stats = await prefill.hand_over(decode.reserve("h", 8, 1, 2), "h", slots(8, 5, 6))
    expect_sent_again(prefill, decode, stats)


@every_transport
async def test_a_link_lost_in_the_middle_is_opened_anew_for_the_handoff(join, name):
    """For all that used it, although the peer is quarantined for others."""
    prefill, decode = await join(name, prefill={"backoff_s": 60.0})
    targets = [decode.reserve(f"h{n}", 8, 2 * n, 2 * n + 1) for n in range(6)]
    lost = asyncio.Event()

    async def in_two_parts(n, to):
        async with prefill.open(to, f"h{n}", 8, 20.0) as handoff:
            handoff.send(slots(4, n))
            await lost.wait()
            handoff.send(slots(4, n + 10))
            return await handoff.commit(7)

    running = [asyncio.create_task(in_two_parts(n, to)) for n, to in enumerate(targets)]
    await decode.asked()
    decode.links._drop("p")
    lost.set()
    stats = await asyncio.gather(*running)
    assert (len(decode.committed_tokens), decode.reasons) == (6, {})
    assert all(one.resends <= MAX_RESENDS for one in stats) and any(one.resends for one in stats)
    [pair] = prefill.links.status()
    assert (pair.epoch, pair.state) == (2, "OPEN")
    own = slots(48, *(block for n in range(6) for block in (n, n + 10)))
    expect_only(prefill.pool, own, decode.pool, slots(48, *range(12)), decode.content)


@verified_before_decoding
async def test_resends_are_bounded_and_then_the_blocks_are_given_back(join, name):
    """Its span, also that of a handoff that fails, counts them."""
    traces = Traces()
    prefill, decode = await join(name)
    prefill.tracer = traces.tracer
    commits = Times(1 + MAX_RESENDS, corrupt)
    decode.before["commit"] = commits
    with pytest.raises(errors.KvCorrupted):
        await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 5))
    assert commits.calls == 1 + MAX_RESENDS
    assert "KvCorrupted" in decode.reasons["h"]
    assert not decode.writing("h")
    commits.calls = 1
    await prefill.hand_over(decode.reserve("i", 4, 1), "i", slots(4, 5))
    assert [span.name for span in traces.spans] == ["kv.link", "kv.transfer"] * 2
    transfers = traces.spans[1::2]
    assert [span.attributes["baton.resends"] for span in transfers] == [MAX_RESENDS] * 2
    assert [span.attributes.get("error.type") for span in transfers] == ["KvCorrupted", None]


async def test_the_spans_of_a_handoff_contain_its_waits(join):
    """A one-sided sender waits for its grant before there is a block to send."""
    for name in ("gloo", "shm"):
        traces = Traces()
        prefill, decode = await join(name)
        prefill.tracer = traces.tracer
        decode.before["ready"] = lambda request: asyncio.sleep(0.02)
        await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 5))
        link, transfer = traces.spans
        took_ms = [(span.end_time - span.start_time) / 1e6 for span in (link, transfer)]
        assert transfer.attributes["wait_ms"] <= took_ms[1]
        assert max(took_ms[0], transfer.attributes["wait_ms"]) >= 19


async def test_a_link_that_cannot_be_opened_has_a_span_with_the_error(join):
    traces = Traces()
    prefill, decode = await join("memory")
    prefill.tracer = traces.tracer
    decode.before["offer"] = Times(9, errors.KvMismatch("other blocks"))
    with pytest.raises(errors.KvMismatch):
        await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 5))
    [span] = traces.spans
    assert (span.name, span.attributes["error.type"]) == ("kv.link", "KvMismatch")


@pytest.mark.parametrize(
    ("commit", "error", "aborts"),
    [
        (Times(9, errors.Stale("x")), errors.Stale, [False]),
        (Times(9, errors.KvMismatch("x")), errors.KvMismatch, [False]),
        # The request's own deadline.
        (lambda request: asyncio.sleep(WAIT_S), errors.DeadlineExceeded, [False]),
        (corrupt, errors.KvCorrupted, [True, False]),  # the reservation is gone by then
        (short, errors.KvCorrupted, [True, False]),
    ],
)
async def test_what_a_resend_cannot_fix_is_not_resent(join, commit, error, aborts):
    prefill, decode = await join("memory")
    asked = []

    def cancel(request):
        asked.append(request.resend)
        if request.resend:
            decode.cancel("h")

    decode.before.update(commit=commit, abort=cancel)
    timeout_s = 0.7 if error is errors.DeadlineExceeded else WAIT_S
    with pytest.raises(error):
        await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 5), timeout_s=timeout_s)
    assert asked == aborts


async def test_a_handoff_cancelled_while_it_is_withdrawn_ends_for_good(join):
    prefill, decode = await join("shm")
    asked, reached = [], asyncio.Event()

    async def slow(request):
        asked.append(request.resend)
        reached.set()
        await asyncio.sleep(0.2 * request.resend)

    decode.before["abort"] = slow
    decode.before["commit"] = corrupt
    to = decode.reserve("h", 4, 1)
    running = asyncio.create_task(prefill.hand_over(to, "h", slots(4, 5)))
    await asyncio.wait_for(reached.wait(), WAIT_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asked == [True, False]
    assert "h" in decode.reasons
    assert not decode.writing("h")


REQUEST = handoff_pb2.AbortRequest(handoff_id="h", reservation_token="token-h", incarnation="p")


@pytest.mark.parametrize("name", ["memory", "shm", "cuda_ipc"])
async def test_a_lost_abort_is_repeated_until_the_blocks_come_back(join, name):
    prefill, decode = await join(name, prefill={"waits": {"abort_wait_s": 0.0}})
    losses = Times(2, errors.Unavailable("lost"))
    decode.before["abort"] = losses
    async with prefill.opened(decode, 8, 1, 2) as handoff:
        handoff.send(slots(4, 5))
        await decode.asked()
        decode.cancel("h")
    assert decode.writing("h")  # quarantined, though the handoff is over at its sender
    await decode.freed()
    assert losses.calls == 3
    assert not decode.writing("h")


async def test_giving_up_does_not_wait_for_a_peer_that_hangs(join, monkeypatch):
    monkeypatch.setattr(outgoing, "_ABORT_S", WAIT_S)
    prefill, decode = await join("memory", prefill={"waits": {"abort_wait_s": 0.1}})
    hung = asyncio.Event()
    decode.before["abort"] = lambda request: hung.wait()
    async with prefill.opened(decode, 8, 1, 2) as handoff:
        handoff.send(slots(4, 5))
        await decode.asked()
        before = time.monotonic()
    assert time.monotonic() - before < WAIT_S
    assert "h" not in decode.reasons
    hung.set()
    await decode.freed()


@pytest.mark.parametrize(
    ("error", "times", "give_up_s", "count", "calls"),
    [
        (None, 0, 60.0, 1, range(1, 2)),
        (errors.Stale("another sender"), 1, 60.0, 1, range(1, 2)),  # any answer ends it
        (ValueError("a bug"), 1, 60.0, 1, range(1, 2)),
        (errors.Unavailable("no"), 2, 60.0, 1, range(3, 4)),  # it is repeated
        (errors.Unavailable("no"), 1000, 0.5, 1, range(1, 1000)),  # patience ends
        (None, 0, 60.0, 20, range(20, 21)),
    ],
)
async def test_every_abort_ends(join, error, times, give_up_s, count, calls):
    prefill, decode = await join("memory", prefill={"give_up_s": give_up_s})
    answers = decode.before["abort"] = Times(times, error)
    link = await prefill.links.acquire(decode.reserve("h", 4, 1), Deadline(WAIT_S))
    for _ in range(count):
        prefill.links.abort(link, REQUEST)
    prefill.links.remove(link)
    prefill.links.release(link)  # its control stays open for them
    await asyncio.wait_for(asyncio.gather(*prefill.links._aborts), WAIT_S)
    assert answers.calls in calls
    await asyncio.wait_for(asyncio.gather(*prefill.links._closing), WAIT_S)
    assert not link.control._reading


async def test_closing_waits_shortly_and_ends_what_is_not_answered(join):
    prefill, decode = await join("memory")
    link = await prefill.links.acquire(decode.reserve("h", 4, 1), Deadline(WAIT_S))
    prefill.links.release(link)
    answers = decode.before["abort"] = Times(1, errors.Unavailable("once"))
    await asyncio.wait_for(prefill.links.abort(link, REQUEST).wait(), WAIT_S)
    decode.before["abort"] = lambda request: asyncio.sleep(2 * WAIT_S)
    tried = prefill.links.abort(link, REQUEST)
    await asyncio.wait_for(prefill.links.close(), WAIT_S)  # a second for the last try
    assert answers.calls == 1 and tried.is_set()
    assert not prefill.links._aborts
