"""A transfer that failed is done again while prefill has the KV and decode holds the blocks."""

import asyncio
import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.errors import DeadlineExceeded, KvCorrupted, KvMismatch, Stale, TransferFailed
from kvtransfer.pool import Slots
from kvtransfer.sender import MAX_RESENDS

from .kvtransfer_parts import TOKEN_BYTES, TRANSPORTS, expect_only, joined, slots

every_transport = pytest.mark.parametrize("name", list(TRANSPORTS))


class Times:
    """Lets something happen the first `times` times; counts every call."""

    def __init__(self, times, act):
        self.times, self.act, self.calls = times, act, 0

    def __call__(self, request):
        self.calls += 1
        if self.calls <= self.times:
            self.act(request)


def corrupt(request):
    request.checksum ^= 1


@every_transport
@pytest.mark.parametrize("cached", [0, 4])
async def test_corrupted_kv_is_sent_again_on_the_same_link(name, cached):
    async with joined(name) as (prefill, decode):
        decode.before_call("commit", Times(1, corrupt))
        to = decode.reserve("h", 18, 9, 4, 5, 6, 20, cached=cached)
        own, there = slots(18 - cached, *(1, 2, 3, 8, 7)[cached // 4 :]), (9, 4, 5, 6, 20)
        chunks = [Slots(own.block_ids[:2], 8), Slots(own.block_ids[2:], own.num_tokens - 8)]
        stats = await prefill.hand_over(to, "h", *chunks)
        assert (stats.resends, stats.chunks) == (1, 2)
        assert stats.num_bytes == (18 - cached) * TOKEN_BYTES
        remote = slots(18 - cached, *there[cached // 4 :])
        expect_only(prefill.pool, own, decode.pool, remote, decode.before)
        assert decode.held.committed_tokens == {"h": 7}
        assert decode.held.reasons == {}  # the reservation was never given up
        assert not decode.receiver.writing("h")
        assert [pair.epoch for pair in prefill.links.status()] == [1]


@every_transport
async def test_a_link_lost_in_the_middle_is_opened_anew_for_the_handoff(name):
    async with joined(name, prefill={"backoff_s": 60.0}) as (prefill, decode):
        async with prefill.opened(decode, 8, 1, 2) as handoff:
            handoff.send(0, slots(4, 5))
            await decode.asked()
            decode.receiver._peers.drop("p")
            handoff.send(4, slots(4, 6))
            stats = await handoff.commit(8, 7)
        assert stats.resends == 1
        expect_only(prefill.pool, slots(8, 5, 6), decode.pool, slots(8, 1, 2), decode.before)
        assert (decode.held.committed_tokens, decode.held.reasons) == ({"h": 7}, {})
        assert [(pair.epoch, pair.state) for pair in prefill.links.status()] == [(2, "OPEN")]


@every_transport
async def test_a_put_that_fails_halfway_is_done_again(name):
    async with joined(name, prefill={"backoff_s": 60.0}) as (prefill, decode):
        failures = []
        connect = prefill.links._connect

        async def fragile(target):
            link = await connect(target)
            put = link._link.put

            def halfway(local, remote, digest, timeout_s):
                if failures:
                    return put(local, remote, digest, timeout_s)
                failures.append(link.epoch)
                if link.transport.one_sided:
                    put(Slots(local.block_ids[:1], 4), Slots(remote.block_ids[:1], 4), digest, 1)
                raise TransferFailed("cut in the middle")

            link._link.put = halfway
            return link

        prefill.links._connect = fragile
        to = decode.reserve("h", 8, 1, 2)
        stats = await prefill.hand_over(to, "h", slots(8, 5, 6))
        assert (stats.resends, failures) == (1, [1])
        expect_only(prefill.pool, slots(8, 5, 6), decode.pool, slots(8, 1, 2), decode.before)
        assert (decode.held.committed_tokens, decode.held.reasons) == ({"h": 7}, {})


@every_transport
async def test_all_handoffs_of_a_lost_link_are_sent_again_over_one_new_one(name):
    async with joined(name) as (prefill, decode):
        targets = [decode.reserve(f"h{n}", 8, 2 * n, 2 * n + 1) for n in range(6)]

        async def in_two_parts(n, to):
            async with prefill.open(to, f"h{n}", 8, 20.0) as handoff:
                handoff.send(0, slots(4, n))
                await lost.wait()
                handoff.send(4, slots(4, n + 10))
                return await handoff.commit(8, 7)

        lost = asyncio.Event()
        running = [asyncio.create_task(in_two_parts(n, to)) for n, to in enumerate(targets)]
        await decode.asked()
        decode.receiver._peers.drop("p")
        lost.set()
        stats = await asyncio.gather(*running)
        assert len(decode.held.committed_tokens) == 6
        assert all(one.resends <= MAX_RESENDS for one in stats)
        assert any(one.resends for one in stats)
        assert len(prefill.links.status()) == 1


@every_transport
async def test_resends_are_bounded_and_then_the_blocks_are_given_back(name):
    async with joined(name) as (prefill, decode):
        commits = Times(100, corrupt)
        decode.before_call("commit", commits)
        to = decode.reserve("h", 4, 1)
        with pytest.raises(KvCorrupted):
            await prefill.hand_over(to, "h", slots(4, 5))
        assert commits.calls == 1 + MAX_RESENDS
        assert "KvCorrupted" in decode.held.reasons["h"]
        assert not decode.receiver.writing("h")


async def test_a_reservation_that_is_gone_is_not_sent_again():
    async with joined("shm") as (prefill, decode):

        def cancel(request):
            assert request.resend
            del decode.held.blocks["h"]
            decode.receiver.forget("h")

        withdrawals = Times(1, cancel)
        decode.before_call("commit", corrupt)
        decode.before_call("abort", withdrawals)
        to = decode.reserve("h", 4, 1)
        with pytest.raises(KvCorrupted):
            await prefill.hand_over(to, "h", slots(4, 5))
        assert withdrawals.calls == 2  # the second one is for good


@pytest.mark.parametrize(
    "raised", [Stale("x"), KvMismatch("x"), DeadlineExceeded("x")], ids=lambda e: type(e).__name__
)
async def test_what_a_resend_cannot_fix_is_not_resent(raised):
    async with joined("memory") as (prefill, decode):

        def fail(request):
            raise raised

        asked = []
        decode.before_call("commit", fail)
        decode.before_call("abort", asked.append)
        to = decode.reserve("h", 4, 1)
        timeout_s = 0.5 if isinstance(raised, DeadlineExceeded) else 10.0
        if isinstance(raised, DeadlineExceeded):  # the request's own
            decode.receiver.commit = lambda request: asyncio.sleep(5)
        with pytest.raises(type(raised)):
            await prefill.hand_over(to, "h", slots(4, 5), timeout_s=timeout_s)
        assert [request.resend for request in asked] == [False]


async def test_a_failed_commit_keeps_the_reservation_but_nothing_writes_into_it():
    async with joined("shm") as (prefill, decode):
        decode.before_call("commit", corrupt)
        async with prefill.opened(decode, 4, 1) as handoff:
            stopped = asyncio.Event()
            handoff._prepare_resend = lambda link, failure: stopped.set() or stuck()
            stuck = asyncio.Event().wait
            handoff.send(0, slots(4, 5))
            committing = asyncio.create_task(handoff.commit(4, 7))
            await asyncio.wait_for(stopped.wait(), 5)
            assert "h" in decode.held.blocks
            assert not decode.receiver.writing("h")
            committing.cancel()
        assert "h" in decode.held.reasons


async def test_a_handoff_cancelled_while_it_is_withdrawn_ends_for_good():
    async with joined("shm") as (prefill, decode):
        asked, reached = [], asyncio.Event()
        abort = decode.receiver.abort

        async def slow(request):
            asked.append(request.resend)
            reached.set()
            if request.resend:
                await asyncio.sleep(0.2)
            return await abort(request)

        decode.receiver.abort = slow
        decode.before_call("commit", corrupt)
        to = decode.reserve("h", 4, 1)
        running = asyncio.create_task(prefill.hand_over(to, "h", slots(4, 5)))
        await asyncio.wait_for(reached.wait(), 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asked == [True, False]
        assert "h" in decode.held.reasons
        assert not decode.receiver.writing("h")


async def test_a_receive_that_failed_at_the_receiver_is_posted_again():
    async with joined("gloo") as (prefill, decode):
        to = decode.reserve("first", 4, 1)
        await prefill.hand_over(to, "first", slots(4, 5))
        listener = decode.receiver._peers.find("p", 1).listener
        receive, failed = listener.receive, threading.Event()

        def failing(*arguments):
            if failed.is_set():
                return receive(*arguments)
            failed.set()
            raise TransferFailed("the receive was cut")

        listener.receive = failing
        to = decode.reserve("h", 8, 2, 3)
        stats = await prefill.hand_over(to, "h", slots(8, 5, 6))
        assert stats.resends == 1
        assert decode.held.committed_tokens["h"] == 7


async def test_the_span_counts_resends():
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    async with joined("memory", prefill={"tracer": tracer}) as (prefill, decode):
        decode.before_call("commit", Times(2, corrupt))
        await prefill.hand_over(decode.reserve("h", 4, 1), "h", slots(4, 5))
    [span] = exporter.get_finished_spans()
    assert (span.name, span.attributes["baton.resends"]) == ("kv.transfer", 2)
    provider.shutdown()
