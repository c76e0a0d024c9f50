"""Completions through both clients: whole and streamed, retried, failed, cancelled."""

import asyncio
import gc
import random
import time

import pytest

import baton
from baton import errors
from baton.client import RetryPolicy, TokenLogprobs, ToolCall, Usage
from baton.client.request import generate_request
from baton.net import rpc
from baton.v1 import common_pb2, inference_pb2
from tests.proxy import Proxy
from tests.unit.client.scripted_router import HELLO, ScriptedRouter, delta, finish, serving, started
from tests.waiting import WAIT_S

LIMIT_S = WAIT_S
GONE = errors.Unavailable("gone")
FAST = RetryPolicy(first_delay_s=0.001)


async def test_a_stream_and_its_completion_with_everything(connect, serve):
    logprobs = common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=1, logprob=-0.5),
        top=[common_pb2.TokenLogprob(token_id=4, logprob=-0.25)],
    )
    usage = {
        "prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2, "reasoning_tokens": 1,
    }  # fmt: skip
    timing = {
        "queue_ms": 1.0, "ttft_ms": 2.0, "tpot_ms": 3.0, "e2e_ms": 4.0, "transfer_ms": 5.0,
        "transfer_bytes": 6,
    }  # fmt: skip
    last = finish(
        common_pb2.FINISH_REASON_LENGTH,
        stop="END",
        embedding=[0.5, -2.0],
        usage=common_pb2.Usage(**usage),
        timing=common_pb2.Timing(**timing),
        route=common_pb2.Route(decode="d1", transport=common_pb2.TRANSPORT_CUDA_IPC, attempts=2),
    )
    prompt = common_pb2.PromptLogprobs(
        token_ids=[7, 8], logprobs=[-2.0], ranks=[3], top_ids=[9, 8], top_logprobs=[-0.5, -2.0]
    )
    told = inference_pb2.GenerateResponse(prompt_logprobs=prompt)
    pieces = [told, delta("Hel", 1, logprobs=[logprobs]), delta("lo", 2, 3)]
    async with connect(await serve(ScriptedRouter([started(), *pieces, last]))) as client:
        stream = client.stream("x")
        deltas = [d async for d in stream]
        together = await asyncio.gather(*(client.generate(f"{i}", logprobs=1) for i in range(8)))
    assert [(d.text, d.token_ids) for d in deltas] == [("Hel", (1,)), ("lo", (2, 3))]
    for done in (stream.completion, *together):
        assert (done.stop, done.request_id) == ("END", "r1")
        assert [(p.token_id, p.logprob, p.top) for p in done.logprobs] == [(1, -0.5, ((4, -0.25),))]
        assert done.prompt_logprobs == (None, TokenLogprobs(8, -2.0, ((9, -0.5), (8, -2.0)), 3))
        assert done.embedding == (0.5, -2.0)
        assert done.to_dict() == {
            "text": "Hello",
            "token_ids": [1, 2, 3],
            "finish_reason": "length",
            "usage": usage,
            "timing": timing,
            "route": {"prefill": None, "decode": "d1", "transport": "cuda_ipc", "attempts": 2},
            "trace_id": "ab" * 16,
        }


async def test_reasoning_and_tool_calls_are_put_together(connect, serve):
    pieces = [
        delta("", 1, reasoning="H"),
        delta("", 2, reasoning="m."),
        delta("So", 3, tool_calls=[{"index": 0, "id": "a", "name": "f"}]),
        delta("", 4, tool_calls=[{"arguments": '{"x":'}]),
        delta("", 5, tool_calls=[{"arguments": "1}"}, {"index": 1, "id": "b", "name": "g"}]),
    ]
    last = finish(common_pb2.FINISH_REASON_TOOL_CALLS)
    async with connect(await serve(ScriptedRouter([started(), *pieces, last]))) as client:
        done = await client.chat([{"role": "user", "content": "x"}])
    assert (done.text, done.reasoning, done.finish_reason) == ("So", "Hm.", "tool_calls")
    assert done.tool_calls == (ToolCall("a", "f", '{"x":1}'), ToolCall("b", "g", ""))
    again = generate_request([done.message], {}).chat.messages[0]
    assert [call.id for call in again.tool_calls] == ["a", "b"] and again.content == "So"


async def test_errors_keep_their_meaning(connect, serve):
    final = [
        errors.InvalidRequest("too long", "input"),
        errors.ModelNotFound("no such model"),
        errors.Unauthenticated("no key"),
        errors.Overloaded("full", 2 * LIMIT_S),  # this advice outlasts the timeout
        errors.DeadlineExceeded("late"),
    ]
    router = ScriptedRouter(*([error] for error in final))
    async with connect(await serve(router)) as client:
        for error in final:
            with pytest.raises(type(error), match=str(error)) as raised:
                await client.generate("x", timeout=LIMIT_S)
            for name in ("field", "retry_after_s"):
                assert getattr(raised.value, name, None) == getattr(error, name, None)
    assert len(router.requests) == len(final)


@pytest.mark.parametrize("accepted", [[], [started()]], ids=["refused", "started"])
@pytest.mark.parametrize("error", [GONE, errors.Overloaded("full", 0.002)])
async def test_retries_before_the_first_output(connect, serve, accepted, error):
    router = ScriptedRouter([*accepted, error], [error], HELLO)
    async with connect(await serve(router), retry=FAST) as client:
        assert (await client.generate("x")).text == "Hello"
    assert len(router.requests) == 3


async def test_every_attempt_is_for_the_model_that_was_asked_for(connect, serve):
    """And once one has begun, for the version that it began with."""
    router = ScriptedRouter(
        [GONE], [started(model="chat@v2"), GONE], [GONE], [started(model="chat@v2"), *HELLO[1:]]
    )
    async with connect(await serve(router), retry=FAST) as client:
        await client.generate("x", model="chat")
    assert [one.model for one in router.requests] == ["chat", "chat", "chat@v2", "chat@v2"]


@pytest.mark.parametrize("attempts", [0, 20], ids=["at once", "when its router is back"])
async def test_goes_on_behind_what_has_come(connect, serve, attempts):
    router = ScriptedRouter(
        [started(), delta("Hel", 1, 2), GONE],
        *[[GONE]] * attempts,
        [started(resumed_tokens=2), delta("lo", 3), finish()],
    )
    policy = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)
    async with connect(await serve(router), retry=policy) as client:
        done = await client.generate("x", temperature=0.5)
    assert (done.text, done.token_ids) == ("Hello", (1, 2, 3))
    first, *others = router.requests
    assert list(first.resumed_token_ids) == [] and first.sampling.HasField("seed")
    assert len(others) == attempts + 1
    for request in others:
        assert list(request.resumed_token_ids) == [1, 2]
        assert request.sampling.seed == first.sampling.seed


@pytest.mark.parametrize(
    ("scripts", "error", "match"),
    [
        # A router that would begin anew is not believed.
        ([[started(), delta("Hel", 1), GONE], HELLO], errors.Unavailable, "cannot continue"),
        # Errors that cannot pass are final after output, too.
        ([[started(), delta("Hel", 1), errors.InternalError("bug")]], errors.InternalError, "bug"),
    ],
)
async def test_a_final_error_has_the_output_so_far(connect, serve, scripts, error, match):
    router, attempts = ScriptedRouter(*scripts), len(scripts)
    async with connect(await serve(router), retry=FAST) as client:
        with pytest.raises(error, match=match) as raised:
            await client.generate("x")
    assert len(router.requests) == attempts
    partial = raised.value.partial
    assert (partial.text, partial.finish_reason, partial.usage.prompt_tokens) == ("Hel", None, 3)


@pytest.mark.parametrize("behind", [[GONE], [], [finish(), GONE]], ids=["error", "end", "finish"])
async def test_nothing_is_retried_behind_the_last_tokens(connect, serve, behind):
    last = delta("Hello", 1, reason=common_pb2.FINISH_REASON_STOP, stop="END")
    router = ScriptedRouter([started(), last, *behind])
    async with connect(await serve(router), retry=FAST) as client:
        done = await client.generate("x")
    assert len(router.requests) == 1
    assert (done.text, done.finish_reason) == ("Hello", "stop")
    if len(behind) < 2:
        assert (done.usage, done.stop) == (Usage(3, 1), "END")


async def test_going_on_is_bounded(connect, serve):
    for bound, timeout in (({"keep_trying_s": 0.8}, None), ({}, 0.8)):
        policy = RetryPolicy(first_delay_s=0.01, max_delay_s=0.02, **bound)
        for scripts in (([started(), GONE], [GONE]), ([errors.Unavailable("no pair", 0.001)],)):
            router = ScriptedRouter(*scripts)
            async with (
                connect(await serve(router), retry=policy) as client,
                asyncio.timeout(LIMIT_S),
            ):
                with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)):
                    await client.generate("x", timeout=timeout)
            assert len(router.requests) > policy.max_attempts


async def test_a_lost_router_mid_stream(connect):
    async with serving(ScriptedRouter([started(), delta("Hel", 1), asyncio.Event()])) as address:
        client = connect(address, retry=RetryPolicy(keep_trying_s=0.2))
        stream = client.stream("x")
        assert (await anext(stream)).text == "Hel"
    async with client:
        with pytest.raises(errors.Unavailable) as raised:
            await asyncio.wait_for(anext(stream), LIMIT_S)
    assert raised.value.partial.text == "Hel"


async def test_fails_over_to_the_next_address(connect, serve, monkeypatch):
    router = ScriptedRouter(HELLO)
    addresses = ["127.0.0.1:1", await serve(router)]
    monkeypatch.setattr(random, "randrange", lambda stop: 0)  # it begins at the first
    for target in (addresses, ",".join(addresses)):
        async with connect(target) as client:
            assert (await client.generate("x")).text == "Hello"
            assert await client.tokenize("x") == [7, 8]
    assert len(router.requests) == 4


@pytest.mark.parametrize("connected", [True, False], ids=["idle connection", "new connection"])
async def test_a_router_that_hangs_is_left_for_the_next_address(
    connect, serve, monkeypatch, connected
):
    """By limits of our channels alone: gRPC's own are out of reach here."""
    limits = [name for name, _ in rpc._UNWATCHED]
    monkeypatch.setattr(rpc, "OPTIONS", [*rpc.OPTIONS, *((name, rpc._NEVER) for name in limits)])
    monkeypatch.setattr(rpc, "_UNWATCHED", [(name, 200) for name in limits])
    monkeypatch.setattr(random, "randrange", lambda stop: 0)  # it begins at the first
    hung, other = ScriptedRouter(HELLO), ScriptedRouter(HELLO)
    port = int((await serve(hung)).rpartition(":")[2])
    async with (
        Proxy(port) as proxy,
        connect([proxy.address, await serve(other)]) as client,
        asyncio.timeout(LIMIT_S),
    ):
        if connected:
            await client.generate("x")
        proxy.hold()
        assert (await client.generate("x")).text == "Hello"
    assert (len(hung.requests), len(other.requests)) == (int(connected), 1)


async def test_deadline(connect, serve):
    router = ScriptedRouter([started(), delta("Hel", 1), asyncio.Event()])
    async with connect(await serve(router)) as client:
        begin = time.monotonic()
        with pytest.raises(TimeoutError) as raised:
            await client.generate("x", timeout=1.5)
    assert isinstance(raised.value, errors.DeadlineExceeded)
    assert 1.4 < time.monotonic() - begin < LIMIT_S
    assert 0 < router.time_left_s[0] < 1.6  # gRPC rounds up when it sends it
    assert raised.value.partial.text == "Hel"


@pytest.fixture
async def running(connect, serve):
    """(router, client, a stream whose first output was read, and more does not come)."""
    router = ScriptedRouter([started(), delta("Hel", 1), asyncio.Event()])
    async with connect(await serve(router)) as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "Hel"
        held = [router, client, stream]
        del stream
        yield held


@pytest.mark.parametrize("how", ["close", "leave", "drop"])
async def test_giving_up_cancels_at_the_router(running, how):
    router, stream = running[0], running.pop()
    if how == "drop":
        del stream
        async with asyncio.timeout(LIMIT_S):
            while not router.cancelled.is_set():
                gc.collect()
                await asyncio.sleep(0.01)
        return
    if how == "leave":
        async with stream:
            pass
    else:
        await stream.close()
        assert [d async for d in stream] == []
    await asyncio.wait_for(router.cancelled.wait(), LIMIT_S)
    with pytest.raises(errors.Cancelled, match="not read to its end"):
        _ = stream.completion


@pytest.mark.parametrize("connect", [baton.AsyncClient])
async def test_cancelling_the_task_cancels_at_the_router(running):
    router, _, stream = running
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(router.cancelled.wait(), LIMIT_S)


async def test_a_client_that_is_closed_says_so(running):
    _, client, stream = running
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.1)
    await client.close()
    with pytest.raises(errors.Cancelled, match="client was closed") as raised:
        await asyncio.wait_for(reading, LIMIT_S)
    assert raised.value.partial.text == "Hel"
    for call in (client.generate("x"), client.tokenize("x"), client.status()):
        with pytest.raises(errors.Cancelled, match="make a new one"):
            await call


async def test_closing_wakes_the_reader(running):
    *_, stream = running
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await stream.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(reader, LIMIT_S)


async def test_closing_wakes_a_client_that_waits_to_retry(serve):
    decided = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Announcing(RetryPolicy):
        def wait_s(self, error, **state):
            loop.call_soon_threadsafe(decided.set)
            return super().wait_s(error, **state)

    router = ScriptedRouter([errors.Unavailable("gone", 60.0)])
    with baton.Client(await serve(router), retry=Announcing()) as client:
        stream = client.stream("x")
        reader = asyncio.ensure_future(asyncio.to_thread(next, stream, None))
        await asyncio.wait_for(decided.wait(), LIMIT_S)
        stream.close()
        assert await asyncio.wait_for(reader, LIMIT_S) is None


async def test_the_sync_client_works_where_a_loop_runs(serve):
    """As in a notebook; the router answers from another thread's loop."""
    address = await serve(ScriptedRouter(HELLO))

    async def in_a_loop():
        with baton.Client(address) as client:
            return client.generate("x").text

    assert await asyncio.to_thread(asyncio.run, in_a_loop()) == "Hello"
