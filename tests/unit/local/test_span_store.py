"""SpanStore's bounds and waits, and the receiver with OpenTelemetry's own exporter."""

import asyncio
from collections.abc import Sequence

import pytest

from baton import telemetry
from baton.errors import DeadlineExceeded
from baton.local import ports
from baton.local.otlp import OtlpReceiver
from baton.local.span_store import Span, SpanStore, is_complete


def span(trace_id: str, span_id: str, parent_id: str = "", service: str = "s") -> Span:
    return Span(trace_id, span_id, parent_id, "work", service, 1, 2)


def test_complete_needs_root_parents_and_services() -> None:
    root, child = span("t", "a", service="client"), span("t", "b", "a", service="router")
    grandchild = span("t", "c", "b", service="decode")
    assert is_complete([root])
    assert not is_complete([])
    assert not is_complete([child])  # no root
    assert not is_complete([root, grandchild])  # b is referred to and missing
    assert is_complete([root, child, grandchild], ["router", "decode"])
    assert not is_complete([root, child], ["router", "decode"])


async def test_oldest_traces_go_first() -> None:
    store = SpanStore(max_traces=3, max_spans=5)
    store.add(span(trace, "a") for trace in "1234")
    assert not store.trace("1")
    assert len(store) == 3
    store.add(span("5", str(i)) for i in range(4))  # 3 + 4 spans: too many by two
    assert [trace for trace in "2345" if store.trace(trace)] == ["4", "5"]
    assert store.spans_total == 5


async def test_one_endless_trace_is_bounded_and_resent_spans_count_once() -> None:
    store = SpanStore(max_spans=5)
    store.add([span("t", str(i)) for i in range(9)])
    store.add([span("t", "0")])
    assert store.spans_total == len(store.trace("t")) == 5


async def test_wait_wakes_on_the_last_span() -> None:
    store = SpanStore()
    waiting = asyncio.create_task(store.wait_for("t", timeout=5))
    await asyncio.sleep(0)
    store.add([span("t", "b", "a"), span("other", "a")])
    await asyncio.sleep(0)
    assert not waiting.done()
    store.add([span("t", "a")])
    assert {s.span_id for s in await waiting} == {"a", "b"}


async def test_wait_gives_up_and_says_what_came() -> None:
    store = SpanStore()
    store.add([span("t", "b", "a")])
    with pytest.raises(DeadlineExceeded, match="1 spans arrived"):
        await store.wait_for("t", timeout=0.01)


async def test_follow_tells_a_trace_once_it_is_quiet() -> None:
    store, told = SpanStore(), asyncio.Queue[int]()

    def on_quiet(spans: Sequence[Span]) -> bool:
        told.put_nowait(len(spans))
        return len(spans) > 2

    store.follow(on_quiet, quiet_s=0.02)
    async with asyncio.timeout(5):
        store.add([span("t", "a")])
        store.add([span("t", "b", "a")])  # restarts the clock: told once, with both
        assert await told.get() == 2
        store.add([span("t", "c", "a")])
        assert await told.get() == 3
        store.add([span("t", "d", "a")])  # it had enough of this one
        store.add([span("u", str(i)) for i in range(4)])
        assert await told.get() == 4
    store.close()
    assert told.empty()


async def test_receiver_takes_what_a_real_exporter_sends() -> None:
    store = SpanStore()
    async with OtlpReceiver(store) as receiver:
        exporter = telemetry.setup("client", receiver.address)
        with exporter.tracer.start_as_current_span("generate") as root:
            root.set_attributes({"text": "x", "count": 3, "share": 0.5, "yes": True})
            root.set_attribute("list", ["a", "b"])
            with pytest.raises(ValueError), exporter.tracer.start_as_current_span("child"):
                raise ValueError("boom")
        spans = await store.wait_for(telemetry.trace_id_of(root), timeout=10)
        await asyncio.to_thread(exporter.close)
    child, parent = sorted(spans, key=lambda s: s.name)
    assert (parent.name, parent.service, parent.parent_id) == ("generate", "client", "")
    assert parent.attributes == {
        "text": "x",
        "count": 3,
        "share": 0.5,
        "yes": True,
        "list": "a, b",
    }
    assert child.parent_id == parent.span_id
    assert parent.error is None
    assert child.error is not None and "boom" in child.error
    assert parent.start_ns <= child.start_ns <= child.end_ns <= parent.end_ns


async def test_a_late_collector_gets_its_traces_and_the_log_says_once_who_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, port = SpanStore(), ports.free()
    async with OtlpReceiver(SpanStore()) as early:
        exporter = telemetry.setup("client", f"{early.address}, http://127.0.0.1:{port}")
        roots = []
        for _ in range(3):
            with exporter.tracer.start_as_current_span("generate") as root:
                roots.append(telemetry.trace_id_of(root))
            await early.store.wait_for(roots[-1], timeout=10)  # one that is missing delays no other
        async with asyncio.timeout(20):
            while not caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with OtlpReceiver(store, port):
            for trace_id in roots:
                await store.wait_for(trace_id, timeout=20)
            await asyncio.to_thread(exporter.close)
    missing, back = caplog.messages
    assert f"no traces reach http://127.0.0.1:{port}" in missing and "UNAVAILABLE" in missing
    assert f"traces reach http://127.0.0.1:{port} now" in back


async def test_a_collector_that_never_comes_does_not_delay_the_end() -> None:
    exporter = telemetry.setup("client", f"http://127.0.0.1:{ports.free()}")
    exporter.tracer.start_span("generate").end()
    async with asyncio.timeout(15):
        await asyncio.to_thread(exporter.close)
