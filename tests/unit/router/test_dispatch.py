"""One request over scripted workers: when all goes well, when there is no room, when it ends."""

import asyncio
import contextlib
import itertools
import time
from functools import partial

import pytest
from opentelemetry.trace import INVALID_SPAN

from baton.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TransferFailed,
    Unavailable,
)
from baton.net.tasks import cancelled
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.dispatch.attempt import Attempt
from router.fleet.member import Member
from router.queueing import wait_queue
from tests.tracing import Traces

from .scripted_workers import (
    LENGTH,
    TIMEOUT_S,
    committed,
    counting,
    first_token,
    prompt_logprobs,
    received,
    request_state,
    says,
    seen,
    started,
)
from .snapshots import decode_views, pending, prefill_views

LOGPROBS = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=100))


async def refuse(request):
    raise Overloaded("no blocks")


async def test_a_request_is_reserved_prefilled_and_decoded(cluster):
    state = request_state()
    assert await cluster.run(state) == (counting(5), LENGTH)
    (reserve,), (prefill,) = cluster.decodes[0].requests, cluster.prefills[0].requests
    assert reserve.local_prefill_max_tokens == 4
    assert list(reserve.sequence.token_ids) == [1, 2, 3]
    assert reserve.sequence.handoff_id == prefill.sequence.handoff_id == "r-1"
    assert prefill.target.reservation_token == "secret"
    assert prefill.target.incarnation == "d0"
    assert state.final_route() == common_pb2.Route(
        prefill="p0", decode="d0", transport=common_pb2.TRANSPORT_SHM, attempts=1
    )
    assert (state.timing().transfer_bytes, state.timing().transfer_ms) == (1000, 2.0)
    assert (state.prefill_queue_ms, state.cached_tokens) == (3.0, 0)
    assert cluster.decodes[0].cancelled.empty(), "it has finished there"


async def test_a_request_that_names_its_workers_runs_there_and_waits_for_no_room(cluster_of):
    cluster = await cluster_of(prefill=2, decode=2, max_attempts=2)
    for names in itertools.product(("p0", "p1"), ("d0", "d1")):
        state = request_state(request_id="-".join(names), workers=frozenset(names))
        assert await cluster.run(state) == (counting(5), LENGTH)
        assert (state.route.prefill, state.route.decode) == names
    cluster.decodes[0].reserves = [refuse] * 2
    with pytest.raises(Unavailable, match=r"request names: no room .*d0"):
        await cluster.run(request_state(workers=frozenset(("p0", "d0"))))
    assert cluster.wait_queue.depth == 0
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        await cluster.run(request_state(workers=frozenset(("p0", "gone"))))


async def test_requests_that_wait_look_again_when_another_has_ended(cluster, monkeypatch):
    """Its prompt and its sequence count against its workers until then, though these may have
    reported their end before and report nothing after."""
    ends, forget = [], Member.unsubscribe

    def unsubscribe(member, handoff_id):
        forget(member, handoff_id)
        ends.append(cluster.next_change())

    monkeypatch.setattr(Member, "unsubscribe", unsubscribe)
    await cluster.run(request_state())
    assert len(ends) == 2 and all(event.is_set() for event in ends)


@pytest.mark.parametrize("by_decode", [False, True])
async def test_requests_that_wait_look_again_at_a_first_token(cluster, monkeypatch, by_decode):
    """The next prompt is placed at once, not at a worker's next report: it comes a step later."""
    decode, changes, forget = cluster.decodes[0], [], Member.unassign

    def unassign(member, handoff_id):
        forget(member, handoff_id)
        changes.append(cluster.next_change())

    cluster.prefills[0].scripts = [says(first_token(1))]
    if by_decode:
        decode.reserves = [decode.accept_and_start]
        decode.runs = [lambda sequence, ahead: decode.run_to_end(sequence, ahead, most=1)]
    monkeypatch.setattr(Member, "unassign", unassign)
    running = asyncio.create_task(cluster.run(request_state()))
    await seen(lambda: changes and changes[0].is_set())
    assert not running.done()
    await cancelled(running)


async def test_a_request_whose_adapter_is_unloaded_waits_no_longer(cluster_of):
    cluster = await cluster_of(recovery_s=10.0)

    async def load(worker, *adapters):
        worker.record.ClearField("adapters")
        worker.record.adapters.extend(adapters)
        await cluster.registrations[worker.incarnation].update(worker.record)
        await cluster.until(
            lambda s: s.workers[s.rows[worker.incarnation]].has_adapter("1f") == bool(adapters)
        )

    (prefill,) = cluster.prefills
    await load(prefill, common_pb2.Adapter(name="sql", identity="1f"))
    waiting = asyncio.create_task(cluster.run(request_state(adapter="1f")))
    await cluster.until_waiting(1)
    await load(prefill)
    for late in (waiting, cluster.run(request_state(adapter="1f"))):
        with pytest.raises(ModelNotFound, match="was unloaded"):
            await late
    assert cluster.wait_queue.depth == 0


async def test_a_request_waits_for_a_worker_that_may_come_with_its_adapter(cluster_of):
    cluster = await cluster_of(recovery_s=0.2)
    await cluster.leave(cluster.prefills[0])
    await cluster.leave(cluster.decodes[0])
    await seen(lambda: not cluster.fleet.snapshot().workers)
    with pytest.raises(Unavailable, match="no worker is ready"):
        await cluster.run(request_state(adapter="1f"))


async def test_decode_that_started_by_itself_needs_no_prefill_worker(cluster):
    cluster.decodes[0].reserves = [cluster.decodes[0].accept_and_start]
    state = request_state()
    assert await cluster.run(state) == (counting(5), LENGTH)
    assert cluster.prefills[0].requests == []
    assert (state.route.prefill, state.route.decode, state.cached_tokens) == ("", "d0", 2)


async def test_without_prefill_workers_a_decode_worker_computes_the_prompt(cluster):
    decode = cluster.decodes[0]
    await cluster.leave(cluster.prefills[0])
    await cluster.until(lambda s: s.alone.any())
    decode.reserves = [decode.accept_and_start]
    state = request_state(prompt=tuple(range(20)))
    assert await cluster.run(state) == (counting(5), LENGTH)
    assert decode.requests[0].local_prefill_max_tokens == 20
    assert (state.route.prefill, state.route.decode) == ("", "d0")
    assert (await cluster.until_state(decode, "READY")).assigned == ()


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_a_new_request_waits_for_a_worker_as_long_as_the_recovery_timeout_says(
    cluster_of, max_tokens
):
    cluster = await cluster_of(recovery_s=0.2)
    for worker in (cluster.prefills[0], cluster.decodes[0]):
        await cluster.leave(worker)
    await seen(lambda: not cluster.fleet.snapshot().workers)
    began, state = time.monotonic(), request_state(max_tokens=max_tokens)
    with pytest.raises(Unavailable, match="no worker is ready") as caught:
        await cluster.run(state)
    assert time.monotonic() - began >= 0.2 and caught.value.retry_after_s > 0
    assert state.attempts == 1, "it is not waited for again and again"


async def test_without_decode_workers_a_prefill_worker_serves_the_whole_request(cluster):
    prefill = cluster.prefills[0]
    await cluster.leave(cluster.decodes[0])
    await cluster.until(lambda s: s.alone.any())
    prefill.tell(blocks_free=100)
    await cluster.until(lambda s: s.workers[0].load.blocks_free)
    state = request_state(prompt=tuple(range(20)))
    assert await cluster.run(state) == (counting(5), LENGTH)
    assert (state.route.prefill, state.route.decode) == ("", "p0")


async def test_a_prompt_alone_takes_a_prefill_worker_and_nothing_of_a_full_decode_worker(cluster):
    await cluster.fill()
    state = request_state(max_tokens=0, prompt_logprobs=1)
    assert await cluster.run(state) == ([], LENGTH)
    (prefill,) = cluster.prefills[0].requests
    assert not prefill.HasField("target")
    assert cluster.decodes[0].requests == [] and cluster.decodes[0].cancelled.empty()
    assert state.final_route() == common_pb2.Route(prefill="p0", attempts=1)
    assert state.prompt_logprobs == prompt_logprobs([1, 2, 3])


async def test_what_a_failed_attempt_told_of_a_prompt_is_not_told_twice(cluster):
    first = prefill_pb2.PrefillResponse(prompt_logprobs=prompt_logprobs([1, 2, 3], 1, 2))
    cluster.prefills[0].scripts = [says(started(), first, then=InternalError("the step failed"))]
    state = request_state(prompt_logprobs=1)
    assert await cluster.run(state) == (counting(5), LENGTH)
    assert (state.attempts, state.prompt_logprobs) == (2, prompt_logprobs([1, 2, 3]))


async def test_decode_tells_of_a_prompt_that_it_computes():
    attempt = Attempt("h", lambda *_: False)
    attempt.first_token_seen()
    for part in ((1, 2), (2, None)):
        event = decode_pb2.SequenceEvent(prompt_logprobs=prompt_logprobs([1, 2, 3], *part))
        attempt.on_decode(event)
    assert attempt.prompt_logprobs == prompt_logprobs([1, 2, 3])


async def test_the_acknowledgement_of_a_handoff_is_waited_for(cluster, monkeypatch):
    """Decode finishes before the prefill worker's last message, which has the numbers."""
    monkeypatch.setattr("router.dispatch.attempt._COMMIT_ACK_S", (TIMEOUT_S, TIMEOUT_S))
    prefill = cluster.prefills[0]

    async def late_acknowledgement(request):
        yield first_token(100)
        prefill.commit(request)
        await asyncio.sleep(0.05)
        yield committed(num_bytes=77)

    prefill.scripts = [late_acknowledgement]
    state = request_state(max_tokens=2)
    assert await cluster.run(state) == ([100, 101], LENGTH)
    assert state.transfer_bytes == 77


async def test_a_prefill_worker_that_stands_still_delays_no_end_by_more_than_the_request_took():
    attempt = Attempt("h", lambda *_: False)
    attempt.prefill_sent(INVALID_SPAN)
    attempt.finished_on_decode = True
    acknowledged = asyncio.create_task(attempt.acknowledged())
    await asyncio.sleep(0.5)  # timers end in order, however slow the machine is
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert acknowledged.done()
    await acknowledged


async def test_an_answer_in_the_turn_of_its_timeout_leaves_no_error_behind():
    """It would end the request as if its own deadline had passed."""
    attempt = Attempt("h", lambda *_: False)
    reserved = asyncio.create_task(attempt.reserved(0.01))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(attempt.on_decode, decode_pb2.ReserveResponse())
    time.sleep(0.1)  # noqa: ASYNC251 - the loop is late, and the timer is due with the answer
    with contextlib.suppress(TimeoutError):
        await reserved
    finished = asyncio.create_task(attempt.finished())
    await asyncio.sleep(0)
    assert not finished.done()
    finished.cancel()


async def test_a_first_token_that_is_the_last_frees_the_reservation(cluster):
    assert await cluster.run(request_state(max_tokens=1)) == ([100], LENGTH)
    assert await received(cluster.decodes[0].cancelled) == "r-1"
    assert cluster.decodes[0].held == set()


# The order of two workers' messages.


def event(*token_ids, reason=0, abort="", logprobs=()):
    return decode_pb2.SequenceEvent(
        token_ids=token_ids, finish_reason=reason, abort_reason=abort, logprobs=logprobs
    )


FIRST = first_token(100)
FIRST.first_token.logprobs.CopyFrom(LOGPROBS)


@pytest.mark.parametrize(
    ("messages", "outputs", "error"),
    [
        # Decode events wait for prefill's first token.
        ([event(101), event(102, reason=LENGTH), started(), FIRST], [[100], [101], [102]], None),
        # Tokens before an error are delivered, whatever becomes of Commit.
        ([FIRST, event(101), Unavailable("the stream broke")], [[100], [101]], Unavailable),
        ([event(101), event(abort="no blocks left")], [], TransferFailed),
        ([event(abort="its lease")], [], TransferFailed),  # before Commit the handoff has failed
        ([FIRST, event(101), event(abort="its lease")], [[100], [101]], InternalError),
    ],
)
async def test_two_workers_messages_become_one_stream_in_order(messages, outputs, error):
    taken = []
    attempt = Attempt("r-1", lambda *output: taken.append(output))
    attempt.prefill_sent(INVALID_SPAN)
    for message in messages:
        if isinstance(message, prefill_pb2.PrefillResponse):
            attempt.on_prefill(message)
        else:
            attempt.on_decode(message)
    with pytest.raises(error) if error else contextlib.nullcontext():
        async with asyncio.timeout(TIMEOUT_S):
            await attempt.finished()
    assert [token_ids for token_ids, _, _ in taken] == outputs
    assert not taken or taken[0][1] == [LOGPROBS]
    assert attempt.finished_on_decode is (error is None)


# The end.


@pytest.mark.parametrize("where", ["reserve", "prefill"])
async def test_a_request_cancelled_in_flight_strands_no_blocks(cluster, where):
    """And those that wait look again."""
    prefill, decode, arrived = cluster.prefills[0], cluster.decodes[0], asyncio.Event()

    async def accept_too_late(request):
        await decode.accept(request)
        arrived.set()
        await asyncio.Event().wait()

    async def endless(request):
        yield started()
        arrived.set()
        await asyncio.Event().wait()

    prefill.scripts = [endless]
    if where == "reserve":
        decode.reserves = [accept_too_late]
    prompt = tuple(range(8))  # more than decode computes by itself
    running = asyncio.create_task(cluster.run(request_state(prompt=prompt)))
    async with asyncio.timeout(TIMEOUT_S):
        await arrived.wait()
        assert prefill_views(cluster.fleet.snapshot())[0].assigned_tokens == len(prompt)
        changed = cluster.next_change()
        await cancelled(running)
        assert changed.is_set()
        assert await decode.cancelled.get() == "r-1"
        if where == "prefill":
            assert await prefill.ended.get() == "r-1"
    view = cluster.fleet.snapshot()
    assert [(w.assigned_tokens, w.assigned_sequences) for w in view.workers] == [(0, 0)] * 2
    assert (cluster.wait_queue.depth, decode.held) == (0, set())


@pytest.mark.parametrize("where", ["reserve", "prefill"])
async def test_an_invalid_request_is_never_retried(cluster, where):
    invalid = InvalidRequest("no such thing", "sequence")

    async def invalid_reserve(request):
        raise invalid

    if where == "reserve":
        cluster.decodes[0].reserves = [invalid_reserve]
    else:
        cluster.prefills[0].scripts = [says(started(), then=invalid)]
    state = request_state()
    with pytest.raises(InvalidRequest, match="no such thing") as caught:
        await cluster.run(state)
    assert (caught.value.field, state.attempts) == ("sequence", 1)
    assert await received(cluster.decodes[0].cancelled) == "r-1"


# Room.


async def test_a_refused_reservation_goes_to_the_next_decode_worker_at_once(cluster_of):
    cluster = await cluster_of(decode=2)
    cluster.decodes[0].reserves = [refuse]
    state = request_state()
    assert await cluster.run(state) == (counting(5), LENGTH)
    assert (state.final_route().decode, state.attempts) == ("d1", 1)
    assert cluster.decodes[0].cancelled.empty()  # a refusal holds nothing


async def test_a_full_fleet_is_waited_for_and_no_change_is_lost(cluster):
    decode = cluster.decodes[0]

    async def refuses(request):
        decode.tell(blocks_free=10)  # no other change comes after this one
        await cluster.until(lambda s: decode_views(s)[0].load.blocks_free == 10)
        raise Overloaded("no blocks")

    decode.reserves = [refuses]
    state = request_state()
    assert await cluster.run(state) == (counting(5), LENGTH)
    assert (state.attempts, cluster.wait_queue.depth) == (1, 0)


async def test_the_span_of_a_placement_tells_of_tries_and_refusals(cluster_of):
    traces = Traces()
    cluster = await cluster_of(tracer=traces.tracer)
    decode = cluster.decodes[0]
    running = []
    for name in "ab":
        decode.reserves, state = [refuse], request_state(request_id=name)
        running.append(asyncio.create_task(cluster.run(state)))
        await cluster.until_waiting(len(running))
    decode.tell(blocks_free=20)
    await asyncio.gather(*running)
    places = [dict(span.attributes) for span in traces.spans if span.name == "router.place"]
    places.sort(key=lambda place: place["baton.queue_depth"])
    assert [place["baton.queue_depth"] for place in places] == [0, 1]
    for place in places:
        assert (place["baton.refusals"], place["baton.last_refusal"]) == (1, "no blocks")
        assert place["baton.tries"] >= 2


async def test_the_span_of_a_stream_tells_when_its_last_token_came(cluster_of):
    """A worker that falls silent, until the caller leaves, is visible."""
    traces = Traces()
    cluster = await cluster_of(tracer=traces.tracer)
    decode = cluster.decodes[0]
    decode.runs = [partial(decode.run_to_end, most=2)]
    state = request_state()
    running = asyncio.create_task(cluster.run(state))
    async with asyncio.timeout(TIMEOUT_S):
        while len(state.delivered) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        silent_ns = time.time_ns()
        await asyncio.sleep(0.01)
        await cancelled(running)
    [span] = [span for span in traces.spans if span.name == "router.stream"]
    last_ns = span.start_time + span.attributes["baton.last_token_ms"] * 1e6
    assert span.start_time - 1e6 <= last_ns <= silent_ns + 1e6 < span.end_time


async def test_waiting_requests_get_room_in_order_of_virtual_finish(cluster):
    decode = cluster.decodes[0]
    await cluster.fill()
    finishes = [3.0, 1.0, 2.0, 5.0, 4.0]
    states = [request_state(request_id=f"{at:g}", pending=pending(at)) for at in finishes]
    waiting = [asyncio.create_task(cluster.run(state)) for state in states]
    await cluster.until_waiting(len(finishes))
    assert decode.requests == []
    decode.tell(blocks_free=20)
    assert [tokens for tokens, _ in await asyncio.gather(*waiting)] == [counting(5)] * 5
    order = [request.sequence.handoff_id for request in decode.requests]
    assert order == ["1-1", "2-1", "3-1", "4-1", "5-1"]


async def test_small_requests_pass_a_large_one_that_waits_but_not_on_the_worker_kept_for_it(
    cluster_of, monkeypatch
):
    """The router's part of what `test_wait_queue` shows: d1 has room first, and gets no other."""
    cluster = await cluster_of(decode=2)
    first, kept = cluster.decodes
    first.tell(blocks_free=50, blocks_held=50)
    kept.tell(blocks_free=60, blocks_held=40)
    await cluster.until(lambda s: {w.load.blocks_held for w in decode_views(s)} == {50, 40})
    monkeypatch.setattr(wait_queue, "PASSING_S", 0.0)
    large = request_state(request_id="large", prompt=range(4 * 75), pending=pending(1.0))
    small = [request_state(request_id=f"s{at}", pending=pending(2.0 + at)) for at in range(4)]
    waiting = asyncio.create_task(cluster.run(large))
    await cluster.until_waiting(1)
    first.tell(blocks_free=50, blocks_held=50, steps=1)  # another change, after a while
    await seen(lambda: cluster.wait_queue.reserved_for_others(small[0].request.pending) == {"d1"})
    for state in small:
        assert await cluster.run(state) == (counting(5), LENGTH)
    assert {state.final_route().decode for state in small} == {"d0"}
    kept.tell(blocks_free=80, blocks_held=20)
    assert await waiting == (counting(5), LENGTH)
    assert large.final_route().decode == "d1"
    assert cluster.wait_queue.reserved_for_others(small[0].request.pending) == frozenset()


async def test_the_recovery_timeout_stops_when_workers_are_back_though_full(cluster_of):
    cluster = await cluster_of(recovery_s=0.3, max_attempts=1)
    decode = cluster.decodes[0]
    await cluster.leave(decode)
    await cluster.until(lambda s: not decode_views(s))
    running = asyncio.create_task(cluster.run(request_state()))
    await cluster.until_waiting(1)
    decode.load.blocks_free = 0
    await cluster.join(decode)
    await cluster.until_state(decode, "READY")
    await asyncio.sleep(0.4)
    decode.tell()
    assert await running == (counting(5), LENGTH)
