"""Whatever fails under a request, its stream goes on elsewhere, each token once."""

import asyncio
import time
from functools import partial

import pytest
from opentelemetry.context import Context

import router.dispatch
from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KvCorrupted,
    Overloaded,
    Stale,
    TransferFailed,
    Unavailable,
)
from router.dispatch.failover import NoWorkerTimeout

from .scripted_workers import (
    LENGTH,
    TIMEOUT_S,
    DecodeWorker,
    counting,
    first_token,
    request_state,
    seen,
    started,
)


def failing(error):
    """A prefill script that starts and fails."""

    async def script(request):
        yield started(queue_ms=1.0, cached_tokens=0)
        raise error

    return script


async def assert_goes_on(cluster, asked, attempts=2, after=None):
    """The stream is whole, whatever is done `after` its tokens; nothing of it is left anywhere."""
    tokens, after = [], dict(after or {})
    async with asyncio.timeout(TIMEOUT_S):
        async for output in cluster.dispatch.run(asked, Context()):
            tokens += output.token_ids
            if action := after.pop(tokens[-1], None):
                await action()
    assert tokens == counting(asked.request.params.max_tokens)
    assert output.finish_reason == LENGTH
    assert after == {}
    assert asked.final_route().attempts == attempts
    await cluster.dispatch.close()
    view = cluster.fleet.snapshot()
    assert all(worker.assigned_tokens == 0 for worker in view.prefill)
    assert all(worker.assigned_sequences == 0 for worker in (*view.prefill, *view.decode))


def pauses(decode, most):
    """A run of `most` tokens, and no more."""
    return lambda sequence, ahead: decode.run_to_end(sequence, ahead, most)


def gives_up(decode, handoff_id):
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


@pytest.mark.parametrize(
    "error",
    [Unavailable("u"), InternalError("i"), Stale("s"), Cancelled("c"),
     DeadlineExceeded("of a step"), ValueError("v")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_a_failed_prefill_runs_on_another_worker(cluster_of, error):
    cluster = await cluster_of(prefill=2)
    cluster.prefills[0].scripts = [failing(error)]
    asked = request_state()
    await assert_goes_on(cluster, asked)
    assert asked.failed_workers == {"p0"}
    assert asked.final_route().prefill == "p1"
    assert_continued(cluster.prefills[1].requests[0], 0)
    assert cluster.prefills[1].requests[0].sequence.handoff_id == "r-2"
    assert await cluster.decodes[0].cancelled.get() == "r-1"


async def test_a_handoff_that_fails_after_the_first_token_blames_both_ends(cluster_of):
    cluster = await cluster_of(prefill=2, decode=2)

    async def lost(request):
        yield first_token(100)
        raise TransferFailed("lost")

    cluster.prefills[0].scripts = [lost]
    asked = request_state()
    await assert_goes_on(cluster, asked)
    assert asked.failed_workers == {"p0", "d0"}
    assert (asked.final_route().prefill, asked.final_route().decode) == ("p1", "d1")
    assert_continued(cluster.prefills[1].requests[0], 1)


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_prefill_call_that_just_ends_is_a_failure(cluster_of, tokens):
    cluster = await cluster_of(prefill=2)

    async def ends(request):
        yield started()
        if tokens:
            yield first_token(100)

    cluster.prefills[0].scripts = [ends]
    asked = request_state()
    await assert_goes_on(cluster, asked)
    assert "p0" in asked.failed_workers


async def test_a_sequence_that_decode_gives_up_goes_on_elsewhere(cluster_of):
    cluster = await cluster_of(decode=2)
    decode = cluster.decodes[0]
    decode.runs = [pauses(decode, 2)]
    asked = request_state()
    await assert_goes_on(cluster, asked, after={102: gives_up(decode, "r-1")})
    assert asked.failed_workers == {"d0"}
    assert asked.final_route().decode == "d1"
    assert_continued(cluster.decodes[1].requests[0], 3)


async def test_a_broken_event_stream_fails_its_sequences_over(cluster_of):
    cluster = await cluster_of(decode=2)
    decode = cluster.decodes[0]
    decode.runs = [pauses(decode, 1)]

    async def breaks():
        decode.break_streams()

    await assert_goes_on(cluster, request_state(), after={101: breaks})
    assert_continued(cluster.decodes[1].requests[0], 2)
    assert await decode.cancelled.get() == "r-1"


async def test_a_prefill_worker_is_not_missed_once_decode_runs(cluster_of):
    cluster = await cluster_of()
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
    await assert_goes_on(
        cluster, request_state(), attempts=1, after={102: dies_while_decode_goes_on}
    )


async def test_a_worker_that_leaves_the_registry_fails_over_what_it_has(cluster_of):
    cluster = await cluster_of(decode=2)
    decode, silent = cluster.decodes[0], asyncio.Event()
    decode.runs = [lambda sequence, ahead: silent.set()]
    asked = request_state()
    running = asyncio.create_task(assert_goes_on(cluster, asked))
    await silent.wait()
    decode.held.clear()
    await cluster.leave(decode)
    await running
    assert asked.final_route().decode == "d1"


async def test_a_silent_prefill_worker_that_leaves_the_registry_is_not_waited_for(cluster_of):
    cluster = await cluster_of(prefill=2)
    began = asyncio.Event()

    async def silent(request):
        yield started()
        began.set()
        await asyncio.Event().wait()

    cluster.prefills[0].scripts = [silent]
    asked = request_state()
    running = asyncio.create_task(assert_goes_on(cluster, asked))
    await began.wait()
    await cluster.leave(cluster.prefills[0])
    await running
    assert (asked.final_route().prefill, asked.failed_workers) == ("p1", {"p0"})


async def silent(cluster, decode, request):
    await asyncio.Event().wait()


async def leaves(cluster, decode, request):
    await cluster.leave(decode)
    await asyncio.Event().wait()


async def loses_its_stream(cluster, decode, request):
    decode.break_streams()
    await asyncio.Event().wait()


async def another_process(cluster, decode, request):
    answer = await decode.accept(request)
    answer.incarnation = "d7"
    return answer


@pytest.mark.parametrize("fault", [silent, leaves, loses_its_stream, another_process])
async def test_a_failed_reserve_is_tried_elsewhere(cluster_of, monkeypatch, fault):
    timeout_s = 0.05 if fault is silent else 60.0  # only a silent worker is waited for
    monkeypatch.setattr(router.dispatch.dispatch, "RESERVE_TIMEOUT_S", timeout_s)
    cluster = await cluster_of(decode=2)
    decode = cluster.decodes[0]
    decode.reserves = [partial(fault, cluster, decode)]
    asked = request_state()
    await assert_goes_on(cluster, asked)
    assert (asked.failed_workers, asked.final_route().decode) == ({"d0"}, "d1")
    if fault is not leaves:
        assert await decode.cancelled.get() == "r-1"
        assert decode.held == set()


async def test_a_worker_that_never_answers_reserve_is_unavailable_while_time_is_left(
    cluster_of, monkeypatch
):
    monkeypatch.setattr(router.dispatch.dispatch, "RESERVE_TIMEOUT_S", 0.02)
    cluster = await cluster_of(max_attempts=1)

    async def silent(request):
        await asyncio.Event().wait()

    cluster.decodes[0].reserves = [silent]
    with pytest.raises(Unavailable, match="d0 did not answer"):
        await cluster.run(request_state())


async def test_attempts_are_bounded_spaced_and_end_with_the_last_error(cluster_of):
    cluster = await cluster_of(max_attempts=3)
    errors = [InternalError("first"), Unavailable("second"), Unavailable("third", 2.5)]
    cluster.prefills[0].scripts = [failing(error) for error in errors]
    asked, began = request_state(), time.monotonic()
    with pytest.raises(Unavailable, match="third") as caught:
        await cluster.run(asked)
    assert caught.value.retry_after_s == 2.5
    assert asked.attempts == len(cluster.prefills[0].requests) == 3
    assert time.monotonic() - began >= 0.5 * (0.02 + 0.08)
    await cluster.all_freed()


async def test_numbers_of_several_attempts_are_told_once(cluster_of):
    cluster = await cluster_of(decode=2)

    async def cached(request):
        yield started(queue_ms=3.0, cached_tokens=2)
        yield first_token(100)
        await asyncio.Event().wait()

    cluster.prefills[0].scripts = [cached]
    asked = request_state()
    await assert_goes_on(cluster, asked, after={100: gives_up(cluster.decodes[0], "r-1")})
    assert asked.usage().cached_tokens == 2
    assert asked.prefill_queue_ms == 3.0  # waiting after the first token is no queueing


async def test_events_of_an_abandoned_attempt_reach_nobody(cluster_of):
    cluster = await cluster_of(decode=2)
    decode = cluster.decodes[0]

    async def speaks_of_it_again():
        decode.send("r-1", 667)

    decode.runs = [pauses(decode, 1)]
    after = {101: gives_up(decode, "r-1"), **dict.fromkeys((102, 103), speaks_of_it_again)}
    await assert_goes_on(cluster, request_state(), after=after)


async def test_failed_handoffs_shut_the_pair_and_neither_worker(cluster_of):
    cluster = await cluster_of()

    async def corrupted(request):
        yield started()
        raise KvCorrupted("checksum")

    cluster.prefills[0].scripts = [corrupted] * 4
    with pytest.raises(KvCorrupted):
        await cluster.run(request_state())
    breakers = cluster.fleet.breakers
    assert "checksum" in breakers.why_open(("p0", "d0"))
    assert breakers.why_open("p0") == breakers.why_open("d0") == ""


async def test_the_only_decode_worker_of_a_stream_is_waited_for(cluster_of):
    cluster = await cluster_of()
    decode, asked = cluster.decodes[0], request_state()
    decode.runs = [pauses(decode, 2)]

    async def restarts():
        await cluster.leave(decode)
        await cluster.until(lambda s: not s.decode)

        async def comes_back():
            await seen(lambda: asked.attempts > 1)
            again = DecodeWorker("d1")
            await again.start()
            cluster.decodes.append(again)
            await cluster.join(again)

        cluster.background = asyncio.create_task(comes_back())

    await assert_goes_on(cluster, asked, after={102: restarts})
    assert asked.final_route().decode == "d1"


async def test_nobody_is_waited_for_without_end(cluster_of):
    cluster = await cluster_of(recovery_s=0.05)
    decode = cluster.decodes[0]
    decode.runs = [pauses(decode, 2)]
    tokens = []
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        async for output in cluster.dispatch.run(request_state(), Context()):
            tokens += output.token_ids
            if tokens[-1] == 102:
                await cluster.leave(decode)
    assert tokens == counting(3)


async def test_attempts_that_bring_tokens_do_not_use_up_the_bound(cluster_of):
    cluster = await cluster_of(max_attempts=2)
    decode = cluster.decodes[0]
    decode.runs = [pauses(decode, 1) for _ in range(3)]
    after = {101: gives_up(decode, "r-1"), 103: gives_up(decode, "r-2")}
    await assert_goes_on(cluster, request_state(max_tokens=8), attempts=4, after={
        **after, 105: gives_up(decode, "r-3"),
    })  # fmt: skip


async def test_a_prefill_worker_that_leaves_during_reserve_is_the_one_to_avoid(cluster_of):
    cluster = await cluster_of(prefill=2)
    decode = cluster.decodes[0]

    async def accepts_late(request):
        await cluster.leave(cluster.prefills[0])
        await cluster.until(lambda s: len(s.prefill) == 1)
        return await decode.accept(request)

    decode.reserves = [accepts_late]
    asked = request_state()
    await assert_goes_on(cluster, asked)
    assert asked.failed_workers == {"p0"}
    assert cluster.fleet.breakers.why_open("d0") == ""


# Waiting for workers that are gone.


def missing(timeout):
    with pytest.raises(Overloaded, match="nobody"), timeout.placing():
        raise Unavailable("nobody", 1.0)


async def test_the_clock_runs_out_with_what_was_missing():
    with pytest.raises(Unavailable, match="nobody") as caught:
        async with NoWorkerTimeout(0.05) as timeout:
            missing(timeout)
            await asyncio.sleep(30)
    assert caught.value.retry_after_s == 1.0


async def test_the_last_word_counts_and_the_first_starts_the_clock():
    with pytest.raises(Unavailable, match="second"):
        async with NoWorkerTimeout(0.05) as timeout:
            missing(timeout)
            with pytest.raises(Overloaded), timeout.placing():
                raise Unavailable("second")
            await asyncio.sleep(30)


@pytest.mark.parametrize("full", [True, False])
async def test_workers_that_came_back_stop_the_clock(full):
    async with NoWorkerTimeout(0.05) as timeout:
        missing(timeout)
        if full:
            with pytest.raises(Overloaded, match="full"), timeout.placing():
                raise Overloaded("full")
        else:
            with timeout.placing():
                pass
        await asyncio.sleep(0.1)


async def test_without_a_missing_worker_there_is_no_clock():
    async with NoWorkerTimeout(0.0):
        await asyncio.sleep(0.02)


async def test_other_errors_and_cancellation_pass():
    with pytest.raises(ValueError, match="mine"):
        async with NoWorkerTimeout(0.05) as timeout:
            missing(timeout)
            raise ValueError("mine")

    async def waits():
        async with NoWorkerTimeout(30) as timeout:
            missing(timeout)
            await asyncio.sleep(30)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
