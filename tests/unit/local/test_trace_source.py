"""`baton trace` over real connections to a router and to where traces are kept, or to Jaeger."""

import asyncio
import copy
import json
import re
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton import cli
from baton.errors import InternalError, InvalidRequest, Unavailable
from baton.local import ports
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import ROUTER, Span, SpanStore, is_complete
from baton.local.trace_source import Jaeger, KeptTraces
from baton.local.trace_tree import entry_of, summaries
from baton.v1 import trace_pb2

from .statuses import Router, status

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
LONG, FIRST, UNKNOWN = "1" * 32, "2" * 32, "3" * 32
ATTRIBUTES = {"text": "x", "gen_ai.usage.input_tokens": 7, "share": 0.5, "yes": True, "no": False}
TIMEOUT_S = 30.0


def request(trace_id=TRACE, start_ms=0, took_ms=10, error=None):
    """A request's own span."""
    start_ns = start_ms * 1_000_000
    return Span(trace_id, "a" * 16, "", "router.generate", "baton-router", start_ns,
                start_ns + took_ms * 1_000_000, ATTRIBUTES, is_entry=True, error=error)  # fmt: skip


def below(parent_id="a" * 16, took_ms=9):
    return Span(TRACE, "b" * 16, parent_id, "decode", "baton-decode", 0, took_ms * 1_000_000,
                error="")  # fmt: skip


def exporting(otlp):
    """A router that says where its spans go."""
    return Router(status(address="r:1", otlp=otlp))


@pytest.fixture
async def receiver():
    async with OtlpReceiver(SpanStore(), quiet_s=0.3) as listening:
        yield listening


@pytest.fixture
async def trace(receiver, capsys):
    """Runs `baton trace` against a router whose spans go to `receiver`: status, output, errors."""
    async with exporting(f"{receiver.address},http://elsewhere:1") as router:

        async def run(*argv):
            exit_status = await asyncio.to_thread(
                cli.main, ["trace", "--target", router.address, *argv]
            )
            return exit_status, *capsys.readouterr()

        yield run


@pytest.mark.parametrize("text", [TRACE.upper(), "4bf92f35-77b3-4da6-a3ce-929d0e0e4736", "--last"])
async def test_a_trace_is_drawn_with_the_time_it_does_not_explain(receiver, trace, text):
    receiver.store.add([below(), request(error="gone")])
    exit_status, out, _ = await trace(text)
    assert exit_status == 0
    assert out.startswith(f"trace {TRACE}: 2 spans, 10.0 ms\n")
    assert "└─ ! decode  decode" in out
    assert out.endswith(
        "spans account for 90.0% of the request's 10.0 ms; longest gaps: 1.0 ms at 9.0\n"
    )
    exit_status, out, _ = await trace(text, "--json", "--from", receiver.address)
    shown = json.loads(out)
    assert (exit_status, shown["trace_id"], shown["accounted_share"]) == (0, TRACE, 0.9)
    spans = [Span(**span) for span in shown["spans"]]
    assert spans == [below(), request(error="gone")]  # as they were received


async def test_requests_are_listed_by_end_or_by_time_taken(receiver, trace):
    other = Span("4" * 32, "c" * 16, "", "other", "x", 0, 9_999_999_999)  # no request
    receiver.store.add([request(FIRST), request(LONG, 5, 500), other, below()])
    receiver.store.add([request(start_ms=600, took_ms=20, error="gone")])
    exit_status, out, _ = await trace()
    head, last, long, first = out.splitlines()
    titles = ["trace", "ended", "took ms", "tokens in", "out", "attempts", "spans", "failed"]
    assert (exit_status, re.split("  +", head)) == (0, titles)
    assert last.split()[0] == TRACE and last.endswith("gone")
    assert long.split()[:1] + long.split()[2:] == [LONG, "500.0", "7", "0", "0", "1"]
    assert first.split()[0] == FIRST
    _, out, _ = await trace("--slowest", "9", "--json")
    slowest = json.loads(out)["traces"]
    assert [one["trace_id"] for one in slowest] == [LONG, TRACE, FIRST]
    assert slowest[1] == {
        "trace_id": TRACE, "start_ns": 600_000_000, "took_ms": 20.0, "spans": 2, "error": "gone",
        "input_tokens": 7, "output_tokens": 0, "attempts": 0,
    }  # fmt: skip
    assert slowest[0]["error"] is None
    _, out, _ = await trace("--slowest", "1", "--json")
    assert json.loads(out)["traces"] == slowest[:1]


async def test_an_error_says_why_there_is_no_trace(receiver, trace):
    closed = f"127.0.0.1:{ports.free()}"
    async with exporting("") as router:
        silent = router.address
        for argv, why in (
            ([UNKNOWN], f"{receiver.address} has no trace {UNKNOWN}"),
            *(([text], f"'{text}' is no trace id: it has 32 hexadecimal digits")
              for text in ("not-an-id", TRACE[:-1], TRACE + "0", "g" * 32, "0" * 32)),
            ([TRACE, "--jaeger", "ftp://h"], "--jaeger ftp://h: not a URL"),
            ([TRACE, "--target", closed], f"no router answers at {closed}: start one with"),
            ([TRACE, "--target", silent], "the router at r:1 exports no traces"),
            ([TRACE, "--from", closed], f"nothing answers at {closed}"),
            ([TRACE, "--from", f"http://{silent}"], "not a `baton up` that keeps traces: if they "),
            *((argv, f"{receiver.address} keeps no trace of a request yet")
              for argv in ([], ["--last"], ["--slowest", "3"])),
        ):  # fmt: skip
            exit_status, out, error = await trace("--timeout", "0.8", *argv)
            assert (exit_status, out) == (1, "")
            assert error.startswith("baton: error: ") and why in error
    assert await trace("--json") == (0, '{"traces": []}\n', "")
    with pytest.raises(InvalidRequest, match="32 hexadecimal"):
        await asyncio.to_thread(KeptTraces(receiver.address).traces, "xyz", TIMEOUT_S)


@pytest.mark.parametrize("spans", [[below(), request()], [request(), below()]])
async def test_a_trace_is_waited_for_until_it_is_whole_and_quiet(receiver, spans):
    """Its request has ended a moment ago: spans are on their way, named by others or not."""
    asking = asyncio.create_task(
        asyncio.to_thread(KeptTraces(receiver.address).traces, TRACE, TIMEOUT_S)
    )
    for span in spans:
        await asyncio.sleep(0.1)
        assert not asking.done()
        receiver.store.add([span])
    assert await asking == [spans]


@pytest.mark.parametrize("spans", [[request()], [request(), below(parent_id="c" * 16)]])
async def test_an_old_trace_comes_at_once(spans, monkeypatch):
    """Whole or not; it would not in an hour, if it was waited for from now on."""
    store = SpanStore()
    store.add(spans)
    monkeypatch.setattr(store, "arrived_at", lambda trace_id: time.monotonic() - 60)
    asked = trace_pb2.ReadTracesRequest(trace_id=TRACE, wait_ms=3_600_000)
    async with asyncio.timeout(TIMEOUT_S):
        (answer,) = [
            one async for one in OtlpReceiver(store, quiet_s=3600.0).ReadTraces(asked, None)
        ]
    assert len(answer.spans) == len(spans)


BASE_US = 1729181197748000


def jaeger_span(name, ids, process, start_us, took_us, kind="internal", follows="", **tags):
    """A span as Jaeger's API has it; `ids` is "parent/id", `follows` the id of a link."""
    parent, own = ids.split("/")
    ways = [("FOLLOWS_FROM", follows)] * bool(follows) + [("CHILD_OF", parent)]
    types = {str: "string", bool: "bool", float: "float64"}
    return {
        "traceID": TRACE, "spanID": own, "operationName": name, "processID": process,
        "references": [{"refType": way, "traceID": TRACE, "spanID": one} for way, one in ways],
        "startTime": BASE_US + start_us, "duration": took_us, "logs": [], "warnings": None,
        "tags": [
            {"key": key, "type": types.get(type(value), "int64"), "value": value}
            for key, value in {"span.kind": kind, "internal.span.format": "otlp", **tags}.items()
        ],
    }  # fmt: skip


FAILURE = {"otel.status_code": "ERROR", "otel.status_description": "the event stream broke"}
TOKENS = {"gen_ai.usage.input_tokens": 717, "gen_ai.usage.output_tokens": 40}
SPANS = [
    jaeger_span("router.generate", "53ce929d0e0e4736/r", "p1", 0, 587500, "server", **TOKENS),
    jaeger_span("router.attempt", "r/a1", "p1", 4100, 200000, **FAILURE),
    jaeger_span("router.attempt", "r/a2", "p1", 210000, 377000),
    jaeger_span("decode", "a2/d", "p2", 211000, 375500, "server", end="length"),
    jaeger_span("decode.run", "d/run", "p2", 330700, 255500, follows="kv"),
    jaeger_span("prefill", "a2/p", "p3", 212000, 110000),
    jaeger_span("kv.transfer", "p/kv", "p3", 231300, 82000, bytes=2936832, gb_per_s=0.7439),
]
SPANS[-1]["tags"][2]["value"] = "2936832"  # Jaeger writes 64-bit integers as text
PROCESSES = {f"p{i}": {"serviceName": f"baton-{name}", "tags": []}
             for i, name in enumerate(("router", "decode", "prefill"), 1)}  # fmt: skip
ANSWER = {"data": [{"traceID": TRACE, "spans": SPANS, "processes": PROCESSES}], "errors": None}
NOT_FOUND = {"data": None, "total": 0, "limit": 0, "offset": 0,
             "errors": [{"code": 404, "msg": "trace not found"}]}  # fmt: skip
BASE_NS = BASE_US * 1000


class JaegerServer(TestServer):
    """Answers each path with (status, body), and keeps what was asked."""

    __test__ = False

    def __init__(self):
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        super().__init__(app)
        self.answers = {f"/api/traces/{TRACE}": (200, json.dumps(ANSWER))}
        self.asked = []

    async def answer(self, request):
        self.asked.append(request)
        status, text = self.answers.get(request.path, (404, json.dumps(NOT_FOUND)))
        return web.Response(status=status, text=text)

    async def traces(self, trace_id, path=""):
        source = Jaeger(str(self.make_url(path)), 300)
        return await asyncio.to_thread(source.traces, trace_id, TIMEOUT_S)


@pytest.fixture
async def jaeger():
    async with JaegerServer() as server:
        yield server


async def test_a_trace_out_of_jaeger_is_drawn(jaeger, capsys):
    argv = ["trace", TRACE, "--jaeger", str(jaeger.make_url(""))]
    assert await asyncio.to_thread(cli.main, argv) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith(f"trace {TRACE}: 7 spans, 587.5 ms\n")
    for part in (
        "\n├─ ! router  router.attempt ", "error=the event stream broke\n",
        "\n      └─ prefill  kv.transfer ", "bytes=2.8 MiB gb_per_s=0.7439\n",
        "spans account for 91.5% of the request's 587.5 ms; longest gaps: 27.2 ms at 204.1, ",
    ):  # fmt: skip
        assert part in drawn
    (spans,) = await jaeger.traces(TRACE)
    assert is_complete(spans)
    entry = entry_of(spans)
    assert (entry.start_ns, entry.end_ns) == (BASE_NS, BASE_NS + 587_500_000)
    assert entry.parent_id == "53ce929d0e0e4736"  # the client's, which is not in Jaeger
    assert entry.attributes["gen_ai.usage.input_tokens"] == 717
    transfer = next(span for span in spans if span.name == "kv.transfer")
    assert transfer.attributes["bytes"] == 2936832  # as text in the answer


async def test_a_base_path_and_an_id_without_its_zeros(jaeger):
    answer, trace_id = copy.deepcopy(ANSWER), "00" + TRACE[2:]
    for span in answer["data"][0]["spans"]:
        span["traceID"] = trace_id.lstrip("0")
        for reference in span["references"]:
            reference["traceID"] = trace_id.lstrip("0")
    jaeger.answers["/jaeger/api/traces/" + trace_id] = (200, json.dumps(answer))
    (spans,) = await jaeger.traces(trace_id, "/jaeger/")
    assert {span.trace_id for span in spans} == {trace_id}
    assert is_complete(spans)


async def test_requests_in_jaeger_are_listed(jaeger):
    second = json.loads(json.dumps(ANSWER["data"][0]).replace(TRACE, FIRST))
    for span in second["spans"]:
        span["startTime"] -= 5_000_000
    second["spans"][0]["duration"] = 900_000
    other = {"traceID": UNKNOWN, "spans": [], "processes": {}}
    jaeger.answers["/api/traces"] = (200, json.dumps({"data": [second, *ANSWER["data"], other]}))

    traces = await jaeger.traces("")
    assert [one.trace_id for one in summaries(traces, False, 20)] == [TRACE, FIRST]
    assert [one.trace_id for one in summaries(traces, True, 1)] == [FIRST]
    asked = jaeger.asked[0].query
    assert (asked["service"], asked["limit"]) == (ROUTER, "300")
    assert int(asked["end"]) > int(asked["start"])
    (last,) = summaries(traces, False, 1)
    assert (last.attempts, last.input_tokens, last.output_tokens) == (2, 717, 40)


@pytest.mark.parametrize(
    ("status", "body", "error", "why"),
    [
        (500, "{}", Unavailable, "answers 500"),
        (404, "<html>nothing here</html>", Unavailable, "answers 404"),
        (200, "<html>a page</html>", InternalError, "is it Jaeger"),
        (200, "[]", InternalError, "not an answer of Jaeger"),
        (200, '{"data": [{"spans": [{"spanID": "x"}], "processes": {}}]}', InternalError,
         "not a trace"),
    ],
)  # fmt: skip
async def test_other_answers_than_jaegers_are_errors(jaeger, status, body, error, why):
    jaeger.answers[f"/api/traces/{TRACE}"] = (status, body)
    with pytest.raises(error, match=why):
        await jaeger.traces(TRACE)


async def test_an_unknown_trace_has_no_spans_and_a_closed_port_is_an_error(jaeger):
    assert await jaeger.traces(LONG) == []
    jaeger.answers["/api/traces/" + FIRST] = (200, json.dumps({"data": []}))
    assert await jaeger.traces(FIRST) == []
    closed = Jaeger(str(jaeger.make_url("")))
    await jaeger.close()
    with pytest.raises(Unavailable, match="does not answer"):
        await asyncio.to_thread(closed.traces, TRACE, TIMEOUT_S)
