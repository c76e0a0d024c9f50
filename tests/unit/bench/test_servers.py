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
from baton.bench.request import Demand, Outcome, Phases
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
    outcome = Outcome(0.0, planned_output_tokens=7)
    async with asyncio.timeout(30):
        await client.send(client.body(DEMAND), outcome)
    assert outcome.ended_s > 0
    return outcome


async def test_a_completion_over_http() -> None:
    server = ScriptedOpenAI([text("Hel"), text(""), text("lo"), usage(3, 2, 1), DONE])
    async with http(server, api_key="k") as client:
        await client.connect()
        outcome = await ask(client)
    assert outcome.ok and client.model == "scripted"
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


async def test_a_completion_over_grpc() -> None:
    end = finish(
        usage=common_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2),
        timing=common_pb2.Timing(
            queue_ms=1, ttft_ms=20, e2e_ms=40, transfer_ms=5, transfer_bytes=64
        ),
        route=common_pb2.Route(prefill="p", decode="d", attempts=2),
    )
    router = ScriptedRouter([started(), delta("a", 1), delta("", 2, 3), delta("b"), end])
    async with grpc(router, api_key="k", timeout_s=50) as client:
        await client.connect()
        outcome = await ask(client)
    assert outcome.ok and client.model == "demo" and list(outcome.token_counts) == [1, 2]
    counts = (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens)
    assert counts == (5, 3, 2)
    assert outcome.phases == Phases(0.001, 0.02, 0.04, 0.005, 64, 2, False)
    (request,) = router.requests
    assert list(request.token_ids.ids) == DEMAND.prompt(RequestOptions().ids)
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (7, True)
    assert router.metadata[0]["authorization"] == "Bearer k"
    assert 40 < router.time_left_s[0] < 51


async def test_prompts_as_text_and_as_chat() -> None:
    role, content = ({"role": "assistant", "content": ""}, {"content": "Hi"})
    chat: list[Step] = [
        *(event(choices=[{"delta": one}]) for one in (role, content)), usage(9, 1), DONE
    ]  # fmt: skip
    server, router = ScriptedOpenAI(HELLO, chat), ScriptedRouter(scripted_router.HELLO)
    for form in ("text", "chat"):
        async with grpc(router, prompt_form=form) as client:
            assert (await ask(client)).ok
        async with http(server, prompt_form=form, ignore_eos=False, model="m") as other:
            outcome = await ask(other)
    assert outcome.ok and len(outcome.token_times_s) == 1  # the role is no token
    plain, chatted = server.bodies
    assert len(plain["prompt"].split()) == 5
    assert all(body["model"] == "m" and "ignore_eos" not in body for body in server.bodies)
    assert chatted["path"] == "/v1/chat/completions"
    assert chatted["messages"] == [{"role": "user", "content": plain["prompt"]}]
    assert [r.text or r.chat.messages[0].content for r in router.requests] == [plain["prompt"]] * 2


async def test_tokens_are_timed_when_they_come() -> None:
    gate = asyncio.Event()
    server = ScriptedOpenAI([text("a"), gate, text("b"), DONE])  # without usage: chunks count
    async with http(server) as client:
        asking = asyncio.create_task(ask(client))
        async with asyncio.timeout(30):
            await server.begun.wait()
        await asyncio.sleep(0.3)
        gate.set()
        outcome = await asking
    (gap_s,) = outcome.gaps_s
    assert outcome.tpot_s == gap_s > 0.1
    assert (outcome.output_tokens, outcome.cached_tokens) == (2, None)


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_connections_are_kept_unless_one_for_each_is_asked_for(keep_alive: bool) -> None:
    server = ScriptedOpenAI(HELLO)
    async with http(server, keep_alive=keep_alive) as client:
        outcomes = [await ask(client) for _ in range(3)]
    assert all(o.ok for o in outcomes)
    assert [o.opened_connection for o in outcomes] == [True, not keep_alive, not keep_alive]
    assert len(set(server.peers)) == (1 if keep_alive else 3)


@pytest.mark.parametrize(
    ("connect", "script", "status", "message", "tokens"),
    [
        (http, (429, '{"error": {"message": "later"}}'), "HTTP_429", "later", 0),
        (http, (500, "oops"), "HTTP_500", "oops", 0),
        (http, [text("a"), usage(1, 1)], "INCOMPLETE", "without [DONE]", 1),
        (http, [text("a"), event(error={"message": "lost"}), DONE], "STREAM_ERROR", "lost", 1),
        (http, [text("a"), b"data: {nonsense\n\n", DONE], "GARBLED", "nonsense", 1),
        (http, [text("a"), b"data: 5\n\n", DONE], "GARBLED", "5", 1),
        (http, [text("a"), b"hang up"], "BROKEN", "", 1),
        (http, [text("a"), asyncio.Event()], "TIMEOUT", "0.5 s", 1),
        (grpc, [errors.Overloaded("full", 2.0)], "RESOURCE_EXHAUSTED", "full", 0),
        (grpc, [started(), delta("a", 1), errors.Unavailable("gone")], "UNAVAILABLE", "gone", 1),
        (grpc, [started(), delta("a", 1)], "INCOMPLETE", "without its last message", 1),
        (grpc, [started(), delta("a", 1), asyncio.Event()], "DEADLINE_EXCEEDED", "", 1),
    ],
)
async def test_an_error_has_a_status(
    connect: Any, script: Any, status: str, message: str, tokens: int
) -> None:
    server = ScriptedOpenAI(script) if connect is http else ScriptedRouter(script)
    async with connect(server, timeout_s=0.5) as client:
        outcome = await ask(client)
    assert outcome.status == status and message in outcome.message
    assert len(outcome.token_times_s) == tokens
    assert outcome.retry_after_s == (2.0 if status == "RESOURCE_EXHAUSTED" else 0.0)


async def test_a_cancelled_request_is_cancelled_at_the_router() -> None:
    router = ScriptedRouter([started(), delta("a", 1), asyncio.Event()])
    async with grpc(router) as client:
        asking = asyncio.create_task(ask(client))
        await asyncio.wait((asking,), timeout=0.3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(30):
            await router.cancelled.wait()


async def test_a_server_that_does_not_answer(dead_address: str) -> None:
    for client, status in (
        (HttpServer(f"http://{dead_address}", RequestOptions()), "UNREACHABLE"),
        (GrpcServer(dead_address, RequestOptions()), "UNAVAILABLE"),
    ):
        with pytest.raises(errors.Unavailable, match=dead_address):
            await client.connect()
        assert (await ask(client)).status == status
        await client.close()


STREAM = (
    'data: {"a": 1}\n\n: ping\n\nevent: x\ndata:two\ndata: lines\n\ndata: é✓\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b"two\nlines", "é✓".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_are_read_however_the_stream_is_cut(cuts: list[int], end: str) -> None:
    # A lone CR ends a line only when no LF follows: something must.
    stream = STREAM.replace("\n", end).encode() + b":"
    assert read(stream, *cuts) == read(stream, *range(len(stream))) == EVENTS


def read(stream: bytes, *cuts: int) -> list[bytes]:
    """The events of a stream that comes in pieces."""
    reader, ends = EventReader(), [*sorted(cuts), len(stream)]
    begins = [0, *ends]
    return [e for b, end in zip(begins, ends, strict=False) for e in reader.feed(stream[b:end])]


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: one\n")) == []
    assert list(reader.feed(b"\ndata: tw")) == [b"one"]
    assert list(reader.feed(b"o\n\n")) == [b"two"]
    assert list(reader.feed(b"data: unfinished\n")) == []
