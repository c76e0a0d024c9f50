"""The rest of both clients: unary calls, addresses, keys, traces, certificates, imports."""

import asyncio
import json
import math
import os
import threading
from collections import Counter

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import baton
from baton import errors
from baton.client import Model, RetryPolicy
from baton.client.call import Attempts
from baton.local import certs, ports
from baton.net import rpc
from baton.v1 import common_pb2, fleet_pb2, worker_pb2
from tests.unit.client.scripted_router import HELLO, ScriptedRouter, delta, finish, serving, started
from tests.waiting import WAIT_S


async def test_calls_arrive_with_their_input_key_and_deadline(connect, serve):
    router = ScriptedRouter(HELLO)
    async with connect(await serve(router), api_key="secret") as client:
        assert await client.tokenize([{"role": "user", "content": "hi"}]) == [7, 8]
        assert await client.models() == [Model("demo", 100, 50, True)]
        await client.generate("text", max_tokens=5, stop="END", model="demo")
        await client.generate([1, 2, 3], timeout=3)
        await client.generate([{"role": "user", "content": "hi"}])
        async for _ in client.stream("text"):
            pass
    tokenize, text, ids, chat, stream = router.requests
    assert (text.stream_interval, chat.stream_interval, stream.stream_interval) == (16, 16, 0)
    assert tokenize.chat.messages[0].content == "hi"
    assert (text.text, text.sampling.max_tokens, list(text.stop)) == ("text", 5, ["END"])
    assert (text.model, list(ids.token_ids.ids)) == ("demo", [1, 2, 3])
    assert chat.chat.messages[0].role == "user"
    assert {metadata["authorization"] for metadata in router.metadata} == {"Bearer secret"}
    assert 5 < router.time_left_s[0] < 11  # the default of all but completions
    assert router.time_left_s[1] is None and 0 < router.time_left_s[2] < 3.5


async def test_unary_calls_are_retried(connect, serve):
    router = ScriptedRouter(HELLO)
    router.unary_errors = [errors.Unavailable("gone"), errors.Overloaded("full")]
    async with connect(await serve(router), retry=RetryPolicy(first_delay_s=0.001)) as client:
        assert await client.tokenize("x") == [7, 8]
        router.unary_errors = [errors.InvalidRequest("empty", "input")]
        with pytest.raises(errors.InvalidRequest, match="empty") as raised:
            await client.tokenize("")
        for call in (client.tokenize("x", timeout="5"), client.status(timeout=float("nan"))):
            with pytest.raises(errors.InvalidRequest, match="timeout must be seconds"):
                await call
        router.unary_errors = [errors.Unavailable("etcd is away"), errors.DeadlineExceeded("late")]
        with pytest.raises(errors.DeadlineExceeded) as late:
            await client.tokenize("x")
    assert raised.value.field == "input"
    assert str(late.value.__cause__) == "etcd is away", "what the call waited for"
    assert len(router.requests) == 6


async def test_a_message_over_the_limit_is_no_overload(connect, serve):
    """Nothing is sent, and an answer over the limit is asked for once."""
    router = ScriptedRouter([started(), delta("x" * rpc.MAX_MESSAGE_BYTES)])
    text = "x" * (rpc.MAX_MESSAGE_BYTES + 1)
    async with connect(await serve(router)) as client:
        for call in (client.generate(text), client.tokenize(text), client.generate("x")):
            with pytest.raises(errors.InvalidRequest, match="message larger than max"):
                await call
    assert [request.text for request in router.requests] == ["x"]


async def test_status(connect, serve):
    record = common_pb2.WorkerRecord(
        role=common_pb2.WORKER_ROLE_PREFILL, incarnation="w", address="h:1", pid=42, blocks_total=50
    )
    load = {
        "queue_tokens": 9, "running": 2, "blocks_total": 64, "blocks_free": 60, "blocks_cached": 1,
        "blocks_held": 3, "blocks_quarantined": 0,
    }  # fmt: skip
    # What only a newer version has a name for is shown as its number.
    newer = common_pb2.WorkerRecord(role=77, incarnation="n", blocks_total=50)
    pair = {"prefill": "p", "decode": "d", "state": "OPEN", "fallback": "not so fast"}
    router = ScriptedRouter(HELLO)
    router.status = fleet_pb2.GetStatusResponse(
        router=fleet_pb2.RouterStatus(
            counts=fleet_pb2.RouterCounts(ended={"OK": 3}, refused=1),
            events=[
                fleet_pb2.RouterEvent(kind=fleet_pb2.EVENT_KIND_FAILOVER, text="gone"),
                fleet_pb2.RouterEvent(kind=79),
            ],
        ),
        workers=[
            fleet_pb2.WorkerStatus(record=record, load=worker_pb2.Load(**load), state="READY"),
            fleet_pb2.WorkerStatus(record=newer, state="SILENT", reason="asleep"),
        ],
        pairs=[
            worker_pb2.PairStatus(
                transport=common_pb2.TRANSPORT_SHM,
                epoch=1,
                sent_bytes=9_000_000,
                sent_ms=4.0,
                **pair,
            ),
            worker_pb2.PairStatus(transport=80, **pair),
        ],
    )
    async with connect(await serve(router)) as client:
        status = await client.status()
    assert json.loads(json.dumps(status)) == status
    shown, (known, unknown) = status["router"], status["workers"]
    assert (shown["counts"]["ended"], shown["counts"]["refused"]) == ({"OK": 3}, 1)
    assert (shown["registry_connected"], shown["latency"]["requests"]) == (False, 0)
    assert [(one["kind"], one["text"]) for one in shown["events"]] == [
        ("failover", "gone"), ("79", "")
    ]  # fmt: skip
    assert known == {
        "role": "prefill", "incarnation": "w", "address": "h:1", "pid": 42, "device": "cpu",
        "state": "READY", "reason": "", "adapters": [], "model": "", "version": "", **load,
    }  # fmt: skip
    assert (unknown["role"], unknown["blocks_total"], unknown["reason"]) == ("77", 50, "asleep")
    assert status["pairs"] == [
        {**pair, "transport": "shm", "sent_bytes": 9_000_000, "gb_per_s": 2.25},
        {**pair, "transport": "80", "sent_bytes": 0, "gb_per_s": None},
    ]


@pytest.fixture
def spans(monkeypatch):
    """Spans of the global tracer, which is set up for this test alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


async def test_a_span_travels_and_ends_with_the_call(connect, serve, spans):
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=1)
    router = ScriptedRouter(
        [started(trace_id=""), delta("a", 1), finish(usage=usage)], [errors.ModelNotFound("no x")]
    )
    async with connect(await serve(router)) as client:
        done = await client.generate("x", model="demo")
        with pytest.raises(errors.ModelNotFound):
            await client.generate("x")
    span, failed = spans.get_finished_spans()
    assert (span.name, span.kind) == ("baton.client.generate", trace.SpanKind.CLIENT)
    assert span.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 1,
    }
    assert done.trace_id == f"{span.context.trace_id:032x}"
    sent = router.metadata[0]["traceparent"].split("-")[1:3]
    assert sent == [done.trace_id, f"{span.context.span_id:016x}"]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.attributes["error.type"] == "ModelNotFound"


URL = r"HOST:PORT without \w+://.*--port .*:7700'"


@pytest.mark.parametrize(
    ("target", "ca_file", "match"),
    [
        *((target, None, "target") for target in ("", "nowhere", [], ["a:1", "b"], "a:1,")),
        *((url, None, URL) for url in ("http://127.0.0.1:7780", "grpc://h:7700", ["http://h:1"])),
        ("https://router.example:443/v1", None, URL),
        ("127.0.0.1:1", "no-such-folder/ca.pem", r"ca\.pem cannot be read"),
    ],
)
def test_addresses_and_certificates_are_checked_at_once(connect, target, ca_file, match):
    with pytest.raises(errors.ConfigError, match=match):
        connect(target, ca_file=ca_file)


def test_a_certificate_without_an_authority_is_refused_instead_of_sending_plain_text(connect):
    for given in ({"cert_file": "a.pem", "key_file": "b.pem"}, {"key_file": "b.pem"}):
        with pytest.raises(errors.ConfigError, match=r"needs the router's CA.*ca_file"):
            connect("127.0.0.1:1", **given)


@pytest.mark.parametrize("key", ["secret\n", "se cret", "s\u00e9cret", b"secret", 5])
def test_a_key_that_no_header_can_hold_is_refused_at_once(connect, key):
    with pytest.raises(errors.ConfigError, match="must be ASCII without spaces") as raised:
        connect("127.0.0.1:1", api_key=key)
    assert "cret" not in str(raised.value)


async def test_tls(connect, tmp_path):
    """And a client that lives on takes up other certificates."""

    def pair():
        certs.write(tmp_path, ["127.0.0.1"])
        names = ("router-key.pem", "router.pem")
        pairs = [tuple((tmp_path / name).read_bytes() for name in names)]
        return grpc.ssl_server_credentials(pairs)

    addresses, router = [f"127.0.0.1:{ports.free()}" for _ in range(2)], ScriptedRouter(HELLO)
    first = serving(router, pair(), addresses[0])
    impatient = RetryPolicy(max_attempts=1)
    async with connect(addresses, ca_file=tmp_path / "ca.pem", api_key="secret") as client:
        async with first:
            assert (await client.generate("x")).text == "Hello"
        (tmp_path / "ca-key.pem").unlink()  # another authority
        async with serving(router, pair(), addresses[1]):
            assert (await client.generate("x")).text == "Hello"
            async with connect(addresses[1], retry=impatient) as plain:
                with pytest.raises(errors.Unavailable):
                    await plain.generate("x")


def test_clients_begin_at_any_router_and_flee_from_a_full_one_to_several():
    addresses = [f"127.0.0.1:{number}" for number in range(1, 6)]
    begun, fled = Counter(), Counter()
    for _ in range(300):
        client = baton.Client(addresses)
        attempts = Attempts(client, None)
        begun[attempts.address] += 1
        client._preferred = 0
        attempts, tried = Attempts(client, None), [addresses[0]]
        for _ in range(4):
            attempts.failed(errors.Overloaded("full", 0.1))
            tried.append(attempts.address)
        assert sorted(tried) == addresses  # each, before one is asked again
        fled[tried[1]] += 1
        client.close()
    assert all(30 < begun[address] < 100 for address in addresses)
    assert all(40 < fled[address] < 120 for address in addresses[1:])


def test_of_two_routers_the_one_that_failed_longest_ago_is_called():
    client = baton.Client(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"])
    client._preferred, client._failed_at = 0, [-math.inf, 2.0, 1.0]
    attempts = Attempts(client, None)
    attempts.failed(errors.Overloaded("full"))
    assert attempts.address == "127.0.0.1:3"
    client.close()


def test_the_call_after_a_deadline_without_an_answer_begins_elsewhere():
    late = errors.DeadlineExceeded("late")
    for answered in (False, True):
        client = baton.Client(["127.0.0.1:1", "127.0.0.1:2"])
        attempts = Attempts(client, None)
        first = attempts.address
        if answered:
            attempts.received(output=False)
        with pytest.raises(errors.DeadlineExceeded):
            attempts.failed(late)
        assert (Attempts(client, None).address == first) is answered
        client.close()


async def test_a_client_that_a_fork_inherited_is_refused(connect, serve, monkeypatch):
    """It could hang, or end its process."""
    router = ScriptedRouter(HELLO)
    client = connect(await serve(router))
    await client.models()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        for call in (client.generate("x"), client.tokenize("x")):
            with pytest.raises(errors.ConfigError, match="another process or event loop"):
                await call
    assert router.requests == []
    await client.generate("x")
    await client.close()


def test_a_second_event_loop_needs_a_client_of_its_own():
    client = baton.AsyncClient("127.0.0.1:1", retry=RetryPolicy(max_attempts=1))
    with pytest.raises(errors.Unavailable):
        asyncio.run(client.models())
    for call in (client.models, lambda: client.generate("x")):
        with pytest.raises(errors.ConfigError, match="another process or event loop"):
            asyncio.run(call())
    asyncio.run(client.close())


async def test_a_closed_client_leaves_no_thread(serve):
    address = await serve(ScriptedRouter(HELLO))

    def use():
        before = set(threading.enumerate())
        with baton.Client(address) as client:
            client.generate("x")
            client.models()
        left = [t for t in threading.enumerate() if t not in before]
        for thread in left:
            thread.join(WAIT_S)
        return [t.name for t in left if t.is_alive()]

    assert await asyncio.to_thread(use) == []
