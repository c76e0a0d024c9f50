"""What the fleet does about workers and pairs that fail, and what that means for readiness."""

import asyncio

import pytest

from baton.server import Health
from baton.v1 import worker_pb2
from router.fleet.circuit_breaker import FAILURES_IN_A_ROW
from router.fleet.heartbeat import LivenessConfig
from router.main import _follow_readiness

from .scripted_workers import DecodeWorker, seen


@pytest.fixture
async def cluster(cluster_of):
    return await cluster_of(prefill=1, decode=1)


def member(cluster, worker):
    return cluster.fleet.member(worker.record.incarnation)


def fail(cluster, *keys):
    for key in keys:
        for _ in range(FAILURES_IN_A_ROW):
            cluster.fleet.breakers.sent(key)
            cluster.fleet.breakers.failed(key, "it broke")


async def test_a_worker_that_fails_is_ejected_and_probed_after_its_cool_down(cluster_of):
    cluster = await cluster_of(prefill=1, decode=2)
    worker = cluster.decodes[1]
    fail(cluster, "d1")
    view = await cluster.until_state(worker, "EJECTED")
    assert "it broke" in view.reason
    assert cluster.fleet.snapshot().ready
    await cluster.until_state(worker, "READY")  # half-open, and those who wait were told
    cluster.fleet.breakers.sent("d1")
    await cluster.until_state(worker, "EJECTED")  # for everybody but the probe
    cluster.fleet.breakers.succeeded("d1")
    await cluster.until_state(worker, "READY")


async def test_a_pair_that_fails_is_shut_and_listed(cluster_of):
    cluster = await cluster_of(prefill=1, decode=2)
    link = worker_pb2.PairStatus(prefill="p0", decode="d0", state="OPEN", epoch=3)
    cluster.prefills[0].tell(pairs=[link])
    await cluster.until(lambda _: cluster.fleet.pairs)
    fail(cluster, ("p0", "d0"))
    snapshot = await cluster.until(lambda s: s.excluded_pairs)
    assert snapshot.excluded_pairs.keys() == {("p0", "d0")}
    assert [view.state for view in snapshot.decode] == ["READY", "READY"]
    link.state = "EJECTED"
    assert cluster.fleet.pairs == [link]
    fail(cluster, ("p0", "d1"))  # now it is the one that failed longest ago that is used
    other = worker_pb2.PairStatus(prefill="p0", decode="d1", state="EJECTED")
    link.state = "OPEN"
    assert cluster.fleet.pairs == [link, other]


async def test_a_pair_that_the_prefill_worker_quarantines_is_shut(cluster):
    link = worker_pb2.PairStatus(prefill="p0", decode="d0", state="QUARANTINED")
    cluster.prefills[0].tell(pairs=[link])
    snapshot = await cluster.until(lambda s: s.excluded_pairs)
    assert not snapshot.ready
    assert "leaves it alone" in snapshot.why_not_ready
    fail(cluster, ("p0", "d0"))
    assert cluster.fleet.pairs == [link]
    cluster.prefills[0].tell()
    await cluster.until(lambda s: s.ready)


async def test_what_was_known_of_a_worker_is_forgotten_when_it_leaves(cluster):
    worker = DecodeWorker("d9")
    await worker.start()
    await cluster.join(worker)
    await cluster.until_state(worker, "READY")
    fail(cluster, "d9", ("p0", "d9"))
    await cluster.leave(worker)
    await cluster.until(lambda s: len(s.decode) == 1)
    assert cluster.fleet.breakers.all_open() == {}
    await cluster.join(worker)  # the same process, whose lease had ended
    await cluster.until_state(worker, "READY")
    await worker.stop()


async def test_a_bug_in_one_tick_does_not_end_the_watch(cluster_of, monkeypatch):
    cluster = await cluster_of(liveness=LivenessConfig(silence_s=0.5))
    followed, worker = member(cluster, cluster.decodes[0]), cluster.decodes[0]
    tick, broken = followed.tick, []

    def breaks_once():
        if not broken:
            broken.append(True)
            raise ValueError("a bug")
        tick()

    monkeypatch.setattr(followed, "tick", breaks_once)
    worker.stop_still()
    await cluster.until_state(worker, "SILENT")
    assert broken
    worker.wake()


async def test_readiness_follows_the_fleet(cluster_of):
    cluster, breakers = await cluster_of(prefill=1, decode=1), Health()
    following = asyncio.create_task(_follow_readiness(cluster.fleet, breakers))

    async def until(serving):
        await seen(lambda: breakers.serving is serving)

    await until(True)
    cluster.decodes[0].stop_still()
    followed = member(cluster, cluster.decodes[0])
    for _ in range(cluster.liveness.lost_ticks):
        followed.tick()
    await until(False)
    cluster.decodes[0].wake()
    await until(True)
    other = DecodeWorker("d9", dtype="bfloat16")
    await other.start()
    await cluster.join(other)
    await cluster.until_state(other, "READY")
    await cluster.leave(cluster.decodes[0])
    await until(False)  # READY workers of both roles, but no pair
    following.cancel()
    await other.stop()
