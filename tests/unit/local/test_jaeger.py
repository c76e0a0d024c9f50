"""Traces out of Jaeger: the JSON its HTTP API answers with, over a real connection."""

import asyncio
import copy
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton import cli
from baton.errors import InternalError, Unavailable
from baton.local.span_store import ROUTER, is_complete
from baton.local.trace_source import Jaeger
from baton.local.trace_tree import entry_of, summaries

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ANSWER = json.loads(Path(__file__).with_name("jaeger_trace.json").read_text())
UNKNOWN = {"data": None, "total": 0, "limit": 0, "offset": 0,
           "errors": [{"code": 404, "msg": "trace not found"}]}  # fmt: skip
TIMEOUT_S = 30.0
BASE_NS = 1729181197748000 * 1000

TREE = """\
trace 4bf92f3577b34da6a3ce929d0e0e4736: 8 spans, 587.5 ms
service  span                                               start     took ms
router  router.generate                                       0.0    587.5 ms |████████████████████|
│  request_id=673a2741b66149cc usage.input_tokens=717 usage.output_tokens=40
├─ router  router.admit                                       0.2      2.4 ms |█                   |
├─ ! router  router.attempt                                   4.1    200.0 ms |███████             |
│     error=the event stream broke
└─ router  router.attempt                                   210.0    377.0 ms |       █████████████|
   ├─ decode  decode                                        211.0    375.5 ms |       █████████████|
   │  │  end=length
   │  └─ decode  decode.run                                 330.7    255.5 ms |           █████████|
   └─ prefill  prefill                                      212.0    110.0 ms |       ████         |
      │  prompt_tokens=717
      └─ prefill  kv.transfer                               231.3     82.0 ms |       ████         |
            bytes=2.8 MiB gb_per_s=0.7439
spans account for 91.9% of the request's 587.5 ms; longest gaps: 27.2 ms at 204.1, 17.4 ms at 313.3,
1.5 ms at 2.6"""


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
        status, text = self.answers.get(request.path, (404, json.dumps(UNKNOWN)))
        return web.Response(status=status, text=text)

    async def traces(self, trace_id, path=""):
        source = Jaeger(str(self.make_url(path)), 300)
        return await asyncio.to_thread(source.traces, trace_id, TIMEOUT_S)


@pytest.fixture
async def jaeger():
    async with JaegerServer() as server:
        yield server


async def test_a_trace_is_drawn_as_one_of_ours(jaeger, capsys):
    argv = ["trace", TRACE, "--jaeger", str(jaeger.make_url(""))]
    assert await asyncio.to_thread(cli.main, argv) == 0
    assert capsys.readouterr().out == f"{TREE}\n"
    (spans,) = await jaeger.traces(TRACE)
    assert is_complete(spans)
    entry = entry_of(spans)
    assert entry is not None
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


async def test_requests_are_listed(jaeger):
    second = json.loads(json.dumps(ANSWER["data"][0]).replace(TRACE, "2" * 32))
    for span in second["spans"]:
        span["startTime"] -= 5_000_000
    second["spans"][0]["duration"] = 900_000
    other = {"traceID": "3" * 32, "spans": [], "processes": {}}
    jaeger.answers["/api/traces"] = (200, json.dumps({"data": [second, *ANSWER["data"], other]}))

    traces = await jaeger.traces("")
    assert [one.trace_id for one in summaries(traces, False, 20)] == [TRACE, "2" * 32]
    assert [one.trace_id for one in summaries(traces, True, 1)] == ["2" * 32]
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
async def test_other_answers_are_errors(jaeger, status, body, error, why):
    jaeger.answers[f"/api/traces/{TRACE}"] = (status, body)
    with pytest.raises(error, match=why):
        await jaeger.traces(TRACE)


async def test_an_unknown_trace_has_no_spans_and_a_closed_port_is_an_error(jaeger):
    assert await jaeger.traces("1" * 32) == []
    jaeger.answers["/api/traces/" + "2" * 32] = (200, json.dumps({"data": []}))
    assert await jaeger.traces("2" * 32) == []
    closed = Jaeger(str(jaeger.make_url("")))
    await jaeger.close()
    with pytest.raises(Unavailable, match="does not answer"):
        await asyncio.to_thread(closed.traces, TRACE, TIMEOUT_S)
