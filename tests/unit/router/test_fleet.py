"""The fleet over an in-memory registry and real servers: who is there, in which state, and why."""

import asyncio
import socket

import pytest

from baton.errors import Unavailable
from baton.server import Health
from baton.v1 import common_pb2, worker_pb2
from router.fleet.circuit_breaker import FAILURES_IN_A_ROW
from router.fleet.heartbeat import LivenessConfig
from router.main import _follow_readiness

from .scripted_workers import (
    DRAINING,
    READY,
    TIMEOUT_S,
    DecodeWorker,
    PrefillWorker,
    heard,
    listen,
    member,
    seen,
)


def changed(worker, **fields):
    record = common_pb2.WorkerRecord()
    record.CopyFrom(worker.record)
    record.MergeFrom(common_pb2.WorkerRecord(**fields))
    return record


@pytest.fixture
async def cluster(cluster_of):
    return await cluster_of(prefill=1, decode=1)


async def test_workers_are_listed_by_role_and_ready_once_they_answer(cluster_of):
    cluster = await cluster_of(prefill=2, decode=2)
    snapshot = cluster.fleet.snapshot()
    assert [(w.incarnation, w.state) for w in snapshot.prefill] == [
        ("p0", "READY"),
        ("p1", "READY"),
    ]
    assert [(w.incarnation, w.state) for w in snapshot.decode] == [("d0", "READY"), ("d1", "READY")]
    assert snapshot.ready
    assert snapshot.max_context == 64
    assert cluster.fleet.registry_connected


async def test_load_and_pairs_are_followed(cluster):
    pair = worker_pb2.PairStatus(prefill="p0", decode="d0", state="OPEN")
    cluster.prefills[0].tell(queue_tokens=123, running=4, pairs=[pair])
    snapshot = await cluster.until(lambda s: s.prefill[0].load.queue_tokens == 123)
    assert snapshot.prefill[0].load.running == 4
    assert cluster.fleet.pairs == [pair]


async def test_a_worker_joins_and_leaves(cluster):
    decode = DecodeWorker("d9")
    await decode.start()
    await cluster.join(decode)
    await cluster.until_state(decode, "READY")
    await cluster.leave(decode)
    await cluster.until(lambda s: len(s.decode) == 1)
    with pytest.raises(Unavailable, match="d9 has left"):
        cluster.fleet.member("d9")
    await decode.stop()


async def test_a_starting_worker_is_no_member_until_it_has_a_server(cluster):
    worker = PrefillWorker("p9", state=common_pb2.WORKER_STATE_STARTING)
    await cluster.join(worker)
    marker = PrefillWorker("p10")
    await marker.start()
    await cluster.join(marker)
    await cluster.until_state(marker, "READY")
    assert [w.incarnation for w in cluster.fleet.snapshot().prefill] == ["p0", "p10"]
    await marker.stop()


async def test_another_tokenizer_is_a_mismatch_that_names_both(cluster):
    worker = DecodeWorker("d9", text_fingerprint="e" * 64)
    await worker.start()
    await cluster.join(worker)
    view = await cluster.until_state(worker, "MISMATCH")
    assert "eeeeeeeeeeee" in view.reason
    assert "ffffffffffff" in view.reason
    assert worker.streams == {}  # nobody follows it
    await worker.stop()


async def test_a_worker_that_dies_is_unreachable_and_comes_back_by_itself(cluster):
    worker = cluster.decodes[0]
    await worker.stop()
    view = await cluster.until_state(worker, "UNREACHABLE")
    assert not cluster.fleet.snapshot().ready
    assert view.reason
    worker.streams.clear()
    await worker.start()
    await cluster.until_state(worker, "READY")
    assert cluster.fleet.snapshot().ready


async def test_a_broken_watch_alone_makes_a_worker_unreachable_until_it_is_back(cluster):
    worker = cluster.prefills[0]
    worker.break_watches()
    view = await cluster.until_state(worker, "UNREACHABLE")
    assert view.reason == "the watch broke"
    await cluster.until_state(worker, "READY")


async def test_a_decode_worker_without_an_event_stream_is_never_ready(cluster):
    worker = DecodeWorker("d9")
    worker.refuses_streams = True
    await worker.start()
    await cluster.join(worker)
    states = set()

    def refused():
        decode = cluster.fleet.snapshot().decode
        view = next((w for w in decode if w.incarnation == "d9"), None)
        if view is not None:
            states.add(view.state)
        return view is not None and view.reason == "no event streams here"

    await seen(refused)
    assert states == {"UNREACHABLE"}
    await worker.stop()


async def test_events_reach_their_subscriber_in_order_and_nobody_else(cluster):
    worker = cluster.decodes[0]
    mine, other = listen(cluster, worker, "mine"), listen(cluster, worker, "other")
    worker.send("mine", 1)
    worker.send("unknown", 9)
    worker.send("mine", 2)
    worker.send("other", 3)
    assert list((await heard(mine)).token_ids) == [1]
    assert list((await heard(mine)).token_ids) == [2]
    assert list((await heard(other)).token_ids) == [3]
    member(cluster, worker).unsubscribe("mine")
    worker.send("mine", 4)
    worker.send("other", 5)
    await heard(other)
    assert mine.empty()


async def test_a_broken_event_stream_is_told_once_to_each_and_opened_again(cluster):
    worker = cluster.decodes[0]
    first, second = listen(cluster, worker, "h1"), listen(cluster, worker, "h2")
    worker.break_streams()
    await cluster.until_state(worker, "UNREACHABLE")
    for queue in (first, second):
        error = await heard(queue)
        assert isinstance(error, Unavailable)
        assert "event stream of decode worker d0 broke" in str(error)
    async with asyncio.timeout(TIMEOUT_S):
        await worker.stream_opened.wait()
    await cluster.until_state(worker, "READY")
    again = listen(cluster, worker, "h3")
    worker.send("h1", 1)
    worker.send("h3", 3)
    assert list((await heard(again)).token_ids) == [3]
    assert first.empty()


async def test_a_worker_that_leaves_tells_its_subscribers(cluster):
    worker = cluster.decodes[0]
    waiting = listen(cluster, worker)
    await cluster.leave(worker)
    error = await heard(waiting)
    assert isinstance(error, Unavailable)
    assert "left the cluster" in str(error)


async def test_a_fleet_that_stops_tells_its_subscribers(cluster):
    waiting = listen(cluster, cluster.decodes[0])
    cluster._following.cancel()
    assert "router is stopping" in str(await heard(waiting))


@pytest.mark.parametrize("source", ["watch", "registry"])
async def test_draining_is_learned_from_either_source_and_stays(cluster, source):
    worker = cluster.decodes[0]
    if source == "watch":
        worker.tell(state=DRAINING)
    else:
        await cluster.registrations["d0"].update(changed(worker, state=DRAINING))
    view = await cluster.until_state(worker, "DRAINING")
    assert not view.ready
    # Neither an older record nor changed that was on its way brings it back.
    await cluster.registrations["d0"].update(changed(worker, state=READY, pid=77))
    worker.tell(state=READY, queue_tokens=5)
    await cluster.until(lambda s: s.decode[0].record.pid == 77 and s.decode[0].load.queue_tokens)
    assert cluster.fleet.snapshot().decode[0].state == "DRAINING"


async def test_a_draining_worker_keeps_its_streams(cluster):
    worker = cluster.decodes[0]
    waiting = listen(cluster, worker)
    worker.tell(state=DRAINING)
    await cluster.until_state(worker, "DRAINING")
    worker.send("h", 1)
    assert list((await heard(waiting)).token_ids) == [1]


async def test_a_registry_outage_takes_nobody_away(cluster):
    cluster.store.stop()
    cluster.prefills[0].tell(queue_tokens=9)
    snapshot = await cluster.until(lambda s: s.prefill[0].load.queue_tokens == 9)
    assert not cluster.fleet.registry_connected
    assert snapshot.ready
    cluster.store.start()


async def test_a_call_to_a_worker_that_left_is_unavailable(cluster):
    left = member(cluster, cluster.decodes[0])
    await cluster.leave(cluster.decodes[0])
    await cluster.until(lambda s: s.prefill and not s.decode)
    async with asyncio.timeout(TIMEOUT_S):
        await left.close("once more: now it is over")
    with pytest.raises(Unavailable, match="d0 has left"), left.calling():
        await left.worker.Describe(worker_pb2.DescribeRequest())


async def test_ones_own_cancellation_is_not_taken_for_the_workers(cluster):
    left = member(cluster, cluster.decodes[0])
    await cluster.leave(cluster.decodes[0])

    async def call():
        with left.calling():
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def dead_address():
    """An address at which nobody listens, kept from others for the test's length."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_records_of_workers_that_do_not_exist_cost_one_look_together(cluster, dead_address):
    """1,500 of them took a router's loop for minutes: work for each, and calls without an end."""
    looks = 0

    async def count():
        nonlocal looks
        while True:
            await cluster.fleet.changed.wait()
            looks += 1

    counting = asyncio.create_task(count())
    for i in range(300):
        ghost = changed(cluster.decodes[0], incarnation=f"ghost{i}", address=dead_address)
        cluster.store.put(ghost)
        cluster.store.settle()
        await asyncio.sleep(0)
    await cluster.until(lambda s: len(s.decode) == 301)
    await seen(
        lambda: all(w.reason != "not connected yet" for w in cluster.fleet.snapshot().decode)
    )
    known = looks
    await asyncio.sleep(1)
    counting.cancel()
    assert known < 300, "one for each"
    assert looks - known < 10, "they go on failing, and that is no changed"
    assert cluster.fleet.snapshot().ready


# Workers and pairs that fail, and readiness.


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
