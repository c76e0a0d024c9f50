"""`baton trace` over real connections to a router and to where traces are kept."""

import asyncio
import json
import re
import time

import pytest

from baton.cli import main as cli
from baton.errors import InvalidRequest, Unauthenticated
from baton.local import ports
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore
from baton.local.trace_source import KeptTraces, kept_by
from baton.v1 import trace_pb2
from tests.waiting import WAIT_S

from .statuses import Router, status

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
LONG, FIRST, UNKNOWN = "1" * 32, "2" * 32, "3" * 32
ATTRIBUTES = {"text": "x", "gen_ai.usage.input_tokens": 7, "share": 0.5, "yes": True, "no": False}
TIMEOUT_S = WAIT_S


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
            ([TRACE, "--target", closed], f"no router answers at {closed}: start one with"),
            ([TRACE, "--target", silent], "the router at r:1 exports no traces"),
            ([TRACE, "--from", closed], f"nothing answers at {closed}"),
            ([TRACE, "--from", f"http://{silent}"], "not a `baton up` that keeps traces: look "),
            *((argv, f"{receiver.address} has no trace of a request yet")
              for argv in ([], ["--last"], ["--slowest", "3"])),
        ):  # fmt: skip
            exit_status, out, error = await trace("--timeout", "0.8", *argv)
            assert (exit_status, out) == (1, "")
            assert error.startswith("baton: error: ") and why in error
    assert await trace("--json") == (0, '{"traces": []}\n', "")
    with pytest.raises(InvalidRequest, match="32 hexadecimal"):
        await asyncio.to_thread(KeptTraces(receiver.address).traces, "xyz", TIMEOUT_S)


@pytest.mark.parametrize("given", [True, False])
async def test_the_key_goes_to_where_baton_up_listens_and_to_no_collector(
    given, capsys, monkeypatch
):
    """0.0.0.0 reaches this machine, but is an address as any other."""
    monkeypatch.setenv("BATON_API_KEY", "operator")
    shown = []

    def authorize(method, context):
        keys = [value for name, value in context.invocation_metadata() if name == "authorization"]
        shown.append(keys)
        if not keys:
            raise Unauthenticated("a key is needed")

    async def trace(otlp):
        shown.clear()
        async with exporting(otlp) as router:
            argv = ["--from", otlp] if given else ["--target", router.address]
            await asyncio.to_thread(cli.main, ["trace", *argv])
        return shown, capsys.readouterr().err

    async with OtlpReceiver(SpanStore(), authorize=authorize) as listening:
        port = listening.address.rpartition(":")[2]
        for address in (listening.address, f"http://localhost:{port}"):
            assert (await trace(address))[0] == [["Bearer operator"]]
        seen, error = await trace(f"http://0.0.0.0:{port}")
        assert seen == [[]] and f"http://0.0.0.0:{port} gets no API key" in error


@pytest.mark.parametrize("otlp", ["https://collector:4317", "http://127.0.0.1@collector:4317"])
async def test_a_collector_with_tls_gets_no_key_either(otlp):
    async with exporting(otlp) as router:
        source = await asyncio.to_thread(kept_by, router.address, "operator", TIMEOUT_S)
    assert source.name == otlp and source._metadata == ()
    assert KeptTraces("https://mine:4317", "operator")._metadata  # where the user says so


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
