"""Spans are stored in bounds and received from OpenTelemetry's own exporter, however late."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from baton.errors import DeadlineExceeded
from baton.local import ports
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore, is_complete
from baton.telemetry import span_export, tracing
from tests.waiting import WAIT_S


def span(trace_id, span_id, parent_id="", service="s"):
    return Span(trace_id, span_id, parent_id, "work", service, 1, 2)


def test_complete_needs_root_parents_and_services():
    root, child = span("t", "a", service="client"), span("t", "b", "a", service="router")
    grandchild = span("t", "c", "b", service="decode")
    assert is_complete([root])
    assert is_complete([root, child, grandchild], ["router", "decode"])
    for lacking in ([], [child], [root, grandchild]):
        assert not is_complete(lacking)
    # The caller's own span may be kept elsewhere.
    entry = replace(child, service="baton-router", is_entry=True)
    assert is_complete([entry, grandchild])
    assert not is_complete([entry, replace(grandchild, parent_id="d", is_entry=True)])
    assert not is_complete([root, child], ["router", "decode"])


async def test_traces_and_spans_are_bounded():
    store = SpanStore(max_traces=3, max_spans=5)
    store.add(span(trace, "a") for trace in "1234")
    assert not store.trace("1") and len(store) == 3
    store.add(span("5", str(i)) for i in range(4))  # 3 + 4 spans: too many by two
    assert [trace for trace in "2345" if store.trace(trace)] == ["4", "5"]
    assert store.spans_total == 5
    one = SpanStore(max_spans=5)  # an endless trace
    one.add([span("t", str(i)) for i in range(9)])
    one.add([span("t", "0")])  # sent again
    assert one.spans_total == len(one.trace("t")) == 5


async def test_a_trace_is_waited_for_in_bounded_time():
    store = SpanStore()
    waiting = asyncio.create_task(store.wait_for("t", timeout=WAIT_S))
    await asyncio.sleep(0)
    store.add([span("t", "b", "a"), span("other", "a")])
    await asyncio.sleep(0)
    assert not waiting.done()
    with pytest.raises(DeadlineExceeded, match="1 spans arrived"):
        await store.wait_for("t", timeout=0.01)
    store.add([span("t", "a")])
    assert {s.span_id for s in await waiting} == {"a", "b"}


async def test_receiver_takes_what_a_real_exporter_sends():
    """What is pending at the end is sent by `close`."""
    attributes = {"text": "x", "count": 3, "share": 0.5, "yes": True}
    async with OtlpReceiver(SpanStore()) as receiver:
        exporter = tracing.setup("client", receiver.address, {"service.instance.id": "abc"})
        with exporter.tracer.start_as_current_span("generate") as root:
            root.set_attributes({**attributes, "list": ["a", "b"]})
            with pytest.raises(ValueError), exporter.tracer.start_as_current_span("child"):
                raise ValueError("boom")
        await asyncio.to_thread(exporter.close)
        spans = receiver.store.trace(tracing.trace_id_of(root))
    child, parent = sorted(spans, key=lambda s: s.name)
    assert (parent.name, parent.service, parent.parent_id) == ("generate", "client", "")
    assert parent.attributes == {**attributes, "list": "a, b"}
    assert child.parent_id == parent.span_id
    assert parent.error is None and child.error is not None and "boom" in child.error
    assert parent.start_ns <= child.start_ns <= child.end_ns <= parent.end_ns


@pytest.mark.parametrize("comes", [True, False])
async def test_a_collector_may_be_late_or_never_come(comes, caplog, monkeypatch):
    """It delays no other and not the end; its absence is logged once, with the reason."""
    monkeypatch.setattr(span_export, "ATTEMPT_S", 0.5)
    monkeypatch.setattr(span_export, "_FIRST_DELAY_S", 0.1)
    store, port = SpanStore(), ports.free()
    async with OtlpReceiver(SpanStore()) as early, contextlib.AsyncExitStack() as stack:
        exporter = tracing.setup("client", f"{early.address}, http://127.0.0.1:{port}")
        roots = []
        for _ in range(3):
            with exporter.tracer.start_as_current_span("generate") as root:
                roots.append(tracing.trace_id_of(root))
            await early.store.wait_for(roots[-1], timeout=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while not caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        if comes:
            await stack.enter_async_context(OtlpReceiver(store, port))
            for trace_id in roots:
                await store.wait_for(trace_id, timeout=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await asyncio.to_thread(exporter.close)
    missing, *back = caplog.messages
    assert f"cannot export traces to http://127.0.0.1:{port}" in missing
    assert "UNAVAILABLE" in missing or "DEADLINE_EXCEEDED" in missing
    assert back == ([f"traces are exported to http://127.0.0.1:{port} again"] if comes else [])
