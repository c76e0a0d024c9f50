"""The rest of both clients: unary calls, addresses, keys, traces, certificates, imports."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import baton
from baton import errors
from baton.client import Model, RetryPolicy
from baton.v1 import common_pb2, fleet_pb2, worker_pb2
from tests.unit.client.scripted_router import HELLO, ScriptedRouter, delta, finish, serving, started


async def test_tokenize_and_models(connect, serve):
    router = ScriptedRouter(HELLO)
    async with connect(await serve(router)) as client:
        assert await client.tokenize([{"role": "user", "content": "hi"}]) == [7, 8]
        assert await client.models() == [Model("demo", 100, 50, True)]
    assert router.requests[0].chat.messages[0].content == "hi"
    assert 5 < router.time_left_s[0] < 11  # the default


async def test_unary_calls_are_retried(connect, serve):
    router = ScriptedRouter(HELLO)
    router.unary_errors = [errors.Unavailable("gone"), errors.Overloaded("full")]
    async with connect(await serve(router), retry=RetryPolicy(first_delay_s=0.001)) as client:
        assert await client.tokenize("x") == [7, 8]
        router.unary_errors = [errors.InvalidRequest("empty", "input")]
        with pytest.raises(errors.InvalidRequest, match="empty") as raised:
            await client.tokenize("")
    assert raised.value.field == "input"
    assert len(router.requests) == 4


async def test_status(connect, serve):
    record = worker_record()
    load = worker_pb2.Load(
        queue_tokens=9, running=2, blocks_total=64, blocks_free=60, blocks_cached=1, blocks_held=3
    )
    worker = fleet_pb2.WorkerStatus(record=record, load=load, state="READY")
    pair = worker_pb2.PairStatus(
        prefill="p", decode="d", transport=common_pb2.TRANSPORT_SHM, state="OPEN", epoch=1
    )
    router = ScriptedRouter(HELLO)
    router.status = fleet_pb2.GetStatusResponse(
        router=fleet_pb2.RouterStatus(
            incarnation="r",
            pid=1,
            state="SERVING",
            counts=fleet_pb2.RouterCounts(ended={"OK": 3}, refused=1),
            events=[fleet_pb2.RouterEvent(kind=fleet_pb2.EVENT_KIND_FAILOVER, text="gone")],
        ),
        workers=[worker, fleet_pb2.WorkerStatus(record=record, state="SILENT", reason="asleep")],
        pairs=[pair],
    )
    async with connect(await serve(router)) as client:
        status = await client.status()
    assert status["router"]["incarnation"] == "r"
    assert status["router"]["registry_connected"] is False
    assert status["router"]["counts"]["ended"] == {"OK": 3}
    assert status["router"]["counts"]["refused"] == 1
    (event,) = status["router"]["events"]
    assert (event["kind"], event["text"], event["times"]) == ("failover", "gone", 0)
    assert status["router"]["latency"]["requests"] == 0
    assert json.loads(json.dumps(status)) == status
    assert status["workers"][0] == {
        "role": "prefill",
        "incarnation": "w",
        "address": "h:1",
        "pid": 42,
        "device": "cpu",
        "state": "READY",
        "reason": "",
        "queue_tokens": 9,
        "running": 2,
        "blocks_total": 64,
        "blocks_free": 60,
        "blocks_cached": 1,
        "blocks_held": 3,
        "blocks_quarantined": 0,
    }
    assert status["workers"][1]["blocks_total"] == 50
    assert status["workers"][1]["reason"] == "asleep"
    assert status["pairs"] == [{"prefill": "p", "decode": "d", "transport": "shm", "state": "OPEN"}]


def worker_record():
    return common_pb2.WorkerRecord(
        role=common_pb2.WORKER_ROLE_PREFILL, incarnation="w", address="h:1", pid=42, blocks_total=50
    )


async def test_what_only_a_newer_version_has_a_name_for_is_shown_as_its_number(connect, serve):
    record = worker_record()
    record.role, record.state = 77, 78
    router = ScriptedRouter(HELLO)
    router.status = fleet_pb2.GetStatusResponse(
        router=fleet_pb2.RouterStatus(events=[fleet_pb2.RouterEvent(kind=79)]),
        workers=[fleet_pb2.WorkerStatus(record=record, state="READY")],
        pairs=[worker_pb2.PairStatus(prefill="p", decode="d", transport=80)],
    )
    async with connect(await serve(router)) as client:
        status = await client.status()
    assert status["workers"][0]["role"] == "77"
    assert status["router"]["events"][0]["kind"] == "79"
    assert status["pairs"][0]["transport"] == "80"


async def test_api_key_travels_as_a_bearer_token(connect, serve):
    router = ScriptedRouter(HELLO)
    async with connect(await serve(router), api_key="secret") as client:
        await client.generate("x")
        await client.tokenize("x")
    assert [m["authorization"] for m in router.metadata] == ["Bearer secret"] * 2


async def test_inputs_arrive(connect, serve):
    router = ScriptedRouter(HELLO)
    async with connect(await serve(router)) as client:
        await client.generate("text", max_tokens=5, stop="END", model="demo")
        await client.generate([1, 2, 3])
        await client.generate([{"role": "user", "content": "hi"}])
    text, ids, chat = router.requests
    assert (text.text, text.sampling.max_tokens, list(text.stop)) == ("text", 5, ["END"])
    assert text.model == "demo"
    assert list(ids.token_ids.ids) == [1, 2, 3]
    assert chat.chat.messages[0].role == "user"


@pytest.fixture
def spans(monkeypatch):
    """Spans of the global tracer, which is set up for this test alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


async def test_a_span_and_its_context_travel(connect, serve, spans):
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=1)
    router = ScriptedRouter([started(trace_id=""), delta("a", 1), finish(usage=usage)])
    async with connect(await serve(router)) as client:
        done = await client.generate("x", model="demo")
    (span,) = spans.get_finished_spans()
    assert (span.name, span.kind) == ("baton.client.generate", trace.SpanKind.CLIENT)
    assert span.attributes == {
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 1,
    }
    assert done.trace_id == f"{span.context.trace_id:032x}"
    assert router.metadata[0]["traceparent"].split("-")[1:3] == [
        done.trace_id,
        f"{span.context.span_id:016x}",
    ]


async def test_a_failed_call_ends_its_span_with_the_error(connect, serve, spans):
    async with connect(await serve(ScriptedRouter([errors.ModelNotFound("no x")]))) as client:
        with pytest.raises(errors.ModelNotFound):
            await client.generate("x")
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.attributes["error.type"] == "ModelNotFound"


@pytest.mark.parametrize("target", ["", "nowhere", [], ["a:1", "b"], "a:1,"])
def test_addresses_are_checked_at_once(connect, target):
    with pytest.raises(errors.ConfigError, match="target"):
        connect(target)


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1:7780", "https://router.example:443/v1", "grpc://h:7700", ["http://h:1"]],
)
def test_for_a_url_the_error_names_the_right_address(connect, target):
    with pytest.raises(errors.ConfigError, match=r"HOST:PORT without \w+://.*--port .*:7700'"):
        connect(target)


def test_certificates_are_read_at_once(connect, tmp_path):
    with pytest.raises(errors.ConfigError, match=r"ca\.pem cannot be read"):
        connect("127.0.0.1:1", ca_file=tmp_path / "ca.pem")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1 and its key: (path, path)."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "1"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_tls(connect, certificate):
    cert, key = certificate
    pair = [(key.read_bytes(), cert.read_bytes())]
    async with serving(ScriptedRouter(HELLO), grpc.ssl_server_credentials(pair)) as address:
        async with connect(address, ca_file=cert, api_key="secret") as client:
            assert (await client.generate("x")).text == "Hello"
        async with connect(address, retry=RetryPolicy(max_attempts=1)) as client:
            with pytest.raises(errors.Unavailable):
                await client.generate("x")


async def test_a_closed_client_leaves_no_thread(serve):
    address = await serve(ScriptedRouter(HELLO))

    def use():
        before = set(threading.enumerate())
        with baton.Client(address) as client:
            client.generate("x")
            client.models()
        left = [t for t in threading.enumerate() if t not in before]
        for thread in left:
            thread.join(10)
        return [t.name for t in left if t.is_alive()]

    assert await asyncio.to_thread(use) == []


def test_import_baton_is_light():
    """`import baton` loads neither torch nor gRPC; naming the client loads no torch."""
    program = (
        "import sys, baton\n"
        "assert 'grpc' not in sys.modules and 'torch' not in sys.modules\n"
        "assert baton.Client and baton.AsyncClient and baton.Completion and baton.errors\n"
        "assert 'grpc' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with pytest.raises(AttributeError, match="Clint"):
        _ = baton.Clint
