"""Reading traces where a local cluster keeps them, over a real connection."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton import rpc
from baton.errors import InvalidRequest, Unavailable
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore
from baton.local.trace_source import KeptTraces, kept_by
from baton.v1 import fleet_pb2, fleet_pb2_grpc, trace_pb2

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ATTRIBUTES = {"text": "x", "whole": 7, "share": 0.5, "yes": True, "no": False}
TIMEOUT_S = 30.0


def request(trace_id: str = TRACE, start_ms: int = 0, took_ms: int = 10, **fields: Any) -> Span:
    """A request's own span."""
    start_ns = start_ms * 1_000_000
    known = {"attributes": ATTRIBUTES, "is_entry": True}
    return Span(trace_id, "a" * 16, "", "router.generate", "baton-router", start_ns,
                start_ns + took_ms * 1_000_000, **{**known, **fields})  # fmt: skip


def below(trace_id: str = TRACE, parent_id: str = "a" * 16) -> Span:
    return Span(trace_id, "b" * 16, parent_id, "decode", "baton-decode", 0, 1, error="")


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    async with OtlpReceiver(SpanStore()) as listening:
        yield listening


async def trace_of(address: str, trace_id: str = TRACE) -> list[Span]:
    return list(await asyncio.to_thread(KeptTraces(address).trace, trace_id, TIMEOUT_S))


@pytest.mark.parametrize("spans", [[below(), request()], [request(), below()]])
async def test_a_trace_is_waited_for_until_it_is_whole_and_quiet(
    receiver: OtlpReceiver, spans: list[Span]
) -> None:
    """Its request has ended a moment ago: spans are on their way, named by others or not."""
    asking = asyncio.create_task(trace_of(receiver.address))
    for span in spans:
        await asyncio.sleep(0.3)
        assert not asking.done()
        receiver.store.add([span])
    assert await asking == spans


@pytest.mark.parametrize("spans", [[request()], [request(), below(parent_id="c" * 16)]])
async def test_an_old_trace_comes_at_once(
    spans: list[Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole or not; it would not in an hour, if it was waited for from now on."""
    store = SpanStore()
    store.add(spans)
    monkeypatch.setattr(store, "arrived_at", lambda trace_id: time.monotonic() - 60)
    asked = trace_pb2.GetTraceRequest(trace_id=TRACE, wait_ms=3_600_000)
    async with asyncio.timeout(TIMEOUT_S):
        answer = await OtlpReceiver(store, quiet_s=3600.0).GetTrace(asked, None)
    assert len(answer.spans) == len(spans)


async def test_requests_are_listed_by_end_or_by_time_taken(receiver: OtlpReceiver) -> None:
    first, long, last = (digit * 32 for digit in "123")
    receiver.store.add(
        [
            request(first, 0, 10, error="gone"),
            request(long, 5, 500),
            request(last, 600, 20, attributes={"gen_ai.usage.output_tokens": 3}),
            Span("4" * 32, "c" * 16, "", "other", "x", 0, 9_999_999_999),  # no request
        ]
    )

    async def listed(slowest: bool, most: int) -> list[trace_pb2.TraceSummary]:
        source = KeptTraces(receiver.address)
        return list(await asyncio.to_thread(source.summaries, slowest, most, TIMEOUT_S))

    by_end, by_time = await listed(False, 20), await listed(True, 20)
    assert [one.trace_id for one in by_end] == [last, long, first]
    assert [one.trace_id for one in by_time] == [long, last, first]
    assert await listed(True, 1) == by_time[:1]
    assert [one.HasField("error") for one in by_end] == [False, False, True]
    assert (by_end[0].output_tokens, by_end[0].took_ms, by_end[0].spans) == (3, 20.0, 1)


class Router(fleet_pb2_grpc.FleetServiceServicer):
    """Its status says where its spans go."""

    def __init__(self, otlp: str) -> None:
        self._otlp = otlp

    async def GetStatus(self, request: Any, context: Any) -> fleet_pb2.GetStatusResponse:
        router = fleet_pb2.RouterStatus(address="r:1", otlp=self._otlp)
        return fleet_pb2.GetStatusResponse(router=router)


@contextlib.asynccontextmanager
async def routing(otlp: str) -> AsyncIterator[str]:
    """A router's address."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(Router(otlp), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_router_says_where_its_traces_are(receiver: OtlpReceiver) -> None:
    receiver.store.add([request(), below()])
    async with routing(receiver.address) as target:
        source = await asyncio.to_thread(kept_by, target, TIMEOUT_S)
        spans = await asyncio.to_thread(source.trace, TRACE, TIMEOUT_S)
    assert spans == [request(), below()]
    async with routing("") as target:
        with pytest.raises(Unavailable, match="r:1 exports no traces"):
            await asyncio.to_thread(kept_by, target, TIMEOUT_S)


async def test_where_no_traces_are_is_an_error(receiver: OtlpReceiver) -> None:
    with pytest.raises(InvalidRequest, match="32 hexadecimal"):
        await trace_of(receiver.address, "xyz")
    async with routing("") as target:
        with pytest.raises(Unavailable, match=r"not a `baton up` that keeps traces.*--jaeger"):
            await trace_of(f"http://{target}")
    with pytest.raises(Unavailable, match="nothing answers at"):
        await trace_of(target)
