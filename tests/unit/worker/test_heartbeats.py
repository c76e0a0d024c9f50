"""Heartbeats of a worker, and whether its engine makes progress."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import InternalError
from baton.registry.memory import MemoryStore
from baton.v1 import common_pb2, decode_pb2, worker_pb2
from baton.worker import node
from baton.worker.node import Node
from tests.unit.worker.running import PATIENCE_S, Failing, Paced, Router, Worker, prompt, spec


async def test_watch_sends_heartbeats_with_the_age_of_a_step_that_hangs(
    directory: Path, store: MemoryStore
) -> None:
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        paced = Paced(worker)
        updates = worker.worker.Watch(worker_pb2.WatchRequest(heartbeat_ms=60))
        first = await asyncio.wait_for(updates.read(), PATIENCE_S)
        assert (first.cache.cleared, first.load.step_age_ms) == (True, 0)
        await router.reserve(spec("a", prompt(20)), local=20)
        await asyncio.to_thread(paced.begun.wait, PATIENCE_S)
        ages = [0.0]
        while len(ages) < 5 or ages[-5] == 0.0:
            message = await asyncio.wait_for(updates.read(), PATIENCE_S)
            assert message.state == common_pb2.WORKER_STATE_READY
            ages.append(message.load.step_age_ms)
        assert ages == sorted(ages)
        described = await worker.worker.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
        assert described.load.step_age_ms >= ages[-1]
        paced.allow.release(99)
        await router.tokens("a")
        while (await asyncio.wait_for(updates.read(), PATIENCE_S)).load.step_age_ms:
            pass
        updates.cancel()


async def test_a_watch_that_asks_for_none_gets_none(directory: Path, store: MemoryStore) -> None:
    async with Worker("prefill", directory, store) as worker:
        silent = worker.worker.Watch(worker_pb2.WatchRequest())
        lively = worker.worker.Watch(worker_pb2.WatchRequest(heartbeat_ms=60))
        await asyncio.wait_for(silent.read(), PATIENCE_S)
        no_update = asyncio.create_task(silent.read())
        for _ in range(5):
            await asyncio.wait_for(lively.read(), PATIENCE_S)
        assert not no_update.done()
        worker.node._stop.set()
        assert (await asyncio.wait_for(no_update, PATIENCE_S)).state == (
            common_pb2.WORKER_STATE_DRAINING
        )


async def test_an_event_stream_sends_empty_messages_between_events(
    directory: Path, store: MemoryStore
) -> None:
    empty = decode_pb2.StreamEventsResponse()
    async with (
        Worker("decode", directory, store) as worker,
        Router(worker, heartbeat_ms=60) as lively,
        Router(worker, "silent") as silent,
    ):
        await lively.reserve(spec("a", prompt(20)), local=20)
        await silent.reserve(spec("b", prompt(20)), local=20)
        assert len(await lively.tokens("a")) == len(await silent.tokens("b")) == 4
        for _ in range(3):
            await lively.heartbeat()
        assert empty not in silent.messages


async def test_health_says_when_a_step_stalls_and_when_it_has_ended(
    directory: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "STALL_MIN_S", 0.05)
    answer = health_pb2.HealthCheckResponse
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        paced = Paced(worker)
        updates = health_pb2_grpc.HealthStub(worker.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await asyncio.wait_for(updates.read(), PATIENCE_S)).status == answer.SERVING
        await router.reserve(spec("a", prompt(20), max_tokens=1), local=20)
        assert (await asyncio.wait_for(updates.read(), PATIENCE_S)).status == answer.NOT_SERVING
        monkeypatch.setattr(node, "STALL_MIN_S", math.inf)
        paced.allow.release()
        assert (await asyncio.wait_for(updates.read(), PATIENCE_S)).status == answer.SERVING
        await router.tokens("a")
        updates.cancel()


async def test_a_worker_whose_steps_keep_failing_gives_all_back_and_ends(
    directory: Path, store: MemoryStore
) -> None:
    worker, reasons = Worker("decode", directory, store), []
    with pytest.raises(InternalError, match=r"in a row failed.*out of memory"):
        async with worker, Router(worker) as router:
            Failing(worker)
            await router.reserve(spec("reserved", prompt(20, start=9)))
            for name in "abc":
                await router.reserve(spec(name, prompt(20)), local=20)
                reasons.append((await router.event(name)).abort_reason)
            reasons.append((await router.event("reserved")).abort_reason)
            await asyncio.wait_for(asyncio.shield(worker.life), PATIENCE_S)
    # Asserted out here, because the worker's own failure hides any other one in there.
    assert ["out of memory" in reason for reason in reasons] == [True, True, True, False]
    assert "draining" in reasons[3]
    assert not store.entries


async def test_what_runs_is_given_back_even_if_serving_fails(
    directory: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(node: Node, drain_s: float) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Node, "_finish_work", broken)
    worker, reasons = Worker("decode", directory, store), []
    with pytest.raises(RuntimeError, match="broken"):
        async with worker, Router(worker) as router:
            await router.reserve(spec("a", prompt(20)))
            worker.node._stop.set()
            reasons.append((await router.event("a")).abort_reason)
            await asyncio.wait_for(asyncio.shield(worker.life), PATIENCE_S)
    assert reasons == ["the decode worker is draining"]
    assert not worker.spans.open
    assert worker.node.engine.ended.done()


async def test_a_step_that_never_ends_does_not_keep_the_worker(
    directory: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.worker.node.CLOSE_GRACE_S", 0.2)
    worker = Worker("decode", directory, store, drain_s=0.1, transfer_timeout_s=0.1)
    reasons = []
    async with worker, Router(worker) as router:
        paced = Paced(worker)
        await router.reserve(spec("a", prompt(20)), local=20)
        await asyncio.to_thread(paced.begun.wait, PATIENCE_S)
        worker.node._stop.set()
        reasons.append((await router.event("a")).abort_reason)
        # 0.1 s to drain, 0.3 s to close, and slack
        await asyncio.wait_for(worker.node._drained.wait(), 3.0)
        paced.allow.release(9)
    assert reasons == ["the decode worker is draining"]
