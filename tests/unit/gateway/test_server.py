"""Routes beside completions, and how the server treats its connections."""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import re
import socket
import time
from collections import Counter

import msgspec
import pytest

from baton.config import ApiConfig, RouterConfig, host_names, origins
from baton.errors import ConfigError
from baton.gateway.chat_completions import ChatOutput
from baton.gateway.completions import CompletionOutput
from baton.gateway.routes import frontend
from baton.net import http_server
from baton.net.http_server import listen
from baton.telemetry.metrics.prometheus import Recorder
from baton.v1 import common_pb2
from router.output.sink import Piece
from router.telemetry.access_log import AccessLog
from router.telemetry.metrics import CAUSES, RouterMetrics
from router.telemetry.stats import RequestListener
from tests.tracing import Traces
from tests.unit.router.scripted_workers import TIMEOUT_S, seen
from tests.unit.router.small_tokenizers import byte_tokenizer, ids_only_tokenizer

from .conftest import PROMPT, rejected, tenants_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def test_what_can_be_read(gateway):
    gateway.service.metrics_page = lambda accept: (f"text/x; of={accept}", b"metrics 1\n")
    page = await gateway.client.get("/metrics", headers={"accept": "a/b"})
    assert (page.text, page.headers["content-type"]) == ("metrics 1\n", "text/x; of=a/b")

    async def read(path):
        return (await gateway.client.get(path)).json()

    model = {"id": "tiny", "object": "model", "created": 0, "owned_by": "baton",
             "max_model_len": 32, "root": "tiny", "parent": None, "type": "model",
             "display_name": "tiny", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active",
             "max_input_tokens": 32}  # fmt: skip
    page = {"object": "list", "has_more": False, "first_id": "tiny", "last_id": "tiny"}
    assert await read("/v1/models") == {**page, "data": [model]}
    assert await read("/v1/models/tiny") == model
    assert await read("/health") == {"status": "ok"}
    assert await read("/ready") == {"status": "ready"}
    assert (await read("/version"))["version"][0].isdigit()
    described = await read("/openapi.json")
    body = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    assert body["application/json"]["schema"]["$ref"].endswith("/CompletionRequest")
    fields = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0]["maximum"] == 100
    assert (fields["detokenize"]["enum"], len(fields["prompt"]["anyOf"])) == ([None, True], 4)


async def test_a_model_has_its_aliases(gateway_of):
    gateway = await gateway_of(api=ApiConfig(model_aliases=("org/other", "tiny")))
    listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "org/other"]
    assert (await gateway.client.get("/v1/models/org%2Fother")).json() == listed[1]
    answer = (await gateway.complete(model="org/other")).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("org/other", "abcde")
    refused = await gateway.complete(model="another")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


PAGE = {"origin": "https://a.example", "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-y"}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("", None),
        ("https://b.example", None),
        ("https://b.example,https://a.example", "https://a.example"),
        ("*", "*"),
    ],
)
async def test_web_pages_of_given_origins_may_call(gateway_of, given, allowed):
    gateway = await gateway_of(api=ApiConfig(cors_origins=origins(given) if given else ()))
    preflight = await gateway.client.options("/v1/completions", headers=PAGE)
    assert (preflight.status_code, preflight.headers["allow"]) == (204, "POST, OPTIONS")
    methods = preflight.headers.get("access-control-allow-methods")
    headers = preflight.headers.get("access-control-allow-headers")
    assert (methods, headers) == (("POST", "authorization, x-y") if allowed else (None, None))
    for answer in (
        await gateway.complete(PAGE),
        await gateway.complete(PAGE, stream=True),
        await gateway.complete(PAGE, max_tokens=-1),
        await gateway.client.get("/nothing", headers=PAGE),
    ):
        assert answer.headers.get("access-control-allow-origin") == allowed
        exposed = answer.headers.get("access-control-expose-headers", "")
        assert ("x-request-id" in exposed) is bool(allowed)
        assert re.fullmatch("[0-9a-f]{16}", answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("read", "said", "texts"),
    [
        (origins, "is no origin: write https",
         ["a.example", "https://a.example/", "null", "https://a.b,", ""]),
        (host_names, "is no host name: write chat", ["https://a", "a:80", "a/", "", "a,"]),
    ],
)  # fmt: skip
def test_what_is_no_origin_or_no_host_name_is_refused(read, said, texts):
    for text in texts:
        with pytest.raises(ConfigError, match=said):
            read(text)


async def test_tokens_are_returned(gateway):
    answer = (await gateway.post("/tokenize", {"prompt": "Hi", "return_token_strs": True})).json()
    ids = gateway.tokenizer.encode("Hi")
    assert answer == {"count": 2, "max_model_len": 32, "tokens": ids, "token_strs": ["H", "i"]}
    answer = (await gateway.post("/tokenize", {"messages": [{"role": "u", "content": "x"}]})).json()
    assert answer["tokens"] == gateway.tokenizer.encode_chat([{"role": "u", "content": "x"}])
    assert answer["token_strs"] is None


async def test_the_callers_trace_is_continued_and_returned(gateway_of):
    gateway = await gateway_of(cluster={"tracer": Traces().tracer})
    for response in (
        await gateway.complete({"traceparent": TRACEPARENT}),
        await gateway.complete({"traceparent": TRACEPARENT}, stream=True),
        await gateway.complete({"traceparent": TRACEPARENT}, temperature=-1),
    ):
        assert response.headers["x-trace-id"] == TRACE
        assert response.headers["traceparent"] == TRACEPARENT
    response = await gateway.complete({"traceparent": "01" + TRACEPARENT[2:] + "-what-comes"})
    assert (response.headers["x-trace-id"], response.headers["traceparent"]) == (TRACE, TRACEPARENT)
    own = await gateway.complete()
    assert len(own.headers["x-trace-id"]) == 32
    assert own.headers["x-trace-id"] != TRACE
    assert "traceparent" not in own.headers


async def test_a_trace_shows_a_slow_body_and_a_slow_reader(gateway_of, monkeypatch):
    traces = Traces()
    gateway = await gateway_of(cluster={"tracer": traces.tracer})
    monkeypatch.setattr(http_server.HttpExchange, "unread_bytes", 12345)
    read, sent = http_server.HttpExchange.body, []

    async def late(*args):
        body = await read(*args)
        began = time.monotonic()
        await asyncio.sleep(0.05)
        sent.append((time.monotonic() - began) * 1e3)
        return body

    monkeypatch.setattr(http_server.HttpExchange, "body", late)
    for n in (1, 2):
        assert (await gateway.complete(n=n)).status_code == 200
        *_, root = (span for span in traces.spans if span.parent is None)
        assert root.attributes["baton.http.body_ms"] >= sent.pop()
        assert root.attributes["baton.http.parse_ms"] >= 0
        assert root.attributes["baton.http.unread_bytes"] == 12345


class Records(RequestListener):
    """Keeps what requests have been."""

    def __init__(self, gateway):
        self.ended_ones = []
        gateway.service.stats.listeners = (self,)

    def ended(self, record, outcome):
        self.ended_ones.append(record)


@pytest.mark.parametrize("traced", [True, False])
async def test_choices_of_a_prompt_and_inputs_of_a_body_have_one_trace_and_arrival(
    gateway_of, traced
):
    """Else only the first has the trace that the caller is told, and the others seem quick."""
    traces = Traces()
    gateway = await gateway_of(cluster={"tracer": traces.tracer} if traced else {})
    records, parent = Records(gateway), {"traceparent": TRACEPARENT}
    asked = {"prompt": PROMPT, "max_tokens": 5}
    for path, headers, body in (
        ("/v1/completions", parent, {**asked, "n": 3}),
        ("/v1/embeddings", parent, {"input": [[1, 2], [3]]}),
        ("/v1/completions", {}, {**asked, "n": 2}),
    ):
        response = await gateway.post(path, body, headers)
        assert response.status_code == 200
        ended, records.ended_ones = records.ended_ones, []
        assert len(ended) > 1 and len({record.arrived for record in ended}) == 1
        assert {record.state.started for record in ended} == {ended[0].arrived}
        assert {record.trace_id for record in ended} == {response.headers.get("x-trace-id", "")}
    found = traces.spans
    whole = [span for span in found if span.name == "router.choices"]
    assert [span.parent and f"{span.parent.trace_id:032x}" for span in whole] == (
        [TRACE, TRACE, None] if traced else []
    )
    used = [
        [span.attributes[f"baton.{kind}_tokens"] for kind in ("input", "output")] for span in whole
    ]
    assert used == ([[3, 15], [3, 0], [3, 10]] if traced else [])
    parents = Counter(span.parent.span_id for span in found if span.name.endswith(" tiny"))
    assert [parents.pop(span.context.span_id) for span in whole] == ([3, 2, 2] if traced else [])
    assert not parents
    assert not any(name.startswith("gen_ai.") for span in whole for name in span.attributes)


NO_TRACES = [
    "nonsense", "", TRACEPARENT.upper(), TRACEPARENT.replace(TRACE, "0" * 32),
    TRACEPARENT.replace("00f067aa0ba902b7", "0" * 16), TRACEPARENT.replace(TRACE, TRACE[1:]),
    TRACEPARENT.replace(TRACE, TRACE + "0"), TRACEPARENT + "-00", TRACEPARENT + "0",
    "ff" + TRACEPARENT[2:], "0" + TRACEPARENT, f"{TRACEPARENT}, {TRACEPARENT}",
]  # fmt: skip


@pytest.mark.parametrize("exporting", [True, False])
async def test_a_trace_that_is_none_is_not_continued(gateway_of, exporting):
    """The W3C's rules: such a header is as if it were not there."""
    gateway = await gateway_of(cluster={"tracer": Traces().tracer} if exporting else {})
    for bad, more in itertools.product(NO_TRACES, ({}, {"temperature": -1})):
        response = await gateway.complete({"traceparent": bad}, **more)
        told = response.headers.get("x-trace-id", "")
        assert told.strip("0") if exporting and not more else not told, bad
        assert told != TRACE and "traceparent" not in response.headers, bad


@pytest.mark.parametrize("trusted", [True, False])
async def test_tenants_do_not_decide_on_traces_unless_they_are_trusted(
    gateway_of, tmp_path, trusted
):
    tenants = tenants_of(tmp_path, '[tenants.a]\nkey_files = ["key"]', "key")
    cluster = {"tracer": Traces().tracer}
    gateway = await gateway_of(tenants=tenants, trust_traceparent=trusted, cluster=cluster)
    sent = {"traceparent": TRACEPARENT, "authorization": "Bearer key"}
    for more in ({}, {"stream": True}):
        response = await gateway.complete(sent, **more)
        assert response.status_code == 200
        assert (response.headers["x-trace-id"] == TRACE) is trusted
        assert ("traceparent" in response.headers) is trusted


async def test_every_answer_has_an_id_that_events_have_too(gateway):
    answers = [
        await gateway.complete(model="other"),
        await gateway.complete(max_tokens=99),
        await gateway.complete(stop=[""]),
        await gateway.post("/v1/embeddings", {"input": [1] * 99}),
        await gateway.post("/v1/responses", {"input": "Hi", "model": "other"}),
        await gateway.client.get("/v1/nothing"),
        await gateway.client.get("/v1/models"),
        await gateway.complete(n=2, prompt=[[1], [2]]),
        await gateway.complete(stream=True),
    ]
    ids = [one.headers["x-request-id"] for one in answers]
    assert len(set(ids)) == len(ids) and all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)
    assert {one.request_id for one in gateway.service.stats.events} == set(ids[:5])
    assert answers[-2].json()["id"] == f"cmpl-{ids[-2]}" and f"cmpl-{ids[-1]}" in answers[-1].text
    handoffs = [
        one.sequence.handoff_id for worker in gateway.cluster.prefills for one in worker.requests
    ]
    assert len(handoffs) == len(set(handoffs)) == 5, "a choice has an id of its own"


async def test_a_request_has_the_id_that_its_caller_gave_it(gateway, caplog):
    sent = {"x-request-id": "job:7/a.b"}
    for response in (
        await gateway.complete(sent),
        await gateway.complete(sent, stream=True),
        await gateway.complete(sent, max_tokens=-1),
        await gateway.complete(sent, request_id="other"),
        await gateway.complete(request_id="job:7/a.b"),
        await gateway.chat(request_id="job:7/a.b", max_tokens=3),
        await gateway.post("/v1/responses", {"input": "Hi", "request_id": "job:7/a.b"}),
        await gateway.post("/v1/embeddings", {"input": "Hi"}, sent),
    ):
        assert response.headers["x-request-id"] == "job:7/a.b"
    for bad in ("a" * 129, "a b", 'a"b', "\xe9", "a, b"):
        response = await gateway.complete({"x-request-id": bad.encode("latin-1")})
        own = response.headers["x-request-id"]
        assert response.status_code == 200 and re.fullmatch("[0-9a-f]{16}", own)
        refused = await gateway.complete(request_id=bad)
        assert rejected(refused) == (400, "request_id")
    gateway.service.draining = True
    with caplog.at_level("INFO"):
        await gateway.complete(sent)
    assert "(job:7/a.b)" in caplog.text


async def test_paths_may_end_with_a_slash(gateway):
    for path in ("/v1/models", "/v1/models/tiny", "/health"):
        plain, slash = [await gateway.client.get(path + end) for end in ("", "/")]
        assert (slash.status_code, slash.content) == (200, plain.content)
    body = {"prompt": PROMPT, "max_tokens": 5}
    assert (await gateway.post("/v1/completions/", body)).status_code == 200
    assert (await gateway.client.get("/v1/nothing/")).status_code == 404


async def test_one_connection_serves_many_requests_and_sends_small_writes_at_once(
    gateway, connections
):
    """Without TCP_NODELAY a stream's second chunk waits for the client's delayed ACK."""
    for stream in (False, True, False, True):
        response = await gateway.complete(stream=stream)
        assert response.status_code == 200
        assert response.headers.get("connection") != "close"
    (connection,) = connections
    sock = connection.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_chunk_comes_with_its_token_and_not_later(gateway):
    """Each token is sent as it is made: the next one is not made before the first was read."""
    paused = []
    gateway.decode.runs = [lambda *run: paused.append(run)]
    async with gateway.stream() as response, asyncio.timeout(TIMEOUT_S):
        lines = (line async for line in response.aiter_lines() if line)
        assert '"text":"a"' in await anext(lines)
        assert len(paused) == 1
        gateway.decode.run_to_end(*paused[0])
        assert [line async for line in lines][-1] == "data: [DONE]"


POST = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
GET = b"GET /health HTTP/1.1\r\n"


async def said(gateway, *parts):
    """What the server says to a client that sends this and waits, until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    heard = b""
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        async with asyncio.timeout(TIMEOUT_S):
            for number, part in enumerate(parts):
                await asyncio.sleep(0.05 * bool(number))  # so that parts are not read as one
                writer.write(part)
            while more := await reader.read(1 << 16):
                heard += more
    return heard


async def test_what_is_not_a_body_is_limited(gateway, monkeypatch):
    parsed, feed = [], http_server.Connection.on_header
    monkeypatch.setattr(
        http_server.Connection, "on_header", lambda *args: (parsed.append(1), feed(*args))
    )
    for name, sent in {
        "header": POST + b"x: " + b"a" * (1 << 20),
        "headers": POST + b"a: b\r\n" * 1000 + b"content-length: 2\r\n\r\n{}",
        "url": b"GET /" + b"a" * (1 << 20),
        "trailers": CHUNKED + b"0\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        "trailer": CHUNKED + b"0\r\nx: " + b"a" * (1 << 20),
        "extension": CHUNKED + b"1;" + b"a" * (1 << 20),
        "chunks": CHUNKED + b"1\r\n \r\n" * 100_000,
        "empty lines": b"\r\n" * (1 << 20),
    }.items():
        parsed.clear()
        heard = await said(gateway, sent)
        assert heard.startswith(b"HTTP/1.1 431 "), name
        assert b'"message":"too many ' in heard, name
        assert len(parsed) <= http_server.MAX_HEADERS + 1, name


@pytest.mark.parametrize("place", ["header", "headers", "url", "trailer"])
@pytest.mark.parametrize("pipelined", [False, True])
async def test_what_comes_at_once_is_limited_as_what_comes_in_parts(gateway, place, pipelined):
    """The whole is less than a read takes, so that the parser has it before it is counted."""

    def request(size):
        return {
            "header": GET + b"x: " + b"a" * size + b"\r\n\r\n",
            "headers": GET + (b"x: " + b"a" * (size // 4) + b"\r\n") * 4 + b"\r\n",
            "url": GET.replace(b"/health", b"/health?" + b"a" * size) + b"\r\n",
            "trailer": CHUNKED + b"0\r\nx: " + b"a" * size + b"\r\n\r\n",
        }[place]

    first = GET + b"\r\n" if pipelined else b""
    for size, refused in ((http_server.MAX_HEADER_BYTES - 500, False), (80_000, True)):
        heard = await said(gateway, first + request(size) + GET + b"connection: close\r\n\r\n")
        answered = heard.count(b"HTTP/1.1 ") - heard.count(b"HTTP/1.1 431 ")
        assert (answered < 2 + pipelined) is refused
        if refused and place == "header" and not pipelined:  # none is sent behind an answer
            assert heard.startswith(b"HTTP/1.1 431 ")


async def test_a_large_body_in_chunks_is_within_the_limits(gateway):
    chunks = b"200\r\n" + b" " * 512 + b"\r\n"
    first = CHUNKED.replace(b"\r\n", b"\r\nconnection: close\r\n", 1).replace(b"{}", b"  ")
    heard = await said(gateway, first + chunks * 4_000 + b"0\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 400 ")
    assert b"the body is not JSON" in heard


HALVES = {
    "nothing": ((), b""),
    "headers": ((POST,), b"HTTP/1.1 408 "),
    "method": ((b"POST",), b"HTTP/1.1 408 "),
    "body": ((POST + b"content-length: 9\r\n\r\n{",), b"HTTP/1.1 408 "),
    "unread body": ((POST.replace(b"v1", b"v0") + b"content-length: 9\r\n\r\n{",),
                    b"HTTP/1.1 404 "),
    "empty line": ((GET + b"\r\n", b"\r\n"), b"HTTP/1.1 200 "),
    "second request": ((GET + b"\r\n", GET), b"HTTP/1.1 200 "),
}  # fmt: skip


async def test_half_a_request_ends_the_connection(gateway, monkeypatch):
    for name in ("HEADERS_TIMEOUT_S", "BODY_TIMEOUT_S", "LINGER_S"):
        monkeypatch.setattr(http_server, name, 0.4)
    heard = await asyncio.gather(*(said(gateway, *sent) for sent, _ in HALVES.values()))
    for name, (_, status), one in zip(HALVES, HALVES.values(), heard, strict=True):
        assert one.startswith(status) and bool(one) is bool(status), name


async def test_the_time_for_a_request_is_no_time_for_its_answer(gateway, monkeypatch):
    for name in ("HEADERS_TIMEOUT_S", "BODY_TIMEOUT_S", "LINGER_S"):
        monkeypatch.setattr(http_server, name, 0.05)

    def later(*run):
        asyncio.get_running_loop().call_later(0.3, gateway.decode.run_to_end, *run)

    gateway.decode.runs = [later, later]
    assert len(await gateway.events()) == 5
    body = b'{"prompt":[1,2,3],"max_tokens":5,"ignore_eos":true}'
    request = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    heard = await said(gateway, request + GET)  # half of the next one while this one is answered
    assert heard.count(b"HTTP/1.1") == 2
    assert heard.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in heard


async def test_a_kept_connection_may_be_idle_for_longer_than_a_request_may_take(
    gateway, monkeypatch
):
    monkeypatch.setattr(http_server, "HEADERS_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(TIMEOUT_S):
        for _ in range(2):
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200 ")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reader.read(1)
    writer.close()
    await writer.wait_closed()


BODY = b'{"prompt":[1,2,3],"max_tokens":3,"ignore_eos":true,"stream":true}'


def request(*headers, body=BODY, version=b"1.1"):
    lines = (b"content-length: %d" % len(body), *headers)
    first = b"POST /v1/completions HTTP/%b\r\n" % version
    return first + b"".join(b"%b\r\n" % line for line in lines) + b"\r\n" + body


async def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection(gateway):
    heard = await said(gateway, request(b"connection: keep-alive", version=b"1.0"))
    head, _, body = heard.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    assert body.startswith(b'data: {"id"') and body.endswith(b"}\n\ndata: [DONE]\n\n")


async def test_what_follows_the_last_request_is_not_answered(gateway):
    heard = await said(gateway, request(b"connection: close") + GET + b"\r\n")
    assert heard.count(b"HTTP/1.1 ") == 1
    assert heard.startswith(b"HTTP/1.1 200 ") and heard.endswith(b"\r\n0\r\n\r\n")


async def test_requests_that_come_together_are_answered_in_order(gateway):
    last = request(b"connection: close", body=b"{}")
    heard = await said(gateway, GET + b"\r\n" + request() + GET + b"\r\n", last)
    assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [b"200", b"200", b"200", b"400"]
    assert heard.index(b'"ok"') < heard.index(b"[DONE]") < heard.rindex(b'"ok"')


UPGRADE = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
CLOSE = GET + b"connection: close\r\n\r\n"


async def test_requests_for_another_protocol_are_answered_with_their_bodies(gateway):
    """As Java's client sends them: it would like HTTP/2."""
    framings = {
        "content-length": [POST + UPGRADE + b"content-length: %d\r\n\r\n" % len(BODY), BODY],
        "chunks": [
            POST + UPGRADE + b"transfer-encoding: chunked\r\n\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        ],
        "nothing": [GET + UPGRADE + b"\r\n"],
    }
    for (framing, parts), together in itertools.product(framings.items(), (True, False)):
        sent = [*parts, *parts, CLOSE]
        heard = await said(gateway, *([b"".join(sent)] if together else sent))
        assert re.findall(rb"HTTP/1.1 (\d+)", heard) == [b"200"] * 3, framing
        assert heard.count(b"[DONE]") == 2 * (framing != "nothing"), framing


async def test_a_request_for_what_is_no_path_is_refused(gateway):
    for target in (b"CONNECT a.example:80", b"GET a.example"):
        heard = await said(gateway, target + b" HTTP/1.1\r\n\r\n")
        assert heard.startswith(b"HTTP/1.1 400 ")


async def test_a_body_is_asked_for_when_it_is_wanted(gateway):
    asked = request(b"expect: 100-continue", b"connection: close")
    heard = await said(gateway, asked.removesuffix(BODY), BODY)
    assert heard.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    heard = await said(gateway, asked.replace(b"/v1/", b"/v0/"))
    assert heard.startswith(b"HTTP/1.1 404 ")


@contextlib.asynccontextmanager
async def answering(answer):
    """A server that answers so; gives its address and its port."""
    listener = listen("127.0.0.1", 0, "HTTP", "--http-port")
    address = listener.getsockname()
    async with asyncio.timeout(TIMEOUT_S), http_server.serving(answer, listener, 9) as port:
        yield address, port


@contextlib.asynccontextmanager
async def asking(answer, times=1, headers=b""):
    """A server that answers so; gives the readers of connections that have asked something."""
    readers = []
    async with contextlib.AsyncExitStack() as clients:
        clients.push_async_callback(asyncio.sleep, 0)  # their ends are seen
        async with answering(answer) as (address, _):
            for _ in range(times):
                reader, writer = await asyncio.open_connection(*address)
                clients.callback(writer.close)
                writer.write(GET + headers + b"\r\n")
                readers.append(reader)
            yield readers


async def test_an_answer_that_breaks_off_ends_its_connection(caplog):
    async def broken(exchange):
        exchange.start(200, [])
        exchange.write(b"a part")
        raise ValueError("no more")

    async with asking(broken) as (reader,):
        heard = await reader.read()
    assert heard.startswith(b"HTTP/1.1 200 ") and heard.endswith(b"6\r\na part\r\n")
    assert "GET /health: the answer broke off" in caplog.text and "no more" in caplog.text


async def test_what_is_sent_to_a_connection_that_has_closed_is_dropped(caplog):
    """A worker's event may come before the request's task sees its end; uvloop raises then."""
    begun = []

    async def answer(exchange):
        begun.append(exchange)
        exchange.start(200, [])
        exchange._transport.abort()
        await asyncio.sleep(TIMEOUT_S)

    async with asking(answer) as (reader,):
        assert await reader.read() == b""
        begun[0].write(b"a part")
        begun[0].end(b"the last")
    assert not caplog.records


async def test_what_has_come_when_a_server_leaves_is_answered():
    """Closing would reset the connection: the client could not tell whether it was served."""

    async def answer(exchange):
        exchange.answer(200, b"served")

    def heard(client):
        return b"".join(iter(lambda: client.recv(1 << 16), b""))

    with contextlib.ExitStack() as clients:
        async with answering(answer) as (address, port):
            taken = clients.enter_context(socket.create_connection(address))
            await seen(lambda: port.connections)
            waiting = clients.enter_context(socket.create_connection(address))  # not accepted yet
            for client in (taken, waiting):
                client.sendall(GET + b"\r\n")
        answers = [await asyncio.to_thread(heard, client) for client in (taken, waiting)]
    for one in answers:
        assert one.startswith(b"HTTP/1.1 200 ") and one.endswith(b"served")


async def test_a_machine_that_stood_still_costs_no_new_connection(monkeypatch):
    """Its client stood, too: it sends what it was about to send when both go on."""
    monkeypatch.setattr(http_server, "HEADERS_TIMEOUT_S", 0.2)

    async def answer(exchange):
        exchange.answer(200, b"served")

    async with answering(answer) as (address, port):
        with socket.create_connection(address) as client:
            await seen(lambda: port.connections)
            time.sleep(0.2 + 2 * http_server._STALL_S)  # noqa: ASYNC251 (the loop stands still)
            await asyncio.sleep(0.05)  # the time for headers has passed
            client.sendall(GET + b"\r\n")
            assert (await asyncio.to_thread(client.recv, 1 << 16)).startswith(b"HTTP/1.1 200 ")


async def test_the_end_of_a_server_waits_a_moment_for_answers_and_for_nobody_else(monkeypatch):
    monkeypatch.setattr(http_server, "_STOP_TURNS", 3)
    begun, cancelled = [], []

    async def answer(exchange):
        exchange.start(200, [])
        exchange.write(b"a part")
        begun.append(exchange)
        if len(begun) == 1:
            await ends.wait()
        else:
            try:
                await asyncio.sleep(TIMEOUT_S)
            except asyncio.CancelledError:
                cancelled.append(exchange)
                raise
        exchange.end(b"the last")

    ends = asyncio.Event()
    async with asking(answer, 2) as readers:
        await seen(lambda: len(begun) == 2)
        asyncio.get_running_loop().call_later(0.1, ends.set)
    assert cancelled == begun[1:]
    heard = []
    for reader in readers:
        with contextlib.suppress(ConnectionResetError):
            heard.append(await reader.read())
    assert heard[0].endswith(b"a part\r\n8\r\nthe last\r\n0\r\n\r\n")


async def test_trailers_do_not_replace_headers(gateway):
    seen = gateway.watch()
    body = b'{"prompt":[1,2,3],"max_tokens":5,"ignore_eos":true}'
    heard = await said(
        gateway,
        POST + b"connection: close\r\nauthorization: Bearer mine\r\n"
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n"
        b"authorization: Bearer theirs\r\n\r\n" % (len(body), body),
    )
    assert heard.startswith(b"HTTP/1.1 200 ")
    assert [dict(caller.metadata)["authorization"] for _, caller in seen] == [b"Bearer mine"]


async def test_connections_and_requests_at_a_time_are_limited(gateway_of):
    gateway = await gateway_of(api=ApiConfig(max_http_connections=2, max_http_requests=1))
    paused = []
    gateway.decode.runs = [lambda *run: paused.append(run)]
    first = asyncio.create_task(gateway.complete())
    await seen(lambda: paused)
    busy = await gateway.complete()
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    assert "too many HTTP requests" in busy.json()["error"]["message"]
    heard = await said(gateway)  # the client keeps its connections
    assert heard.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in heard
    assert b"too many connections" in heard
    gateway.decode.run_to_end(*paused[0])
    assert (await first).status_code == 200


async def test_each_refusal_is_counted_and_logged_once(gateway_of, tmp_path, caplog, monkeypatch):
    """Whichever part of the router refuses; not of what runs nothing, as a count of tokens."""
    text = '[tenants.t]\nkey_files = ["ann"]\n[tenants.one]\nkey_files = ["bob"]\nmax_running = 1'
    tenants, api = tenants_of(tmp_path, text, "ann", "bob"), ApiConfig(max_http_requests=2)
    gateway = await gateway_of(tenants=tenants, api=api, host="127.0.0.1")
    recorder = Recorder("router", {})
    gateway.service.stats.listeners = (RouterMetrics(recorder, ()), AccessLog(1.0))
    gateway.client.headers["authorization"] = "Bearer ann"
    counts, bob = gateway.service.stats.counts, {"authorization": "Bearer bob"}
    body = {"prompt": PROMPT, "max_tokens": 5}

    def counted():
        page = recorder.render("text/plain")[1].decode()
        found = dict(re.findall(r'refused_total{cause="(\w+)".*} (\S+)', page))
        assert found.keys() == set(CAUSES)
        return Counter({name: int(float(count)) for name, count in found.items()})

    cases = (
        (401, "tenant_unknown", "UNAUTHENTICATED", {"headers": {"authorization": "Bearer eve"}}),
        (404, "invalid", "NOT_FOUND", {"body": {**body, "model": "none"}}),
        (400, "invalid", "INVALID_ARGUMENT", {"body": {**body, "prompt": {}}}),
        (400, "invalid", "INVALID_ARGUMENT", {"body": {**body, "prompt": [9999999]}}),
        (415, "invalid", "INVALID_ARGUMENT", {"headers": {"content-encoding": "br"}}),
        (403, "invalid", "INVALID_ARGUMENT", {"headers": {"host": "other.example"}}),
        (400, "invalid", "INVALID_ARGUMENT", {"headers": {"x-request-timeout": "never"}}),
    )
    expected, lines = Counter(), []
    with caplog.at_level("INFO", "baton.access"):
        for path in ("/v1/completions", "/v1/completions/"):
            for status, cause, code, sent in cases:
                answer = await gateway.post(path, **{"body": body, **sent})
                assert answer.status_code == status
                expected[cause] += 1
                tenant = "" if cause == "tenant_unknown" else "t"
                lines.append((code, tenant))
                assert counted() == expected, (status, sent)
        paused = []
        gateway.decode.runs = [lambda *run: paused.append(run)] * 2
        first = asyncio.create_task(gateway.post("/v1/completions", body, bob))
        await seen(lambda: paused)
        assert (await gateway.post("/v1/completions", body, bob)).status_code == 429
        second = asyncio.create_task(gateway.post("/v1/completions", body))
        await seen(lambda: len(paused) == 2)
        for path in ("/v1/messages", "/v1/embeddings", "/v2/rerank", "/v1/responses"):
            assert (await gateway.post(path, body)).status_code == 503
        for path in ("/tokenize", "/v1/messages/count_tokens", "/v1/conversations", "/nowhere"):
            assert (await gateway.post(path, body)).status_code in (404, 503)
        for run in paused:
            gateway.decode.run_to_end(*run)
        assert {(await first).status_code, (await second).status_code} == {200}
        monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.2)
        heard = await said(
            gateway, POST + b"authorization: Bearer bob\r\ncontent-length: 9\r\n\r\n{"
        )
        assert heard.startswith(b"HTTP/1.1 408 ")
    lines += [("RESOURCE_EXHAUSTED", "one"), *[("UNAVAILABLE", "t")] * 4]
    lines += [("OK", "one"), ("OK", "t"), ("INVALID_ARGUMENT", "one")]
    assert counted() == expected + Counter(tenant_limit=1, overloaded=4, invalid=1)
    logged = [one.fields for one in caplog.records if one.name == "baton.access"]
    assert Counter((one["status"], one.get("tenant", "")) for one in logged) == Counter(lines)
    assert all(one["request_id"] for one in logged)
    assert counts.ended == Counter(status for status, _ in lines)


async def test_a_refused_connection_counts_as_a_request(gateway_of):
    gateway = await gateway_of(api=ApiConfig(max_http_connections=1))
    assert (await gateway.complete()).status_code == 200  # the client keeps its connection
    assert b"too many connections" in await said(gateway)
    assert gateway.service.stats.counts.ended == {"OK": 1, "UNAVAILABLE": 1}


CHUNK = b"%x\r\n" % (1 << 16) + b"z" * (1 << 16) + b"\r\n"


async def test_a_body_that_nobody_reads_is_bounded_and_its_connection_ends(monkeypatch):
    monkeypatch.setattr(http_server, "LINGER_S", 0.3)
    begun, ends = [], asyncio.Event()

    async def answer(exchange):  # as a file that is sent to a slow reader
        begun.append(exchange)
        exchange.start(200, [])
        exchange.write(b"a part")
        await ends.wait()
        exchange.end(b"the last")

    async with answering(answer) as (address, _):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GET + b"transfer-encoding: chunked\r\n\r\n")

        async def send():
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(CHUNK)
                    await writer.drain()

        sending = asyncio.create_task(send())
        await reader.readuntil(b"a part")
        held = lambda: sum(map(len, begun[0]._parts))  # noqa: E731
        await seen(lambda: held() > http_server.MAX_WAITING_BYTES)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert held() < 2 * http_server.MAX_WAITING_BYTES
        ends.set()
        await sending  # until the connection is closed
        writer.close()


@pytest.mark.parametrize("sent", [GET + b"\r\n", GET + b"transfer-encoding: chunked\r\n\r\n"])
async def test_a_client_that_is_gone_is_seen_while_nothing_is_read_from_it(monkeypatch, sent):
    monkeypatch.setattr(http_server, "_LOOK_S", 0.05)
    begun, cancelled = [], asyncio.Event()

    async def answer(exchange):
        begun.append(exchange)
        try:
            await asyncio.sleep(10 * TIMEOUT_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with answering(answer) as (address, _):
        _, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        await seen(lambda: begun)
        transport = begun[0]._transport
        # Another request behind it, or a body that nobody reads.
        while transport.is_reading():
            writer.write(CHUNK if b"chunked" in sent else GET + b"\r\n")
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        assert not cancelled.is_set()
        writer.close()
        await cancelled.wait()


async def test_what_a_client_leaves_unread_is_seen_soon():
    """The kernel would take four megabytes of it: tokens of an hour."""
    sent, noticed = [0], asyncio.Event()

    async def answer(exchange):
        exchange.start(200, [])
        while not exchange.unread_bytes:
            exchange.write(b"x" * 200)
            sent[0] += 200
            await asyncio.sleep(0)
        noticed.set()
        exchange.abort()

    async with answering(answer) as (address, _):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            client.sendall(GET + b"\r\n")
            await noticed.wait()
    assert sent[0] < 256 << 10


async def test_headers_that_may_come_once_are_refused_if_they_come_twice(gateway):
    for name in (b"authorization", b"host", b"content-type", b"origin"):
        twice = name + b": localhost\r\n" + name.upper() + b": other\r\n"
        heard = await said(gateway, GET + twice + b"\r\n")
        assert heard.startswith(b"HTTP/1.1 400 ")
        assert b"more than one header " + name in heard


async def test_a_repeated_header_is_a_list():
    found = []

    async def answer(exchange):
        found.append(exchange.headers)
        exchange.answer(200, b"{}")

    async with asking(answer, headers=b"accept: a/b\r\nAccept: c/d\r\n") as (reader,):
        await reader.readuntil(b"{}")
    assert found[0][b"accept"] == b"a/b, c/d"


OWN_HOSTS = [
    *("127.0.0.1:7780", "[::1]:7780", "10.1.2.3", "localhost", "LocalHost:1", "a.localhost:7780"),
    *("host.docker.internal:7780", "localhost.", socket.gethostname(), ""),
]
OTHER_HOSTS = [
    *("evil.example", "evil.example:7780", "127.0.0.1.evil.example", "1.2.3", "localhost.a")
]


@pytest.mark.parametrize(
    ("address", "allowed", "refused"),
    [
        ("127.0.0.1", (), OTHER_HOSTS),
        ("127.0.0.1", ("evil.example", "a"), OTHER_HOSTS[2:]),
        ("127.0.0.1", ("*",), []),
        ("0.0.0.0", (), []),  # behind names that only its operator knows
        ("0.0.0.0", ("a.example",), OTHER_HOSTS),
    ],
)
async def test_requests_for_other_hosts_are_refused_where_web_pages_could_send_them(
    gateway_of, address, allowed, refused
):
    """A page's name may be made to resolve to this address (DNS rebinding)."""
    gateway = await gateway_of(api=ApiConfig(allowed_hosts=allowed), host=address)
    for host in (*OWN_HOSTS, *OTHER_HOSTS):
        response = await gateway.client.get("/health", headers={"host": host})
        assert response.status_code == (403 if host in refused else 200), host
        if host in refused:
            assert "--allowed-hosts" in response.json()["error"]["message"]


async def test_a_port_that_is_handed_over_answers_each_client_once_more(gateway_of, monkeypatch):
    """Two connections are idle, one has not asked yet, and one reads a stream that began before."""
    monkeypatch.setattr(http_server, "LEAVE_S", 3.0)
    gateway = await gateway_of()
    where = "127.0.0.1", gateway.port

    async def ask(reader, writer):
        writer.write(GET + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        return head, await reader.readexactly(int(re.search(rb"length: (\d+)", head)[1]))

    async def asked(reader, writer):
        head, _ = await ask(reader, writer)
        assert b"connection: close" in head and not await reader.read()

    used, idle, new, streaming = [await asyncio.open_connection(*where) for _ in range(4)]
    for connection in (used, idle):
        assert b"connection: close" not in (await ask(*connection))[0]
    body = json.dumps({"prompt": [2] * 4, "max_tokens": 2, "stream": True, "ignore_eos": True})
    paused = []
    gateway.decode.runs = [lambda *run: paused.append(run)]
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
    streaming[1].write(post % (len(body), body.encode()))
    await streaming[0].readuntil(b"data: ")
    (leave,) = gateway.service.on_leave
    leaving = asyncio.create_task(leave())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*where)
    await asked(*used)
    await asked(*new)
    assert not await idle[0].read()
    gateway.decode.run_to_end(*paused[0])
    await streaming[0].readuntil(b"0\r\n\r\n")
    assert not leaving.done()
    await asked(*streaming)
    await leaving
    for _, writer in (used, idle, new, streaming):
        writer.close()


async def test_pipelined_requests_are_limited(gateway):
    for requests, answers in ((10, 10), (1000, 0)):
        heard = await said(gateway, (GET + b"\r\n") * (requests - 1) + CLOSE)
        assert heard.count(b"HTTP/1.1 200 ") == answers


def test_a_port_in_use_is_an_error_before_anything_starts():
    with listen("127.0.0.1", 0, "HTTP", "--http-port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} for HTTP.*--http-port"):
            frontend(RouterConfig(http_port=port))
    with pytest.raises(ConfigError, match=r"for HTTP: .*; --host must be an address of this"):
        listen("no.such.host.invalid", 0, "HTTP", "--http-port")


async def test_no_line_break_of_unicode_is_within_an_event(says):
    said, messages = "a\u2028b\u2029c\x85é", [{"role": "user", "content": "Hi"}]
    gateway = await says(said)
    for path, body, text_of in (
        ("completions", {"prompt": "Hi"}, lambda event: event["choices"][0]["text"]),
        ("chat/completions", {"messages": messages},
         lambda event: event["choices"][0]["delta"].get("content", "")),
        ("responses", {"input": "Hi"}, lambda event: event.get("delta", "")),
        ("messages", {"messages": messages, "max_tokens": 100},
         lambda event: event.get("delta", {}).get("text", "")),
    ):  # fmt: skip
        response = await gateway.post(f"/v1/{path}", {**body, "stream": True})
        lines = response.text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert "".join(text_of(json.loads(event)) for event in events) == said, path
        assert all(line == "" or line.startswith(("data: ", "event: ")) for line in lines), path


TEXTS = ["a", '"quoted"\\\n', "\u2028 é 🙂", "", "\x00\x7f", "<|end|>"]


@pytest.mark.parametrize("kind", [CompletionOutput, ChatOutput])
@pytest.mark.parametrize("usage", [{}, {"usage": None}])
def test_events_that_differ_in_their_text_alone_are_those_that_are_encoded(kind, usage):
    def events(token_ids):
        def event(choice):
            return msgspec.json.encode(
                kind.answer(
                    id='"":""', created=1, model='"m""', object=kind.chunk_object,
                    choices=[choice], **usage,
                )
            )  # fmt: skip

        sent = []
        output = kind(
            3, None, with_logprobs=False, with_token_ids=token_ids, event=event, send=sent.append
        )
        for text in TEXTS:
            output.put(Piece(text, [7]))
        output.put(Piece("end", [7], finish_reason=common_pb2.FINISH_REASON_STOP))
        return sent, output

    fast, with_fast = events(False)
    slow, with_slow = events(True)
    assert with_fast._text_template is not None and with_slow._text_template is None
    for event in (decoded := [msgspec.json.decode(event) for event in slow]):
        assert event["choices"][0].pop("token_ids") == [7]
    assert [msgspec.json.decode(event) for event in fast] == decoded


def positions(*tokens, top=()):
    def one(token_id, logprob):
        return common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)

    return [
        common_pb2.PositionLogprobs(chosen=one(token, -0.5), top=[one(*other) for other in top])
        for token in tokens
    ]


def output_of(kind, tokenizer):
    output = kind(0, tokenizer, with_logprobs=True, with_token_ids=False)
    return lambda positions: msgspec.to_builtins(output.logprobs(positions))


def test_logprobs_of_tokens_that_are_parts_of_characters(tmp_path):
    """An é of two tokens: each shows its byte, and the text is one character longer after both."""
    tokenizer = byte_tokenizer(tmp_path)
    first, second = tokenizer.encode("é")
    letter = tokenizer.encode("x")[0]
    logprobs = output_of(CompletionOutput, tokenizer)
    answer = logprobs(positions(first, second, letter, top=[(first, -0.25), (second, -9e9)]))
    assert answer["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert answer["text_offset"] == [0, 0, 1]
    assert answer["token_logprobs"] == [-0.5] * 3
    assert answer["top_logprobs"][2] == {"x": -0.5, "bytes:\\xc3": -0.25, "bytes:\\xa9": -9999.0}
    assert logprobs(positions(0))["text_offset"] == [2]
    assert logprobs(positions(0))["tokens"] == ["</s>"]
    (entry,) = output_of(ChatOutput, tokenizer)(positions(first, top=[(letter, -1.0)]))["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("bytes:\\xc3", [0xC3], -0.5)
    assert entry["top_logprobs"] == [{"token": "x", "logprob": -1.0, "bytes": [ord("x")]}]


async def test_a_model_without_text_works_with_token_ids(gateway_of, tmp_path):
    tokenizer = ids_only_tokenizer(tmp_path, vocab_size=300)
    gateway = await gateway_of(tokenizer=tokenizer)
    (choice,) = (await gateway.complete(return_token_ids=True)).json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [100, 101, 102, 103, 104])
    assert len(await gateway.events()) == 5
    response = await gateway.complete(prompt="text")
    assert rejected(response) == (400, "prompt")
    assert (await gateway.chat()).json()["error"]["param"] == "messages"
    names = output_of(CompletionOutput, tokenizer)(positions(7))["tokens"]
    assert names == ["token_id:7"]


async def test_the_page_at_the_root_may_run_its_own_script_and_call_this_server_alone(gateway):
    response = await gateway.client.get("/")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html")
    policy = response.headers["content-security-policy"]
    for tag in ("script", "style"):
        (part,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=\"(?!data:)|@import|url\(|//\w+\.", response.text)
    assert (await gateway.client.post("/")).status_code == 405


async def test_probes_of_other_servers_are_answered(gateway):
    for method in ("GET", "HEAD", "POST"):
        answer = await gateway.client.request(method, "/ping")
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await gateway.client.get("/load")).json() == {"server_load": 0}
    call, go_on = await gateway.begun_with_three_choices()
    assert (await gateway.client.get("/load")).json()["server_load"] > 0
    go_on.set()
    assert (await call).status_code == 200
    info = (await gateway.client.get("/tokenizer_info")).json()
    assert (info["model"], info["vocab_size"], info["eos_token_ids"]) == ("tiny", 257, [0])
    assert "m.content" in info["chat_template"] and info["max_model_len"] > 0
    unknown = await gateway.client.get("/tokenizer_info?model=none")
    assert unknown.status_code == 404
