"""Two workers' messages, in whatever order they arrive, become one stream in order."""

import asyncio

import pytest

from baton.errors import InternalError, TransferFailed, Unavailable
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.dispatch.attempt import Attempt

from .scripted_workers import LENGTH, TIMEOUT_S, committed, first_token, started


def event(*token_ids, reason=0, abort=""):
    return decode_pb2.SequenceEvent(
        handoff_id="r-1", token_ids=token_ids, finish_reason=reason, abort_reason=abort
    )


async def tokens_of(attempt):
    async with asyncio.timeout(TIMEOUT_S):
        return [output.token_ids async for output in attempt.outputs()]


async def test_decode_events_wait_for_prefills_first_token():
    attempt = Attempt("r-1")
    attempt.on_decode(event(101))
    attempt.on_decode(event(102, reason=LENGTH))
    assert not attempt.finished_on_decode
    attempt.on_prefill(started())
    attempt.on_prefill(first_token(100))
    assert await tokens_of(attempt) == [[100], [101], [102]]
    assert attempt.finished_on_decode


async def test_logprobs_come_with_their_tokens():
    attempt = Attempt("r-1")
    logprobs = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=100))
    first = prefill_pb2.PrefillFirstToken(token_id=100, logprobs=logprobs)
    attempt.on_prefill(prefill_pb2.PrefillResponse(first_token=first))
    attempt.on_decode(
        decode_pb2.SequenceEvent(token_ids=[101], logprobs=[logprobs], finish_reason=LENGTH)
    )
    assert [output.logprobs async for output in attempt.outputs()] == [[logprobs], [logprobs]]


async def test_an_abort_before_the_first_token_is_told_at_once():
    attempt = Attempt("r-1")
    attempt.on_decode(event(101))
    attempt.on_decode(event(abort="no blocks left"))
    with pytest.raises(InternalError, match="no blocks left"):
        await tokens_of(attempt)


async def test_tokens_before_an_error_are_delivered():
    attempt = Attempt("r-1")
    attempt.on_prefill(first_token(100))
    attempt.on_decode(event(101))
    attempt.on_decode(Unavailable("the event stream broke"))
    outputs = attempt.outputs()
    assert [(await anext(outputs)).token_ids for _ in range(2)] == [[100], [101]]
    with pytest.raises(Unavailable, match="the event stream broke"):
        await anext(outputs)


async def test_who_is_to_blame_changes_with_what_is_heard():
    attempt = Attempt("r-1")
    attempt.suspects = {"p0"}
    attempt.on_prefill(first_token(100))
    assert attempt.suspects == {"p0"}
    attempt.on_prefill(committed())
    assert attempt.suspects == set()
    attempt.suspects = {"p0"}
    attempt.on_decode(Unavailable("decode is gone"))
    assert attempt.suspects == set()


async def test_close_ends_the_prefill_call_and_waits_for_its_end():
    ended = []

    async def prefill():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    attempt = Attempt("r-1")
    attempt.follow(prefill())
    await asyncio.sleep(0)
    await attempt.close()
    assert ended == [True]


async def test_close_waits_for_the_acknowledgement_of_a_finished_handoff_but_not_for_ever(
    monkeypatch,
):
    monkeypatch.setattr("router.dispatch.attempt._COMMIT_ACK_S", 0.01)
    attempt, heard = Attempt("r-1"), []

    async def prefill():
        attempt.on_prefill(first_token(100))
        attempt.on_decode(event(101, reason=LENGTH))
        await asyncio.sleep(0)
        heard.append("committed")
        await asyncio.Event().wait()

    attempt.follow(prefill())
    assert await tokens_of(attempt) == [[100], [101]]
    async with asyncio.timeout(TIMEOUT_S):
        await attempt.close()
    assert heard == ["committed"]


@pytest.mark.parametrize(("handed_over", "error"), [(False, TransferFailed), (True, InternalError)])
async def test_what_decode_gives_up_before_commit_is_a_failed_handoff(handed_over, error):
    attempt = Attempt("r-1")
    attempt.follow(asyncio.Event().wait())
    if handed_over:
        attempt.on_prefill(first_token(100))
        attempt.on_decode(event(101))
    attempt.on_decode(decode_pb2.SequenceEvent(handoff_id="r-1", abort_reason="its lease"))
    with pytest.raises(error, match="its lease"):
        await tokens_of(attempt)
    await attempt.close()


async def test_a_call_to_a_lost_worker_is_not_waited_for():
    attempt, cancelled = Attempt("r-1"), []

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    waiting = asyncio.create_task(attempt.unless_lost(never()))
    await asyncio.sleep(0)
    attempt.on_decode(Unavailable("silent"))
    with pytest.raises(Unavailable, match="silent"):
        await waiting
    assert cancelled == [True]


async def test_a_call_that_ends_gives_its_result_or_its_error():
    async def fails():
        raise Unavailable("refused")

    assert await Attempt("r-1").unless_lost(asyncio.sleep(0, "answer")) == "answer"
    with pytest.raises(Unavailable, match="refused"):
        await Attempt("r-1").unless_lost(fails())
