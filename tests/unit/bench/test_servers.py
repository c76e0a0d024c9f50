"""Both kinds of server, over real connections to servers that tests write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import errors
from baton.bench.request import Demand, Outcome
from baton.bench.servers import EventReader, GrpcServer, HttpServer, RequestOptions
from baton.v1 import common_pb2
from tests.unit.bench.scripted_openai import (
    DONE,
    HELLO,
    ScriptedOpenAI,
    Step,
    event,
    serving,
    text,
    usage,
)
from tests.unit.client import scripted_router
from tests.unit.client.scripted_router import ScriptedRouter, delta, finish, started

DEMAND = Demand(0.0, ((1, 5),), 7)


@contextlib.asynccontextmanager
async def http(server: ScriptedOpenAI, **options: Any) -> AsyncIterator[HttpServer]:
    """A client of a scripted server."""
    async with serving(server) as url:
        client = HttpServer(url, RequestOptions(**options))
        try:
            yield client
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def grpc(router: ScriptedRouter, **options: Any) -> AsyncIterator[GrpcServer]:
    """A client of a scripted router."""
    async with scripted_router.serving(router) as address:
        client = GrpcServer(address, RequestOptions(**options))
        try:
            yield client
        finally:
            await client.close()


async def ask(client: HttpServer | GrpcServer) -> Outcome:
    """What becomes of one request."""
    outcome = Outcome(0.0, planned_output=7)
    async with asyncio.timeout(30):
        await client.send(client.body(DEMAND), outcome)
    assert outcome.ended_s > 0
    return outcome


class TestHttp:
    async def test_a_completion(self) -> None:
        server = ScriptedOpenAI([text("Hel"), text(""), text("lo"), usage(3, 2, 1), DONE])
        async with http(server, api_key="k") as client:
            assert await client.connect() == "scripted"
            outcome = await ask(client)
        assert outcome.ok
        assert len(outcome.token_times_s) == 2  # the empty chunk is no token
        assert outcome.token_times_s[0] <= outcome.token_times_s[1] <= outcome.ended_s
        counts = (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens)
        assert counts == (3, 2, 1)
        (body,) = server.bodies
        assert body.pop("prompt") == DEMAND.prompt(RequestOptions().ids)
        assert body == {
            "path": "/v1/completions", "model": "scripted", "max_tokens": 7, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        assert server.keys == ["Bearer k"]

    async def test_text_and_chat(self) -> None:
        role, content = ({"role": "assistant", "content": ""}, {"content": "Hi"})
        chat: list[Step] = [
            *(event(choices=[{"delta": one}]) for one in (role, content)), usage(9, 1), DONE
        ]  # fmt: skip
        server = ScriptedOpenAI(HELLO, chat)
        async with http(server, prompt_form="text", ignore_eos=False, model="m") as client:
            assert await client.connect() == "m"
            await ask(client)
            chatty = HttpServer(client.url, RequestOptions(prompt_form="chat", model="m"))
            outcome = await ask(chatty)
            await chatty.close()
        assert outcome.ok and len(outcome.token_times_s) == 1  # the role is no token
        plain, chatted = server.bodies
        assert len(plain["prompt"].split()) == 5 and "ignore_eos" not in plain
        assert chatted["path"] == "/v1/chat/completions"
        assert chatted["messages"] == [{"role": "user", "content": plain["prompt"]}]

    async def test_a_first_token_is_timed_when_it_comes(self) -> None:
        gate = asyncio.Event()
        server = ScriptedOpenAI([text("a"), gate, text("b"), usage(1, 2), DONE])
        async with http(server) as client:
            options = asyncio.create_task(ask(client))
            async with asyncio.timeout(30):
                await server.begun.wait()
            await asyncio.sleep(0.3)
            gate.set()
            outcome = await options
        (gap_s,) = outcome.gaps_s
        assert outcome.tpot_s == gap_s > 0.1

    async def test_connections_are_kept(self) -> None:
        server = ScriptedOpenAI(HELLO)
        async with http(server) as client:
            outcomes = [await ask(client) for _ in range(3)]
        assert [o.opened_connection for o in outcomes] == [True, False, False]
        assert len(set(server.peers)) == 1

    async def test_a_connection_for_each_request_where_it_is_asked_for(self) -> None:
        server = ScriptedOpenAI(HELLO)
        async with http(server, keep_alive=False) as client:
            outcomes = [await ask(client) for _ in range(3)]
        assert [o.ok and o.opened_connection for o in outcomes] == [True, True, True]
        assert len(set(server.peers)) == 3

    async def test_without_usage_chunks_are_counted(self) -> None:
        async with http(ScriptedOpenAI([text("a"), text("b"), DONE])) as client:
            outcome = await ask(client)
        assert (outcome.output_tokens, outcome.cached_tokens) == (2, None)

    @pytest.mark.parametrize(
        ("script", "status", "message"),
        [
            ((429, '{"error": {"message": "later"}}'), "HTTP_429", "later"),
            ((500, "oops"), "HTTP_500", "oops"),
            ([text("a"), usage(1, 1)], "INCOMPLETE", "without [DONE]"),
            ([text("a"), event(error={"message": "lost"}), DONE], "STREAM_ERROR", "lost"),
            ([text("a"), b"data: {nonsense\n\n", DONE], "GARBLED", "nonsense"),
            ([text("a"), b"data: 5\n\n", DONE], "GARBLED", "5"),
            ([text("a"), b"hang up"], "BROKEN", ""),
        ],
    )
    async def test_what_goes_wrong(self, script: Any, status: str, message: str) -> None:
        async with http(ScriptedOpenAI(script)) as client:
            outcome = await ask(client)
        assert outcome.status == status and message in outcome.message

    async def test_too_slow(self) -> None:
        async with http(ScriptedOpenAI([text("a"), asyncio.Event()]), timeout_s=0.3) as client:
            outcome = await ask(client)
        assert (outcome.status, len(outcome.token_times_s)) == ("TIMEOUT", 1)

    async def test_nobody_there(self, dead_address: str) -> None:
        client = HttpServer(f"http://{dead_address}", RequestOptions())
        with pytest.raises(errors.Unavailable, match="does not answer"):
            await client.connect()
        assert (await ask(client)).status == "UNREACHABLE"
        await client.close()


class TestGrpc:
    async def test_a_completion(self) -> None:
        end = finish(
            usage=common_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2),
            timing=common_pb2.Timing(
                queue_ms=1, ttft_ms=20, e2e_ms=40, transfer_ms=5, transfer_bytes=64
            ),
            route=common_pb2.Route(prefill="p", decode="d", attempts=2),
        )
        router = ScriptedRouter([started(), delta("a", 1), delta("", 2, 3), delta("b"), end])
        async with grpc(router, api_key="k", timeout_s=50) as client:
            assert await client.connect() == "demo"
            outcome = await ask(client)
        assert outcome.ok and list(outcome.token_counts) == [1, 2]
        counts = (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens)
        assert counts == (5, 3, 2)
        assert outcome.phases is not None
        assert (outcome.phases.queue_s, outcome.phases.transfer_bytes) == (0.001, 64)
        assert (outcome.attempts, outcome.prefilled_by_decode) == (2, False)
        (request,) = router.requests
        assert list(request.token_ids.ids) == DEMAND.prompt(RequestOptions().ids)
        assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (7, True)
        assert router.metadata[0]["authorization"] == "Bearer k"
        assert 40 < router.time_left_s[0] < 51

    async def test_text_and_chat(self) -> None:
        router = ScriptedRouter(scripted_router.HELLO)
        for form in ("text", "chat"):
            async with grpc(router, prompt_form=form) as client:
                assert (await ask(client)).ok
        plain, chat = router.requests
        assert len(plain.text.split()) == 5
        assert chat.chat.messages[0].content == plain.text

    @pytest.mark.parametrize(
        ("script", "status"),
        [
            ([errors.Overloaded("full", 2.0)], "RESOURCE_EXHAUSTED"),
            ([started(), delta("a", 1), errors.Unavailable("gone")], "UNAVAILABLE"),
        ],
    )
    async def test_what_goes_wrong(self, script: list[Any], status: str) -> None:
        async with grpc(ScriptedRouter(script)) as client:
            outcome = await ask(client)
        assert (outcome.status, outcome.message) == (status, str(script[-1]))

    async def test_a_stream_without_its_end(self) -> None:
        async with grpc(ScriptedRouter([started(), delta("a", 1)])) as client:
            assert (await ask(client)).status == "INCOMPLETE"

    async def test_too_slow(self) -> None:
        router = ScriptedRouter([started(), delta("a", 1), asyncio.Event()])
        async with grpc(router, timeout_s=0.3) as client:
            outcome = await ask(client)
        assert (outcome.status, len(outcome.token_times_s)) == ("DEADLINE_EXCEEDED", 1)

    async def test_given_up(self) -> None:
        router = ScriptedRouter([started(), delta("a", 1), asyncio.Event()])
        async with grpc(router) as client:
            options = asyncio.create_task(ask(client))
            await asyncio.wait((options,), timeout=0.3)
            options.cancel()
            with pytest.raises(asyncio.CancelledError):
                await options
            async with asyncio.timeout(30):
                await router.cancelled.wait()

    async def test_nobody_there(self, dead_address: str) -> None:
        client = GrpcServer(dead_address, RequestOptions())
        with pytest.raises(errors.Unavailable):
            await client.connect()
        assert (await ask(client)).status == "UNAVAILABLE"
        await client.close()


STREAM = (
    'data: {"a": 1}\n\n: ping\n\nevent: x\ndata:two\ndata: lines\n\ndata: é✓\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b"two\nlines", "é✓".encode(), b"[DONE]"]


def read(stream: bytes, *cuts: int) -> list[bytes]:
    """The events of a stream that comes in pieces."""
    reader, ends = EventReader(), [*sorted(cuts), len(stream)]
    begins = [0, *ends]
    return [e for b, end in zip(begins, ends, strict=False) for e in reader.feed(stream[b:end])]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
class TestCuts:
    def test_at_every_place(self, end: str) -> None:
        stream = stream_of(end)
        assert all(read(stream, cut) == EVENTS for cut in range(len(stream)))
        assert read(stream, *range(len(stream))) == EVENTS

    @given(st.lists(st.integers(0, len(STREAM)), max_size=8))
    def test_anywhere(self, end: str, cuts: list[int]) -> None:
        assert read(stream_of(end), *cuts) == EVENTS


def stream_of(end: str) -> bytes:
    """The stream with such line ends. A lone CR is one only when no LF follows: something must."""
    return STREAM.replace("\n", end).encode() + b":"


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: one\n")) == []
    assert list(reader.feed(b"\ndata: tw")) == [b"one"]
    assert list(reader.feed(b"o\n\n")) == [b"two"]


def test_an_unfinished_event_is_none() -> None:
    assert read(b"data: one\n\ndata: two\n") == [b"one"]
