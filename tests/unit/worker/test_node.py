"""A worker from STARTING over READY and DRAINING to its end; and what each caller sees of it."""

import asyncio
import contextlib
import math
import os
import re
import signal
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config import EngineConfig, WorkerConfig
from baton.engine.step_report import Load, StepReport
from baton.errors import ConfigError, InternalError, Unavailable
from baton.net import rpc
from baton.v1 import common_pb2, worker_pb2
from baton.worker import node
from tests.unit.worker.running import PATIENCE_S, Paced, Router, Worker, prompt, spec, until

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


async def states(store, seen):
    """Notes every state of the one member, and at last "gone"."""
    async with store.watch() as membership:
        async for records in membership.changes():
            if records:
                state = next(iter(records.values())).state
                seen.append(common_pb2.WorkerState.Name(state).removeprefix("WORKER_STATE_"))
            elif seen:
                seen.append("gone")
                return


async def read(updates):
    return await asyncio.wait_for(updates.read(), PATIENCE_S)


async def test_an_idle_worker_is_not_busy_with_prompts_for_ever(directory, store):
    """A step that took long, as while the process was stopped, may be its last for a long time."""
    load = Load(0, 0, 0, 16, 16, 0, 0, 0, 1, 0, 2000.0, 32)
    async with (
        Worker("decode", directory, store) as worker,
        Router(worker, heartbeat_ms=50) as router,
    ):
        late = time.time_ns() + 500_000_000
        worker.node.load_tracker.update(
            StepReport(late - 5_000_000_000, late, 30, [], load, num_chunks=1)
        )
        assert worker.node.load().prefill_share == 1
        for is_seen in (lambda share: share == 1, lambda share: share < 0.8):
            report = await asyncio.wait_for(router.reports.get(), PATIENCE_S)
            while not is_seen(report.load.prefill_share):
                report = await asyncio.wait_for(router.reports.get(), PATIENCE_S)


async def test_a_worker_from_its_start_to_its_end(directory, store):
    seen = []
    watching = asyncio.create_task(states(store, seen))
    async with (
        Worker("decode", directory, store) as worker,
        Router(worker) as router,
        contextlib.AsyncExitStack() as stack,
    ):
        answer = await worker.worker.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
        record = answer.record
        assert (record.incarnation, record.pid) == ("decode-0", os.getpid())
        assert record.role == common_pb2.WORKER_ROLE_DECODE
        assert record.blocks_total == answer.load.blocks_total == 16
        assert (record.max_context, answer.load.chunk_tokens) == (255, 32)
        assert list(record.transports) == [common_pb2.TRANSPORT_SHM]
        health = health_pb2_grpc.HealthStub(worker.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await read(health)).status == SERVING
        # Reports begin with all that is cached.
        await router.reserve(spec("a", prompt(40)), local=40)
        await router.tokens("a")
        late = await stack.enter_async_context(Router(worker, "late"))
        first = await late.report()
        assert first.state == common_pb2.WORKER_STATE_READY and first.cache.cleared
        known = set(first.cache.stored)
        assert len(known) == 2
        await router.reserve(spec("b", prompt(40, start=90)), local=40)
        await router.tokens("b")
        while len(known) < 4:
            change = (await late.report()).cache
            assert not change.cleared
            known |= set(change.stored)
        assert known == set(worker.node.engine._blocks._by_hash[0])
        # Drain answers when nothing runs any more.
        await router.reserve(spec("c", prompt(20), max_tokens=30), local=20)
        drain = worker.worker.Drain(worker_pb2.DrainRequest())
        assert (await read(health)).status == NOT_SERVING
        assert len(await router.tokens("c")) == 30
        await asyncio.wait_for(drain, PATIENCE_S)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(late.ended, PATIENCE_S)
        while not late.reports.empty():
            last = late.reports.get_nowait().state
        assert last == common_pb2.WORKER_STATE_DRAINING
        await asyncio.wait_for(worker.life, PATIENCE_S)
        with pytest.raises(grpc.RpcError) as failed:
            await worker.worker.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
        assert isinstance(rpc.error_of(failed.value), Unavailable)
    await asyncio.wait_for(watching, PATIENCE_S)
    assert seen == ["STARTING", "READY", "DRAINING", "gone"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_while_loading_never_becomes_ready(directory, store, number):
    worker, seen = Worker("decode", directory, store), []
    loading, go_on, load = threading.Event(), threading.Event(), worker.load

    def slow(remote_ranks):
        loading.set()
        assert go_on.wait(PATIENCE_S)
        return load(remote_ranks)

    worker.load = slow
    watching = asyncio.create_task(states(store, seen))
    life = asyncio.create_task(worker.run())
    await asyncio.to_thread(loading.wait, PATIENCE_S)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(worker.node._stop.wait(), PATIENCE_S)
    go_on.set()
    await asyncio.wait_for(life, PATIENCE_S)
    await asyncio.wait_for(watching, PATIENCE_S)
    assert seen == ["STARTING", "gone"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it was left to end the process


async def test_a_worker_needs_a_port_and_at_its_start_the_registry(directory, store):
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        port = int(worker.node.record.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await Worker("decode", directory, store, port=port, incarnation="second").run()
        store.stop()
        with pytest.raises(Unavailable):
            await Worker("decode", directory, store, incarnation="fourth").run()
        await router.reserve(spec("a", prompt(20)), local=20)
        assert len(await router.tokens("a")) == 4


def fail(*_):
    raise RuntimeError("broken")


def break_engine(worker):
    engine = worker.node.engine
    engine.submit(lambda: setattr(engine, "_publish_report", fail))


def lose_reports(worker):
    worker.decoding.on_step = fail


def break_serving(worker):
    async def broken():
        fail()

    worker.node.idle = broken
    worker.stop()


def fail_steps(worker):
    worker.node.engine._runner.launch = fail


async def given_back(worker, break_it, failure, later=""):
    """Why sequences of a worker that fails were ended: those that came later, and then another."""
    reasons = []
    with pytest.raises((InternalError, RuntimeError), match=failure):
        async with worker, Router(worker) as router:
            await router.reserve(spec("a", prompt(20, start=9)))
            break_it(worker)
            for number, name in enumerate(later):  # one prompt that fails is not the worker's end
                with contextlib.suppress(Unavailable, InternalError):  # it may have ended
                    await router.reserve(spec(name, prompt(20, start=number)), local=20)
                    reasons.append((await router.event(name)).abort_reason)
            reasons.append((await router.event("a")).abort_reason)
            with pytest.raises(Unavailable):
                await router.ended
            await asyncio.wait_for(asyncio.shield(worker.life), PATIENCE_S)
    assert all(reasons) and worker.node.engine.ended.done()
    assert not worker.store.entries and not worker.spans.open
    return reasons


FAILURES = pytest.mark.parametrize(
    ("break_it", "failure"),
    [
        (break_engine, "the engine failed: RuntimeError: broken"),
        (lose_reports, "a step's report was lost: broken"),
    ],
)


@FAILURES
async def test_a_failed_engine_or_a_lost_report_ends_the_worker(
    directory, store, break_it, failure
):
    worker = Worker("decode", directory, store)
    reasons = await given_back(worker, break_it, "broken", "b")
    assert {*reasons} == {f"the decode worker ends: {failure}"}


async def test_a_failure_of_steps_or_serving_ends_the_worker(directory, store):
    worker = Worker("decode", directory, store)
    assert await given_back(worker, break_serving, "broken") == ["the decode worker is draining"]
    worker = Worker("decode", directory, store)
    *reasons, last = await given_back(worker, fail_steps, r"in a row failed.*broken", "bcd")
    assert ["broken" in reason for reason in reasons] == [True, True, True]
    assert re.match("the decode worker ends: the engine failed: .* in a row failed", last)


@FAILURES
async def test_a_failure_while_the_worker_drains_ends_the_drain(
    directory, store, break_it, failure
):
    worker = Worker("decode", directory, store, drain_s=10 * PATIENCE_S)
    with pytest.raises((InternalError, RuntimeError), match=failure):
        async with worker, Router(worker) as router:
            paced = Paced(worker)
            await router.reserve(spec("a", prompt(20)), local=20)
            await paced.waits()
            worker.stop()
            await until(lambda: worker.node.record.state == common_pb2.WORKER_STATE_DRAINING)
            break_it(worker)
            paced.allow.release(99)
            while not (reason := (await router.event("a")).abort_reason):
                pass
            await asyncio.wait_for(asyncio.shield(worker.life), PATIENCE_S)
    assert reason == f"the decode worker ends: {failure}"


async def test_a_step_that_never_ends_does_not_keep_the_worker(directory, store, monkeypatch):
    monkeypatch.setattr(node, "CLOSE_GRACE_S", 0.2)
    worker = Worker("decode", directory, store, drain_s=0.1, transfer_timeout_s=0.1)
    async with worker, Router(worker) as router:
        paced = Paced(worker)
        await router.reserve(spec("a", prompt(20)), local=20)
        await paced.waits()
        worker.stop()
        reason = (await router.event("a")).abort_reason
        await asyncio.wait_for(worker.node._drained.wait(), PATIENCE_S)
        paced.allow.release(9)
    assert reason == "the decode worker is draining"
    assert worker.node.left_work


async def test_a_router_gets_heartbeats_with_the_age_of_a_step_that_hangs(directory, store):
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        paced = Paced(worker)
        async with Router(worker, "other", heartbeat_ms=60) as other:
            first = await other.report()
            assert (first.cache.cleared, first.load.step_age_ms) == (True, 0)
            for _ in range(3):
                await other.heartbeat()  # nothing has changed
            assert other.reports.empty()
            await router.reserve(spec("a", prompt(20)), local=20)
            await paced.waits()
            ages = [0.0]
            while len(ages) < 5 or ages[-5] == 0.0:
                report = await other.report()
                assert report.state == common_pb2.WORKER_STATE_READY
                ages.append(report.load.step_age_ms)
            assert ages == sorted(ages)
            request = worker_pb2.DescribeRequest()
            described = await worker.worker.Describe(request, timeout=PATIENCE_S)
            assert described.load.step_age_ms >= ages[-1]
            paced.allow.release(99)
            await router.tokens("a")
            while (await other.report()).load.step_age_ms:
                pass


async def test_health_says_when_a_step_stalls_and_when_it_has_ended(directory, store, monkeypatch):
    monkeypatch.setattr(node, "STALL_MIN_S", 0.05)
    async with Worker("decode", directory, store) as worker, Router(worker) as router:
        paced = Paced(worker)
        updates = health_pb2_grpc.HealthStub(worker.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await read(updates)).status == SERVING
        await router.reserve(spec("a", prompt(20), max_tokens=1), local=20)
        assert (await read(updates)).status == NOT_SERVING
        assert not worker.node._health.alive
        monkeypatch.setattr(node, "STALL_MIN_S", math.inf)
        paced.allow.release()
        assert (await read(updates)).status == SERVING and worker.node._health.alive
        await router.tokens("a")
        updates.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_draft_model_is_loaded_where_sequences_run(role):
    """A prefill worker gives them away with their first token."""
    engine = EngineConfig(speculative_model="demo", kv_blocks=8, threads=1)
    loaded, _ = node._load(WorkerConfig(role, engine=engine))
    assert (loaded.draft is None) == (role == "prefill")
