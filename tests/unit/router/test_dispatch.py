"""One request over scripted workers: when all goes well, when there is no room, when it ends."""

import asyncio
import contextlib

import pytest
from opentelemetry.context import Context

from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.v1 import common_pb2

from .scripted_workers import (
    DRAINING,
    LENGTH,
    TIMEOUT_S,
    committed,
    counting,
    first_token,
    request_state,
    started,
    token,
)


async def cancelled(task):
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_request_is_reserved_prefilled_and_decoded(cluster_of):
    cluster = await cluster_of()
    asked = request_state()
    assert await cluster.run(asked) == (counting(5), LENGTH)
    (reserve,), (prefill,) = cluster.decodes[0].requests, cluster.prefills[0].requests
    assert [reserve.stream_id] == list(cluster.decodes[0].streams)
    assert len(reserve.stream_id) == 32  # none that is shown anywhere
    assert reserve.local_prefill_max_tokens == 4
    assert list(reserve.sequence.token_ids) == [1, 2, 3]
    assert reserve.sequence.handoff_id == prefill.sequence.handoff_id == "r-1"
    assert prefill.target.reservation_token == "secret"
    assert prefill.target.incarnation == cluster.decodes[0].record.incarnation
    assert asked.final_route() == common_pb2.Route(
        prefill="p0", decode="d0", transport=common_pb2.TRANSPORT_SHM, attempts=1
    )
    assert (asked.timing().transfer_bytes, asked.timing().transfer_ms) == (1000, 2.0)
    assert asked.prefill_queue_ms == 3.0
    assert asked.cached_tokens == 0


async def test_decode_that_started_by_itself_needs_no_prefill_worker(cluster_of):
    cluster = await cluster_of()
    cluster.decodes[0].reserves = [cluster.decodes[0].accept_and_start]
    asked = request_state()
    assert await cluster.run(asked) == (counting(5), LENGTH)
    assert cluster.prefills[0].requests == []
    assert (asked.route.prefill, asked.route.decode, asked.cached_tokens) == ("", "d0", 8)


async def test_the_first_token_does_not_wait_for_the_commit(cluster_of):
    cluster = await cluster_of()
    prefill, may_commit = cluster.prefills[0], asyncio.Event()

    async def slow_handoff(request):
        yield started()
        yield first_token(100)
        await may_commit.wait()
        prefill.commit(request)
        yield committed()

    prefill.scripts = [slow_handoff]
    async with asyncio.timeout(TIMEOUT_S):
        async with contextlib.aclosing(cluster.dispatch.run(request_state(), Context())) as outputs:
            assert (await anext(outputs)).token_ids == [100]
            may_commit.set()
            assert [o.token_ids for o in [o async for o in outputs]] == [[101], [102], [103], [104]]


async def test_numbers_of_the_handoff_are_kept_when_decode_finishes_before_its_acknowledgement(
    cluster_of,
):
    cluster = await cluster_of()
    prefill, acknowledged = cluster.prefills[0], asyncio.Event()

    async def late_acknowledgement(request):
        yield first_token(100)
        prefill.commit(request)
        await acknowledged.wait()
        yield committed(num_bytes=77)

    prefill.scripts = [late_acknowledgement]
    asked = request_state(max_tokens=2)
    async with asyncio.timeout(TIMEOUT_S):
        async for output in cluster.dispatch.run(asked, Context()):
            if output.finish_reason:
                acknowledged.set()
    assert (asked.transfer_bytes, asked.route.transport) == (77, common_pb2.TRANSPORT_SHM)


async def test_a_first_token_that_is_the_last_frees_the_reservation(cluster_of):
    cluster = await cluster_of()
    assert await cluster.run(request_state(max_tokens=1)) == ([100], LENGTH)
    assert await cluster.decodes[0].cancelled.get() == "r-1"
    assert cluster.decodes[0].held == set()


async def test_a_finished_request_is_not_cancelled_on_decode(cluster_of):
    cluster = await cluster_of()
    await cluster.run(request_state())
    await cluster.dispatch.close()
    assert cluster.decodes[0].cancelled.empty()


async def test_cancelling_closes_the_prefill_call_and_frees_the_decode_blocks(cluster_of):
    cluster = await cluster_of()
    began = asyncio.Event()

    async def endless(request):
        yield started()
        began.set()
        await asyncio.Event().wait()

    cluster.prefills[0].scripts = [endless]
    running = asyncio.create_task(cluster.run(request_state()))
    async with asyncio.timeout(TIMEOUT_S):
        await began.wait()
        await cancelled(running)
        assert await cluster.prefills[0].ended.get() == "r-1"
        assert await cluster.decodes[0].cancelled.get() == "r-1"
    view = cluster.fleet.snapshot()
    assert (view.prefill[0].assigned_tokens, view.decode[0].assigned_sequences) == (0, 0)


async def test_a_reserve_cancelled_in_flight_strands_no_blocks(cluster_of):
    cluster = await cluster_of()
    decode, arrived = cluster.decodes[0], asyncio.Event()

    async def accept_too_late(request):
        answer = await decode.accept(request)
        arrived.set()
        await asyncio.Event().wait()
        return answer

    decode.reserves = [accept_too_late]
    running = asyncio.create_task(cluster.run(request_state()))
    async with asyncio.timeout(TIMEOUT_S):
        await arrived.wait()
        await cancelled(running)
        assert await decode.cancelled.get() == "r-1"
    assert decode.held == set()
    assert cluster.wait_queue.depth == 0


async def test_a_refused_reservation_goes_to_the_next_decode_worker_at_once(cluster_of):
    cluster = await cluster_of(decode=2)

    async def refuse(request):
        raise Overloaded("no blocks")

    cluster.decodes[0].reserves = [refuse]
    asked = request_state()
    assert await cluster.run(asked) == (counting(5), LENGTH)
    assert asked.final_route().decode == "d1"
    assert asked.attempts == 1
    await cluster.dispatch.close()
    assert cluster.decodes[0].cancelled.empty()  # a refusal holds nothing


async def test_a_full_fleet_is_waited_for(cluster_of):
    cluster = await cluster_of()
    refused = asyncio.Event()

    async def refuse(request):
        refused.set()
        raise Overloaded("no blocks")

    cluster.decodes[0].reserves = [refuse]
    asked = request_state()
    running = asyncio.create_task(cluster.run(asked))
    async with asyncio.timeout(TIMEOUT_S):
        await refused.wait()
    await cluster.until_waiting(1)
    cluster.decodes[0].tell(blocks_free=10)
    assert await running == (counting(5), LENGTH)
    assert (asked.attempts, cluster.wait_queue.depth) == (1, 0)


async def test_a_change_that_arrives_during_a_refusal_is_not_lost(cluster_of):
    cluster = await cluster_of()
    decode = cluster.decodes[0]

    async def refuse_after_telling(request):
        decode.tell(blocks_free=10)
        await cluster.until(lambda s: s.decode[0].load.blocks_free == 10)
        raise Overloaded("no blocks")

    decode.reserves = [refuse_after_telling]  # no changed comes after this one
    assert await cluster.run(request_state()) == (counting(5), LENGTH)


async def test_those_who_wait_for_room_get_it_in_order_of_virtual_finish(cluster_of):
    cluster = await cluster_of()
    decode = cluster.decodes[0]
    decode.tell(blocks_free=0)
    await cluster.until(lambda s: s.decode[0].load.blocks_free == 0)
    finishes = [3.0, 1.0, 2.0, 5.0, 4.0]
    asks = [
        request_state(request_id=f"finish {finish:g}", virtual_finish=finish) for finish in finishes
    ]
    waiting = [asyncio.create_task(cluster.run(asked)) for asked in asks]
    async with asyncio.timeout(TIMEOUT_S):
        await cluster.until_waiting(len(finishes))
        assert decode.requests == []
        decode.tell(blocks_free=20)
        assert [tokens for tokens, _ in await asyncio.gather(*waiting)] == [counting(5)] * 5
    asked = [request.sequence.handoff_id for request in decode.requests]
    assert asked == [f"finish {finish:g}-1" for finish in sorted(finishes)]


async def test_no_worker_is_unavailable_with_advice(cluster_of):
    cluster = await cluster_of(max_attempts=2, recovery_s=0.1)
    cluster.decodes[0].tell(state=DRAINING)
    await cluster.until_state(cluster.decodes[0], "DRAINING")
    asked = request_state()
    with pytest.raises(Unavailable, match=r"no decode worker is ready.*DRAINING") as caught:
        await cluster.run(asked)
    assert caught.value.retry_after_s > 0
    assert asked.attempts == 2


@pytest.mark.parametrize("where", ["reserve", "prefill"])
async def test_an_invalid_request_is_never_retried(cluster_of, where):
    cluster = await cluster_of()

    async def invalid_reserve(request):
        raise InvalidRequest("no such thing", "sequence")

    async def invalid_prefill(request):
        yield started()
        raise InvalidRequest("no such thing", "sequence")

    if where == "reserve":
        cluster.decodes[0].reserves = [invalid_reserve]
    else:
        cluster.prefills[0].scripts = [invalid_prefill]
    asked = request_state()
    with pytest.raises(InvalidRequest, match="no such thing") as caught:
        await cluster.run(asked)
    assert caught.value.field == "sequence"
    assert asked.attempts == 1
    assert await cluster.decodes[0].cancelled.get() == "r-1"


async def test_tokens_sent_to_prefill_count_until_the_first_token(cluster_of):
    cluster = await cluster_of()
    prefill, asked_for, go_on = cluster.prefills[0], asyncio.Event(), asyncio.Event()

    async def paused(request):
        asked_for.set()
        await go_on.wait()
        yield first_token(token(request.sequence)[0])
        prefill.commit(request)
        yield committed()

    prefill.scripts = [paused]
    running = asyncio.create_task(cluster.run(request_state()))
    await asked_for.wait()
    assert cluster.fleet.snapshot().prefill[0].assigned_tokens == 3
    go_on.set()
    await running
    assert cluster.fleet.snapshot().prefill[0].assigned_tokens == 0


async def test_a_burst_is_spread_before_any_load_is_reported(cluster_of):
    cluster = await cluster_of(prefill=2, decode=2)
    prompt = tuple(range(1, 9))  # longer than what decode computes by itself
    states = [request_state(request_id=f"r{number}", prompt=prompt) for number in range(6)]
    await asyncio.gather(*(cluster.run(one) for one in states))
    assert [len(prefill.requests) for prefill in cluster.prefills] == [3, 3]
    view = cluster.fleet.snapshot()
    assert [worker.assigned_tokens for worker in view.prefill] == [0, 0]
