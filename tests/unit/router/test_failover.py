"""Whatever fails under a request, its stream goes on elsewhere, each token once."""

import asyncio
import time
from functools import partial

import pytest

import router.dispatch
from baton.config import PROVING_TOKENS
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.v1 import common_pb2
from router.dispatch.failover import record_failure
from router.fleet.liveness import LivenessConfig

from .scripted_workers import (
    LENGTH,
    TIMEOUT_S,
    DecodeWorker,
    counting,
    first_token,
    received,
    request_state,
    says,
    seen,
    started,
    token,
)
from .snapshots import decode_views, pending, prefill_views

QUICK = LivenessConfig(silence_s=0.6, stall_s=2.0)


def failing(error, tokens=0):
    """A prefill script that starts and fails."""
    return says(started(queue_ms=1.0), *[first_token(100)] * tokens, then=error)


async def assert_goes_on(cluster, state=None, attempts=2, after=None):
    """The stream is whole, whatever is done `after` its tokens; nothing of it is left anywhere."""
    tokens, after, state = [], dict(after or {}), state or request_state()
    async with asyncio.timeout(TIMEOUT_S):
        async for token_ids, finish_reason in cluster.outputs(state):
            tokens, reason = tokens + token_ids, finish_reason
            if action := after.pop(tokens[-1], None):
                await action()
    assert tokens == counting(state.request.params.max_tokens)
    assert reason == LENGTH
    assert after == {}
    assert state.final_route().attempts == attempts
    view = cluster.fleet.snapshot()
    assert all(worker.assigned_tokens == 0 for worker in view.workers)
    assert all(worker.assigned_sequences == 0 for worker in view.workers)
    return state


def pauses(decode, most):
    """A run of `most` tokens, and no more."""
    return lambda sequence, ahead: decode.run_to_end(sequence, ahead, most)


def gives_up(decode, handoff_id="r-1"):
    """The decode worker aborts a sequence."""

    async def action():
        decode.release(handoff_id)
        decode.send(handoff_id, abort="preempted for good")

    return action


def assert_continued(request, delivered):
    """A later attempt asked for the same sequence, continued."""
    sequence = request.sequence
    assert list(sequence.token_ids) == [1, 2, 3, *counting(delivered)]
    assert (sequence.prompt_tokens, sequence.sampling.seed) == (3, 7)
    assert sequence.sampling.max_tokens == 5


# The prefill worker.


@pytest.mark.parametrize(
    ("script", "avoided", "delivered"),
    [
        (failing(Unavailable("u")), {"p0"}, 0),
        (failing(InternalError("i")), {"p0"}, 0),
        (failing(Stale("s")), {"p0"}, 0),
        (failing(Cancelled("c")), {"p0"}, 0),
        (failing(DeadlineExceeded("of a step")), {"p0"}, 0),
        (failing(ValueError("v")), {"p0"}, 0),
        # After the first token it is the handoff that failed: either end may be the reason.
        (failing(InternalError("i"), tokens=1), {"p0", "d0"}, 1),
        (failing(TransferFailed("lost"), tokens=1), {"p0", "d0"}, 1),
    ],
)
async def test_a_failed_prefill_runs_on_another_worker(cluster_of, script, avoided, delivered):
    cluster = await cluster_of(prefill=2, decode=2)
    cluster.prefills[0].scripts = [script]
    state = await assert_goes_on(cluster)
    assert state.failed_workers == avoided
    assert state.final_route().prefill == "p1"
    assert_continued(cluster.prefills[1].requests[0], delivered)
    assert cluster.prefills[1].requests[0].sequence.handoff_id == "r-2"
    assert await received(cluster.decodes[0].cancelled) == "r-1"


async def test_a_prefill_worker_that_falls_silent_is_not_waited_for(cluster_of):
    cluster = await cluster_of(prefill=2, liveness=QUICK)
    first = cluster.prefills[0]

    async def falls_silent(request):
        yield started()
        yield first_token(*token(request.sequence))
        first.stop_still()
        await asyncio.Event().wait()

    first.scripts = [falls_silent]
    state = await assert_goes_on(cluster)
    assert state.final_route().prefill == "p1"
    assert await received(first.ended) == "r-1", "its call was cancelled"
    first.wake()


async def test_a_prefill_worker_is_not_missed_once_decode_runs(cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]

    async def never_acknowledges(request):
        yield first_token(100)
        prefill.commit(request)
        await asyncio.Event().wait()

    async def dies_while_decode_goes_on():
        await prefill.stop()
        await cluster.until_state(prefill, "UNREACHABLE")
        decode.run_to_end(decode.requests[0].sequence, 3)

    prefill.scripts = [never_acknowledges]
    decode.runs = [pauses(decode, 2)]
    await assert_goes_on(cluster, attempts=1, after={102: dies_while_decode_goes_on})


async def test_a_prefill_worker_that_leaves_during_reserve_is_the_one_to_avoid(cluster_of):
    cluster = await cluster_of(prefill=2)
    decode = cluster.decodes[0]

    async def accepts_late(request):
        await cluster.leave(cluster.prefills[0])
        await cluster.until(lambda s: len(prefill_views(s)) == 1)
        return await decode.accept(request)

    decode.reserves = [accepts_late]
    state = await assert_goes_on(cluster)
    assert state.failed_workers == {"p0"}
    assert cluster.fleet.breakers["d0"].why_open == ""


# The decode worker.


async def falls_silent(cluster, decode):
    decode.stop_still()


async def aborts(cluster, decode):
    await gives_up(decode)()


@pytest.mark.parametrize("fault", [falls_silent, aborts])
async def test_a_stream_goes_on_at_another_decode_worker(cluster_of, fault):
    cluster = await cluster_of(decode=2, liveness=QUICK)
    decode = cluster.decodes[0]
    decode.runs = [pauses(decode, 2)]
    state = await assert_goes_on(cluster, after={102: partial(fault, cluster, decode)})
    assert (state.failed_workers, state.final_route().decode) == ({"d0"}, "d1")
    assert_continued(cluster.decodes[1].requests[0], 3)
    decode.wake()


async def test_the_route_tells_of_the_last_attempt_alone(cluster_of):
    """Where that one needed no handoff, none is told of, though the one before it had one."""
    cluster = await cluster_of(decode=2)
    first, second = cluster.decodes
    first.runs, second.reserves = [pauses(first, 2)], [second.accept_and_start]
    state = await assert_goes_on(cluster, after={102: partial(aborts, cluster, first)})
    assert state.final_route() == common_pb2.Route(decode="d1", attempts=2)
    assert state.prompt_path == "local"


async def does_not_answer(cluster, decode):
    """Its heartbeats go on."""


async def leaves(cluster, decode):
    await cluster.leave(decode)


async def finds_the_deadline_passed(cluster, decode):
    raise DeadlineExceeded("its deadline has passed")


@pytest.mark.parametrize("fault", [does_not_answer, leaves, finds_the_deadline_passed])
async def test_a_failed_reserve_is_tried_elsewhere(cluster_of, monkeypatch, fault):
    silent = fault is does_not_answer  # only a silent worker is waited for
    monkeypatch.setattr(router.dispatch.dispatch, "RESERVE_TIMEOUT_S", 0.05 if silent else 60.0)
    cluster = await cluster_of(decode=2)
    decode = cluster.decodes[0]

    async def fails(request):
        await fault(cluster, decode)
        await asyncio.Event().wait()

    decode.reserves = [fails]
    state = await assert_goes_on(cluster)
    assert (state.failed_workers, state.final_route().decode) == ({"d0"}, "d1")
    assert decode.held == set()
    if fault is finds_the_deadline_passed:
        assert "its deadline has passed" in cluster.dispatch.stats.events[0].text
    if silent:
        assert await received(decode.cancelled) == "r-1"
        assert "d0 did not answer" in cluster.dispatch.stats.events[0].text


async def test_a_returning_decode_worker_is_waited_for(cluster):
    decode, state = cluster.decodes[0], request_state()
    decode.runs = [pauses(decode, 2)]

    async def restarts():
        await cluster.leave(decode)
        await cluster.until(lambda s: not decode_views(s))

        async def comes_back():
            await seen(lambda: state.attempts > 1)
            cluster.decodes.append(await cluster.add(DecodeWorker("d1")))

        cluster.background = asyncio.create_task(comes_back())

    await assert_goes_on(cluster, state, after={102: restarts})


# Attempts.


async def test_attempts_are_bounded_spaced_and_end_with_the_last_error(cluster_of):
    cluster = await cluster_of(max_attempts=3)
    errors = [InternalError("first"), Unavailable("second"), Unavailable("third", 2.5)]
    cluster.prefills[0].scripts = [failing(error) for error in errors]
    state, began = request_state(), time.monotonic()
    with pytest.raises(Unavailable, match="third") as caught:
        await cluster.run(state)
    assert caught.value.retry_after_s == 2.5
    assert state.attempts == len(cluster.prefills[0].requests) == 3
    assert time.monotonic() - began >= 0.5 * (0.02 + 0.08)
    await cluster.all_freed()


async def test_attempts_that_bring_tokens_do_not_use_up_the_bound(cluster_of):
    """A long stream outlives as many drains and deaths as its tokens pay for."""
    cluster = await cluster_of(max_attempts=2, max_context=256)
    decode, each = cluster.decodes[0], PROVING_TOKENS
    decode.runs = [pauses(decode, each - 1) for _ in range(5)]
    after = {99 + each * (i + 1): gives_up(decode, f"r-{i + 1}") for i in range(5)}
    await assert_goes_on(cluster, request_state(max_tokens=6 * each), attempts=6, after=after)


async def test_a_full_queue_is_no_failure_of_a_worker(cluster_of):
    """Who may not wait is refused at once; who has waited before its worker failed may."""
    cluster = await cluster_of(max_queue=1)
    await cluster.fill()
    first, refused, again = (
        request_state(request_id=str(at), pending=pending(at)) for at in (1.0, 2.0, 3.0)
    )
    waiting = [asyncio.create_task(cluster.run(first))]
    await cluster.until_waiting(1)
    with pytest.raises(Overloaded, match="1 requests are waiting already"):
        await cluster.run(refused)
    assert (refused.attempts, cluster.dispatch.stats.counts.failovers) == (1, 0)
    again.attempts = 1
    waiting.append(asyncio.create_task(cluster.run(again)))
    await cluster.until_waiting(2)
    cluster.decodes[0].tell(blocks_free=20)
    assert await asyncio.gather(*waiting) == [(counting(5), LENGTH)] * 2


@pytest.mark.parametrize("error", [Unavailable("u"), InternalError("i"), TransferFailed("t")])
async def test_a_token_an_attempt_does_not_pay_for_one_attempt_after_the_other(cluster_of, error):
    """Prefill brings one whatever happens then: a request that always fails has to end."""
    cluster = await cluster_of(prefill=2, decode=2, max_attempts=4)

    async def fails(request):
        yield first_token(*token(request.sequence))
        raise error

    for worker in cluster.prefills:
        worker.scripts = [fails] * 50
    state = request_state(max_tokens=50, timeout_s=2 * TIMEOUT_S)
    with pytest.raises(type(error), match=str(error)):
        await cluster.run(state)
    assert len(state.delivered) == state.attempts <= 4


@pytest.mark.parametrize("decodes", [1, 2, 3])
async def test_a_prompt_that_fails_its_steps_ends_and_its_neighbours_live(cluster_of, decodes):
    """A step with the poison fails, and with it all sequences of that step."""
    cluster = await cluster_of(decode=decodes, max_context=256)
    shared, alone, ended, committed = [], [], asyncio.Event(), set()

    def step_of(decode, sequence, ahead):
        committed.add(sequence.handoff_id)
        if sequence.handoff_id.startswith("poison"):
            batch = {sequence.handoff_id} if sequence.alone else decode.held & committed
            (alone if sequence.alone else shared).append(batch)
            for handoff_id in batch:
                decode.release(handoff_id)
                decode.send(handoff_id, abort="engine step failed: poison", step_failed=True)
        elif ended.is_set():
            decode.run_to_end(sequence, ahead)
        else:
            decode.run_to_end(sequence, ahead, 2)  # and goes on when the poison is gone
            waiting.append((decode, sequence, ahead + 2))

    waiting = []
    for decode in cluster.decodes:
        decode.begin = partial(step_of, decode)
    poison = request_state(request_id="poison", max_tokens=50, timeout_s=2 * TIMEOUT_S)
    others = [
        request_state(request_id=f"n{at}", max_tokens=50, timeout_s=2 * TIMEOUT_S)
        for at in range(8)
    ]
    running = [asyncio.create_task(cluster.run(state)) for state in others]
    await seen(lambda: len(waiting) >= len(others))
    with pytest.raises(InternalError, match="engine step failed: poison"):
        await cluster.run(poison)
    ended.set()
    for decode, sequence, ahead in waiting:
        if sequence.handoff_id in decode.held:
            decode.run_to_end(sequence, ahead)
    assert await asyncio.gather(*running) == [(counting(50), LENGTH)] * len(others)
    assert len(shared) == 2 and len(alone) == 1, "what it costs its neighbours is bounded"


def test_a_sequence_that_was_beside_the_cause_shares_steps_again():
    state = request_state()
    errors = [(InternalError("a"), 1), (InternalError("b"), 1), (Unavailable("c"), 1)]
    assert [(record_failure(state, *one), state.runs_alone) for one in errors] == [
        (False, False), (False, True), (False, True)
    ]  # fmt: skip
    assert state.spec("r-4").alone
    assert not record_failure(state, InternalError("after many tokens"), PROVING_TOKENS)
    assert not state.runs_alone


async def test_an_abandoned_attempt_adds_neither_tokens_nor_numbers(cluster_of):
    cluster = await cluster_of(decode=2)
    decode = cluster.decodes[0]

    async def sends_more_of_it():
        decode.send("r-1", 667)

    cluster.prefills[0].scripts = [says(started(3.0, cached_tokens=2), first_token(100))]
    after = {100: gives_up(decode), **dict.fromkeys((102, 103), sends_more_of_it)}
    state = await assert_goes_on(cluster, after=after)
    assert state.usage().cached_tokens == 2
    assert state.prefill_queue_ms == 3.0  # waiting after the first token is no queueing
