"""A worker from STARTING over READY and DRAINING to its end; and what each caller sees of it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import rpc
from baton.errors import ConfigError, InternalError, Unavailable
from baton.registry.memory import MemoryRegistry, MemoryStore
from baton.v1 import common_pb2, worker_pb2
from tests.unit.worker.running import PATIENCE_S, Router, Worker, prompt, spec


async def states(store: MemoryStore, seen: list[str]) -> None:
    """Notes every state of the one member, and at last "gone"."""
    async with MemoryRegistry(store).watch() as membership:
        async for records in membership.changes():
            if records:
                seen.append(common_pb2.WorkerState.Name(next(iter(records.values())).state))
            elif seen:
                seen.append("gone")
                return


async def test_the_registry_sees_each_state(directory: Path, store: MemoryStore) -> None:
    seen: list[str] = []
    watching = asyncio.create_task(states(store, seen))
    async with Worker("decode", directory, store):
        pass
    await asyncio.wait_for(watching, PATIENCE_S)
    names = [name.removeprefix("WORKER_STATE_") for name in seen]
    assert names == ["STARTING", "READY", "DRAINING", "gone"]


async def test_it_describes_itself(directory: Path, store: MemoryStore) -> None:
    async with Worker("prefill", directory, store) as worker:
        answer = await worker.worker.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
    assert answer.record.incarnation == "prefill-0"
    assert answer.record.role == common_pb2.WORKER_ROLE_PREFILL
    assert answer.record.blocks_total == answer.load.blocks_total == 16
    assert answer.record.max_context == 255
    assert answer.record.chunk_tokens == worker.config.engine.chunk_tokens == 32
    assert list(answer.record.transports) == [common_pb2.TRANSPORT_SHM]
    assert answer.record.pid == os.getpid()


async def test_health_follows_readiness(directory: Path, store: MemoryStore) -> None:
    answer = health_pb2.HealthCheckResponse
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        health = health_pb2_grpc.HealthStub(worker.channel)
        updates = health.Watch(health_pb2.HealthCheckRequest())
        assert (await updates.read()).status == answer.SERVING
        await router.reserve(spec("a", prompt(20)))  # keeps it from having drained at once
        drain = worker.worker.Drain(worker_pb2.DrainRequest())
        assert (await updates.read()).status == answer.NOT_SERVING
        await router.cancel("a")
        await asyncio.wait_for(drain, PATIENCE_S)
        updates.cancel()


async def test_watch_begins_with_all_that_is_cached(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        await router.reserve(spec("a", prompt(40)), local=40)
        await router.tokens("a")
        updates = worker.worker.Watch(worker_pb2.WatchRequest())
        first = await asyncio.wait_for(updates.read(), PATIENCE_S)
        assert first.cache.cleared
        assert len(first.cache.stored) == 2
        await router.reserve(spec("b", prompt(40, start=90)), local=40)
        await router.tokens("b")
        known = set(first.cache.stored)
        while len(known) < 4:
            change = (await asyncio.wait_for(updates.read(), PATIENCE_S)).cache
            assert not change.cleared
            known |= set(change.stored)
        hashes = worker.node.engine.cached_hashes()
        assert known == set(await asyncio.wrap_future(hashes))


async def test_watch_reports_draining_and_ends(directory: Path, store: MemoryStore) -> None:
    async with Worker("prefill", directory, store) as worker:
        updates = worker.worker.Watch(worker_pb2.WatchRequest())
        seen = []
        async with asyncio.timeout(PATIENCE_S):
            async for message in updates:
                seen.append(message.state)
                worker.node._stop.set()
    assert seen[0] == common_pb2.WORKER_STATE_READY
    assert seen[-1] == common_pb2.WORKER_STATE_DRAINING


async def test_drain_answers_when_nothing_runs(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        await router.reserve(spec("a", prompt(20), max_tokens=30), local=20)
        await worker.worker.Drain(worker_pb2.DrainRequest(), timeout=PATIENCE_S)
        assert len(await router.tokens("a")) == 30
        await asyncio.wait_for(worker.life, PATIENCE_S)


async def test_sigterm_while_loading_never_becomes_ready(
    directory: Path, store: MemoryStore
) -> None:
    worker = Worker("decode", directory, store)
    loading, go_on = threading.Event(), threading.Event()
    load, seen = worker.load, list[str]()

    def slow() -> object:
        loading.set()
        assert go_on.wait(PATIENCE_S)
        return load()

    worker.load = slow  # type: ignore[method-assign, assignment]
    watching = asyncio.create_task(states(store, seen))
    life = asyncio.create_task(worker.run())
    await asyncio.to_thread(loading.wait, PATIENCE_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(worker.node._stop.wait(), PATIENCE_S)
    go_on.set()
    await asyncio.wait_for(life, PATIENCE_S)
    await asyncio.wait_for(watching, PATIENCE_S)
    assert seen == ["WORKER_STATE_STARTING", "gone"]


async def test_a_taken_port_is_a_config_error(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store) as worker:
        port = int(worker.node.record.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await Worker("decode", directory, store, port=port, incarnation="second").run()
    assert not store.entries


async def test_no_registry_at_start_is_unavailable(directory: Path, store: MemoryStore) -> None:
    store.stop()
    with pytest.raises(Unavailable):
        await Worker("decode", directory, store).run()


async def test_a_registry_that_goes_away_changes_nothing(
    directory: Path, store: MemoryStore
) -> None:
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        store.stop()
        await router.reserve(spec("a", prompt(20)), local=20)
        assert len(await router.tokens("a")) == 4


async def ends_with_everything_given_back(worker: Worker, store: MemoryStore, failure: str) -> None:
    """A worker whose engine, or whose handling of a step, fails at the next step."""
    with pytest.raises(InternalError, match=failure):
        async with worker, Router(worker) as router:
            if "lost" in failure:
                worker.node.on_step = _fail  # type: ignore[method-assign]
            else:
                engine = worker.node.engine
                engine.submit(lambda: setattr(engine, "_publish_report", _fail))
            await router.reserve(spec("a", prompt(20)))
            with pytest.raises(Unavailable):
                await router.ended
            assert (await router.event("a")).abort_reason
            await asyncio.wait_for(asyncio.shield(worker.life), PATIENCE_S)
    assert not store.entries
    assert not worker.spans.open


async def test_a_failed_engine_ends_the_worker(directory: Path, store: MemoryStore) -> None:
    await ends_with_everything_given_back(Worker("decode", directory, store), store, "broken")


async def test_a_lost_report_ends_the_worker(directory: Path, store: MemoryStore) -> None:
    worker = Worker("decode", directory, store)
    await ends_with_everything_given_back(worker, store, "report was lost: broken")


async def test_a_drained_worker_refuses_connections(directory: Path, store: MemoryStore) -> None:
    async with Worker("decode", directory, store) as worker:
        worker.node._stop.set()
        await asyncio.wait_for(worker.life, PATIENCE_S)
        with pytest.raises(grpc.RpcError) as failed:
            await worker.worker.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
    assert isinstance(rpc.error_of(failed.value), Unavailable)


def _fail(report: object) -> None:
    raise RuntimeError("broken")
