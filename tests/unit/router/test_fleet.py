"""The fleet over an in-memory registry and real servers: its workers, their states, and why."""

import asyncio
import socket

import pytest

from baton.errors import Unavailable
from baton.net.server import Health
from baton.v1 import common_pb2, worker_pb2
from router import main
from router.fleet import member
from router.fleet.circuit_breaker import FAILURES_IN_A_ROW
from router.fleet.liveness import LivenessConfig
from router.main import _follow_readiness, _workers_connected

from .scripted_workers import DRAINING, READY, TIMEOUT_S, DecodeWorker, received, seen
from .snapshots import decode_views, prefill_views


def changed(worker, **fields):
    record = common_pb2.WorkerRecord()
    record.CopyFrom(worker.record)
    record.MergeFrom(common_pb2.WorkerRecord(**fields))
    return record


async def test_workers_are_listed_by_role_with_load_and_pairs_from_start_to_end(cluster_of):
    cluster = await cluster_of(prefill=2, decode=2)
    snapshot = cluster.fleet.snapshot()
    listed = [(w.incarnation, w.state) for w in snapshot.workers]
    assert listed == [(name, "READY") for name in ("d0", "d1", "p0", "p1")]
    assert snapshot.why_not_ready == "" and snapshot.max_context == 64
    assert cluster.fleet.registry_connected
    pair = worker_pb2.PairStatus(prefill="p0", decode="d0", state="OPEN")
    cluster.prefills[0].tell(queue_tokens=123, running=4, pairs=[pair])
    snapshot = await cluster.until(lambda s: prefill_views(s)[0].load.queue_tokens == 123)
    assert prefill_views(snapshot)[0].load.running == 4
    assert cluster.fleet.pairs == [pair]
    await cluster.join(DecodeWorker("d8", state=common_pb2.WORKER_STATE_STARTING))  # no server yet
    decode = await cluster.add(DecodeWorker("d9"))
    await cluster.until_state(decode, "READY")
    assert [w.incarnation for w in decode_views(cluster.fleet.snapshot())] == ["d0", "d1", "d9"]
    await cluster.leave(decode)
    await cluster.until(lambda s: len(decode_views(s)) == 2)
    with pytest.raises(Unavailable, match="d9 has left"):
        cluster.fleet.member("d9")


async def test_another_tokenizer_is_a_mismatch_that_names_both(cluster):
    worker = await cluster.add(DecodeWorker("d9", text_fingerprint="e" * 64))
    view = await cluster.until_state(worker, "MISMATCH")
    assert "eeeeeeeeeeee" in view.reason and "ffffffffffff" in view.reason
    assert worker.connected.empty(), "it is not followed"


async def test_a_broken_connection_fails_its_sequences_once_and_is_opened_again(cluster):
    worker = cluster.decodes[0]
    waiting = [cluster.subscribe(worker, f"h{i}") for i in range(2)]
    worker.break_connections()
    await cluster.until_state(worker, "UNREACHABLE")
    with pytest.raises(Unavailable, match="d0 is not connected: it broke"):
        _ = cluster.member(worker).outgoing
    for queue in waiting:
        error = await received(queue)
        assert isinstance(error, Unavailable)
        assert "the connection to worker d0 broke" in str(error)
    await cluster.until_state(worker, "READY")
    again = cluster.subscribe(worker, "h3")
    worker.send("h1", 1)
    worker.send("h3", 3)
    assert list((await received(again)).token_ids) == [3]
    assert all(queue.empty() for queue in waiting)


async def test_subscribers_end_when_the_worker_leaves_or_the_fleet_stops(cluster):
    worker = cluster.decodes[0]
    waiting, left = cluster.subscribe(worker), cluster.member(worker)
    await cluster.leave(worker)
    error = await received(waiting)
    assert isinstance(error, Unavailable) and "left the cluster" in str(error)
    await cluster.until(lambda s: prefill_views(s) and not decode_views(s))
    async with asyncio.timeout(TIMEOUT_S):
        await left.close("once more: now it is over")
    with pytest.raises(Unavailable, match="d0 has left"):
        _ = left.outgoing
    left.cancel("h")
    waiting = cluster.subscribe(cluster.prefills[0])
    cluster._following.cancel()
    assert "router is stopping" in str(await received(waiting))


async def test_a_worker_whose_lease_ended_serves_on_while_its_connection_answers(cluster):
    """A registry that was paused ends all leases at once: that says nothing of the workers."""
    worker = cluster.decodes[0]
    waiting = cluster.subscribe(worker)
    cluster.store.lose("d0")
    cluster.store.lose("p0")
    await cluster.add(DecodeWorker("d9"))  # the change before was seen
    await cluster.until(lambda s: len(decode_views(s)) == 2 and s.num_usable == 2)
    worker.send("h", 1)
    assert list((await received(waiting)).token_ids) == [1]
    cluster.store.find("d0")
    await cluster.store_seen()
    cluster.store.lose("d0")
    await cluster.store_seen()
    await worker.stop()  # now nothing speaks for it any more
    assert isinstance(await received(waiting), Unavailable)
    await cluster.until(lambda s: [w.incarnation for w in decode_views(s)] == ["d9"])
    await worker.start()
    cluster.store.put(changed(cluster.prefills[0], incarnation="p9"))
    await cluster.until(lambda s: len(prefill_views(s)) == 2)
    assert len(decode_views(cluster.fleet.snapshot())) == 1, (
        "it is not followed before it registers"
    )
    cluster.store.find("d0")
    await cluster.until_state(worker, "READY")


async def test_no_worker_is_dropped_while_the_registry_is_away(cluster):
    """None could register again."""
    worker = cluster.decodes[0]
    cluster.store.lose("d0")
    await cluster.store_seen()
    cluster.store.stop()
    worker.break_connections()
    await cluster.until_state(worker, "UNREACHABLE")
    await cluster.until_state(worker, "READY")


async def test_a_draining_worker_without_a_record_finishes_until_it_hangs_up(cluster):
    worker = cluster.decodes[0]
    waiting = cluster.subscribe(worker)
    worker.tell(state=DRAINING)
    await cluster.until_state(worker, "DRAINING")
    await cluster.leave(worker)
    await cluster.store_seen()
    worker.send("h", 1)
    assert list((await received(waiting)).token_ids) == [1]
    await worker.stop()
    assert isinstance(await received(waiting), Unavailable)
    await cluster.until(lambda s: not decode_views(s))


@pytest.mark.parametrize("source", ["worker", "registry"])
async def test_draining_is_learned_from_either_source_and_stays(cluster, source):
    worker = cluster.decodes[0]
    waiting = cluster.subscribe(worker)
    if source == "worker":
        worker.tell(state=DRAINING)
    else:
        await cluster.registrations["d0"].update(changed(worker, state=DRAINING))
    assert not (await cluster.until_state(worker, "DRAINING")).ready
    worker.send("h", 1)
    assert list((await received(waiting)).token_ids) == [1], "it keeps its streams"
    # Neither an older record nor an update that was on its way brings it back.
    await cluster.registrations["d0"].update(changed(worker, state=READY, pid=77))
    worker.tell(state=READY, queue_tokens=5)
    await cluster.until(
        lambda s: decode_views(s)[0].record.pid == 77 and decode_views(s)[0].load.queue_tokens
    )
    assert decode_views(cluster.fleet.snapshot())[0].state == "DRAINING"


async def test_records_of_workers_that_do_not_exist_cost_one_look_together(cluster):
    """1,500 of them took a router's loop for minutes: work for each, and calls without an end."""
    looks = 0

    async def count():
        nonlocal looks
        while True:
            await cluster.next_change().wait()
            looks += 1

    counting = asyncio.create_task(count())
    with socket.socket() as held:  # an address at which no process listens
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        for i in range(300):
            record = changed(cluster.decodes[0], incarnation=f"ghost{i}", address=address)
            cluster.store.put(record)
            await asyncio.sleep(0)
        await cluster.until(lambda s: len(decode_views(s)) == 301)
        decodes = lambda: decode_views(cluster.fleet.snapshot())  # noqa: E731
        await seen(lambda: all(w.reason != "not connected yet" for w in decodes()))
        known = looks
        await asyncio.sleep(1)
        counting.cancel()
    assert known < 300, "one for each"
    assert looks - known < 10, "they go on failing, and that is no change"
    assert cluster.fleet.snapshot().why_not_ready == ""


@pytest.mark.parametrize("how", ["gone", "silent"])
async def test_a_router_that_starts_waits_for_one_try_to_reach_a_dead_worker(
    cluster, monkeypatch, how
):
    """Its record stays for as long as its lease lives, and then it is missing for a while."""
    monkeypatch.setattr(main, "_JOIN_S", 10 * TIMEOUT_S)
    monkeypatch.setattr(member, "_CONNECT_TIMEOUT_S", 0.3)
    models = cluster.models()
    states = lambda: {view.incarnation: view.state for view in models.workers}  # noqa: E731
    alive = {"p0": "READY", "d0": "READY"}
    with socket.socket() as held:  # an address at which no process answers
        held.bind(("127.0.0.1", 0))
        if how == "silent":
            held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        cluster.store.put(changed(cluster.decodes[0], incarnation="dead", address=address))
        async with asyncio.timeout(TIMEOUT_S):
            await _workers_connected(cluster.membership, models, None)
            assert states() == {**alive, "dead": "UNREACHABLE"}
            assert all(view.reason != "not connected yet" for view in models.workers)
            cluster.store.lose("dead")
            await seen(lambda: states() == alive)
            await _workers_connected(cluster.membership, models, None)


# Workers and pairs that fail, and readiness.


def fail(cluster, *keys):
    for key in keys:
        for _ in range(FAILURES_IN_A_ROW):
            cluster.fleet.breakers[key].sent()
            cluster.fleet.breakers[key].failed("it broke")


async def test_a_worker_that_fails_is_ejected_and_probed_and_counted_once(cluster_of, caplog):
    cluster = await cluster_of(decode=2)
    fleet, ejected = cluster.fleet, []
    fleet.on_ejected = ejected.append
    fail(cluster, "d1", ("p0", "d1"))
    breaker, worker = fleet.breakers["d1"], cluster.decodes[1]
    assert "it broke" in (await cluster.until_state(worker, "EJECTED")).reason
    assert fleet.snapshot().why_not_ready == ""
    await cluster.until_state(worker, "READY")  # half-open, and waiting requests try again
    await cluster.store_seen()  # ticks see it so
    breaker.sent()
    await cluster.until_state(worker, "EJECTED")  # for all but the probe
    await cluster.store_seen()
    breaker.succeeded()
    await cluster.until_state(worker, "READY")
    assert ejected == ["d1", ("p0", "d1")]
    assert [text for text in caplog.messages if text.startswith("ejected ")] == [
        f"ejected {name}: its last 3 calls failed, the last with: it broke"
        for name in ("d1", "p0 to d1")
    ]


async def test_a_pair_that_fails_is_excluded_and_listed(cluster_of):
    cluster = await cluster_of(decode=2)
    link = worker_pb2.PairStatus(prefill="p0", decode="d0", state="OPEN", epoch=3)
    cluster.prefills[0].tell(pairs=[link])
    await cluster.until(lambda _: cluster.fleet.pairs)
    fail(cluster, ("p0", "d0"))
    snapshot = await cluster.until(lambda s: s.excluded_pairs)
    assert snapshot.excluded_pairs.keys() == {("p0", "d0")}
    assert [view.state for view in decode_views(snapshot)] == ["READY", "READY"]
    link.state = "EJECTED"
    assert cluster.fleet.pairs == [link]
    fail(cluster, ("p0", "d1"))  # now it is the one that failed longest ago that is used
    other = worker_pb2.PairStatus(prefill="p0", decode="d1", state="EJECTED")
    link.state = "OPEN"
    assert cluster.fleet.pairs == [link, other]


async def test_a_pair_that_the_prefill_worker_quarantines_is_excluded(cluster):
    link = worker_pb2.PairStatus(prefill="p0", decode="d0", state="QUARANTINED")
    cluster.prefills[0].tell(pairs=[link])
    snapshot = await cluster.until(lambda s: s.excluded_pairs)
    assert "leaves it alone" in snapshot.why_not_ready
    fail(cluster, ("p0", "d0"), "p0", "d0")
    assert cluster.fleet.pairs == [link]
    assert "leaves it alone" in cluster.fleet.snapshot().excluded_pairs["p0", "d0"]
    assert not cluster.fleet.snapshot().num_usable, "it is no last resort"
    cluster.prefills[0].tell()
    await cluster.until(lambda s: not s.why_not_ready)


async def test_failures_of_a_worker_are_forgotten_when_it_leaves(cluster):
    worker = await cluster.add(DecodeWorker("d9"))
    await cluster.until_state(worker, "READY")
    fail(cluster, "d9", ("p0", "d9"), "p0")
    await cluster.leave(worker)
    await cluster.until(lambda s: len(decode_views(s)) == 1)
    assert cluster.fleet.breakers.all_open().keys() == {"p0"}
    await cluster.join(worker)  # the same process, whose lease had ended
    await cluster.until_state(worker, "READY")


async def test_a_bug_in_one_tick_does_not_end_the_watch(cluster_of, monkeypatch):
    cluster = await cluster_of(liveness=LivenessConfig(silence_s=0.5))
    worker = cluster.decodes[0]
    followed, broken = cluster.member(worker), []
    tick = followed.tick

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


async def test_readiness_follows_the_fleet(cluster):
    health, decode = Health(), cluster.decodes[0]
    following = asyncio.create_task(_follow_readiness(cluster.models(), health))
    await seen(lambda: health.serving is True)
    prefill = cluster.prefills[0]
    await cluster.leave(prefill)
    decode.stop_still()
    for _ in range(cluster.liveness.lost_ticks):
        cluster.member(decode).tick()
    await seen(lambda: health.serving is False)
    decode.wake()
    await cluster.join(prefill)
    await seen(lambda: health.serving is True)
    other = await cluster.add(DecodeWorker("d9", dtype="bfloat16"))
    await cluster.until_state(other, "READY")
    await cluster.leave(decode)
    await seen(lambda: health.serving is False)  # READY workers of both roles, but no pair
    following.cancel()
