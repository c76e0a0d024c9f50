"""Both kinds of server, over real connections to servers that tests write."""

import asyncio
import contextlib
import json
import ssl
import time

import pytest
from aiohttp import web

from baton import errors
from baton.bench.request import Demand, Outcome, RequestOptions
from baton.bench.servers import GrpcServer, HttpServer, connected
from baton.cli import main as cli
from baton.cli.options import use_tls
from baton.local import certs
from baton.net import tls
from baton.v1 import common_pb2
from tests.unit.bench import scripted_openai
from tests.unit.bench.outcomes import NO_SERVER
from tests.unit.bench.scripted_openai import DONE, HELLO, ScriptedOpenAI, event, text, usage
from tests.unit.client import scripted_router
from tests.unit.client.scripted_router import ScriptedRouter, delta, finish, started
from tests.waiting import WAIT_S

DEMAND = Demand(0.0, ((1, 5),), 7)
HTTP, GRPC = ScriptedOpenAI, ScriptedRouter


@contextlib.asynccontextmanager
async def client_of(server, **options):
    """The client of a scripted server or router."""
    scripted = scripted_openai if isinstance(server, ScriptedOpenAI) else scripted_router
    async with scripted.serving(server) as url, connected(url, RequestOptions(**options)) as client:
        yield client


async def ask(client):
    """What becomes of one request."""
    outcome = Outcome(0.0, planned_output_tokens=7)
    async with asyncio.timeout(WAIT_S):
        await client.send(client.body(DEMAND), outcome, time.monotonic())
    return outcome


async def test_servers_with_tls_are_called_with_the_authority_and_certificate_of_the_options(
    tmp_path, monkeypatch
):
    certs.write(tmp_path, ["127.0.0.1"])
    file = lambda name: str(tmp_path / f"{name}.pem")  # noqa: E731
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(file("router"), file("router-key"))
    monkeypatch.setattr(tls, "_process", tls.Credentials())
    async with scripted_openai.serving(ScriptedOpenAI(HELLO), context) as url:
        trusting = ["--tls-ca", file("ca")]
        named = [*trusting, "--tls-cert", file("admin"), "--tls-key", file("admin-key")]
        misnamed = [*named, "--tls-name", "decode.baton"]
        for given, why in (
            ([], "its certificate's authority with --tls-ca"), (trusting, "does not answer"),
            (misnamed, "its name, if that is not its host, with --tls-name"), (named, ""),
        ):  # fmt: skip
            use_tls(cli.parser().parse_args(["bench", "serve", *given]))
            with pytest.raises(errors.Unavailable, match=why) if why else contextlib.nullcontext():
                async with connected(url, RequestOptions()) as client:
                    assert (await ask(client)).ok


async def test_a_completion_over_http():
    """Each token is timed when it comes; an empty chunk is none."""
    gate = asyncio.Event()
    server = ScriptedOpenAI([text("Hel"), text(""), gate, text("lo"), usage(3, 2, 1), DONE])
    async with client_of(server, api_key="k") as client:
        asking = asyncio.create_task(ask(client))
        async with asyncio.timeout(WAIT_S):
            await server.begun.wait()
        await asyncio.sleep(0.3)
        gate.set()
        outcome = await asking
    assert outcome.ok and client.model == "scripted" and server.keys == ["Bearer k"]
    (gap_s,) = outcome.gaps_s
    assert outcome.tpot_s == gap_s > 0.1
    counts = (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens)
    assert counts == (3, 2, 1)
    assert server.bodies == [
        {
            "path": "/v1/completions", "model": "scripted", "max_tokens": 7, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
            "prompt": DEMAND.prompt(RequestOptions().ids),
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    "choice", [{"text": "Hello"}, {"message": {"role": "assistant", "content": "Hello"}}]
)
async def test_a_whole_answer_over_http_is_one_output(choice):
    counts = {"prompt_tokens": 3, "completion_tokens": 2}
    server = ScriptedOpenAI((200, json.dumps({"choices": [choice], "usage": counts})))
    async with client_of(server, stream=False) as client:
        outcome = await ask(client)
    assert outcome.ok and (outcome.prompt_tokens, outcome.output_tokens) == (3, 2)
    assert list(outcome.token_counts) == [1] and outcome.ttft_s == outcome.e2e_s
    (body,) = server.bodies
    assert not body["stream"] and "stream_options" not in body


async def test_a_completion_over_grpc():
    end = finish(
        usage=common_pb2.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2),
        timing=common_pb2.Timing(
            queue_ms=1, ttft_ms=20, e2e_ms=40, transfer_ms=5, transfer_bytes=64
        ),
        route=common_pb2.Route(prefill="p", decode="d", attempts=2),
    )
    router = ScriptedRouter([started(), delta("a", 1), delta("", 2, 3), delta("b"), end])
    async with client_of(router, api_key="k", timeout_s=WAIT_S) as client:
        outcome = await ask(client)
    assert outcome.ok and client.model == "demo" and list(outcome.token_counts) == [1, 2]
    counts = (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens)
    assert counts == (5, 3, 2)
    assert outcome.finish == end.finish
    (request,) = router.requests
    assert list(request.token_ids.ids) == DEMAND.prompt(RequestOptions().ids)
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (7, True)
    assert router.metadata[0]["authorization"] == "Bearer k"
    assert WAIT_S / 2 < router.time_left_s[0] < WAIT_S + 1


async def test_prompts_as_text_and_as_chat():
    role, content = ({"role": "assistant", "content": ""}, {"content": "Hi"})
    chat = [
        *(event(choices=[{"delta": one}]) for one in (role, content)), usage(9, 1), DONE
    ]  # fmt: skip
    server, router = ScriptedOpenAI(HELLO, chat), ScriptedRouter(scripted_router.HELLO)
    for form in ("text", "chat"):
        async with client_of(router, prompt_form=form) as client:
            assert (await ask(client)).ok
        async with client_of(server, prompt_form=form, stop_at_eos=True, model="m") as other:
            outcome = await ask(other)
    assert outcome.ok and len(outcome.token_times_s) == 1  # the role is no token
    plain, chatted = server.bodies
    assert len(plain["prompt"].split()) == 5
    assert all(body["model"] == "m" and "ignore_eos" not in body for body in server.bodies)
    assert chatted["path"] == "/v1/chat/completions"
    assert chatted["messages"] == [{"role": "user", "content": plain["prompt"]}]
    assert [r.text or r.chat.messages[0].content for r in router.requests] == [plain["prompt"]] * 2


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_connections_are_kept_unless_one_for_each_is_asked_for(keep_alive):
    server = ScriptedOpenAI(HELLO)
    async with client_of(server, keep_alive=keep_alive) as client:
        outcomes = [await ask(client) for _ in range(3)]
    assert all(o.ok for o in outcomes)
    assert [o.opened_connection for o in outcomes] == [not keep_alive] * 3  # after `connect`
    assert len(set(server.peers)) == (1 if keep_alive else 3)


@pytest.mark.parametrize(
    ("kind", "script", "status", "message", "tokens"),
    [
        (HTTP, (429, '{"error": {"message": "later"}}'), "HTTP_429", "later", 0),
        (HTTP, (500, "oops"), "HTTP_500", "oops", 0),
        (HTTP, [text("a"), usage(1, 1)], "INCOMPLETE", "without [DONE]", 1),
        (HTTP, [text("a"), event(error={"message": "lost"}), DONE], "STREAM_ERROR", "lost", 1),
        (HTTP, [text("a"), b"data: {nonsense\n\n", DONE], "GARBLED", "nonsense", 1),
        (HTTP, [text("a"), b"data: 5\n\n", DONE], "GARBLED", "5", 1),
        (HTTP, [text("a"), b"data: " + b"x" * 2**20], "GARBLED", "bytes", 1),
        (HTTP, [text("a"), b"hang up"], "BROKEN", "", 1),
        (HTTP, [text("a"), asyncio.Event()], "TIMEOUT", "0.5 s", 1),
        (GRPC, [errors.Overloaded("full", 2.0)], "RESOURCE_EXHAUSTED", "full", 0),
        (GRPC, [started(), delta("a", 1), errors.Unavailable("gone")], "UNAVAILABLE", "gone", 1),
        (GRPC, [started(), delta("a", 1)], "INCOMPLETE", "without its last message", 1),
        (GRPC, [started(), delta("a", 1), asyncio.Event()], "DEADLINE_EXCEEDED", "", 1),
    ],
)
async def test_an_error_has_a_status(kind, script, status, message, tokens):
    hangs = script[-1:] if isinstance(script, list) else ()
    timeout_s = 0.5 if any(isinstance(last, asyncio.Event) for last in hangs) else WAIT_S
    async with client_of(kind(script), timeout_s=timeout_s) as client:
        outcome = await ask(client)
    assert outcome.status == status and message in outcome.message
    assert len(outcome.token_times_s) == tokens
    assert outcome.retry_after_s == (2.0 if status == "RESOURCE_EXHAUSTED" else 0.0)


async def test_a_cancelled_request_is_cancelled_at_the_router():
    router = ScriptedRouter([started(), delta("a", 1), asyncio.Event()])
    async with client_of(router) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(client), 0.3)
        async with asyncio.timeout(WAIT_S):
            await router.cancelled.wait()


@pytest.mark.parametrize("page", [b"\xff", b"{}", b'{"data": []}'])
async def test_a_server_that_lists_no_model(page):
    class Other(ScriptedOpenAI):
        async def models(self, request):
            return web.Response(body=page)

    with pytest.raises(errors.Unavailable, match="lists no model"):
        async with client_of(Other(HELLO)):
            pass


@pytest.mark.parametrize(
    ("kind", "url", "status"),
    [(HttpServer, f"http://{NO_SERVER}", "UNREACHABLE"), (GrpcServer, NO_SERVER, "UNAVAILABLE")],
)
async def test_a_server_that_does_not_answer(kind, url, status):
    client = kind(url, RequestOptions())
    with pytest.raises(errors.Unavailable, match=NO_SERVER):
        await client.connect()
    assert (await ask(client)).status == status
    await client.close()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_events_are_read_however_the_stream_is_cut(end):
    """Comments and other fields are left out; an event's lines make one text."""
    hello = json.dumps({"choices": [{"text": "é✓"}]}, ensure_ascii=False, indent=1)
    lines = [": ping", "", "event: x", *(f"data: {line}" for line in hello.splitlines()), ""]
    lines += ['data:{"choices": [{"text": "b"}]}', "", "data: [DONE]", "", ""]
    stream = end.join(lines).encode()
    script = [stream[i : i + 1] for i in range(len(stream))]
    async with client_of(ScriptedOpenAI(script, [stream])) as client:
        outcomes = [await ask(client), await ask(client)]
    found = [(o.status, o.output_tokens, o.cached_tokens) for o in outcomes]
    assert found == [("OK", 2, None)] * 2  # without usage chunks count
