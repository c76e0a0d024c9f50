"""Workers that fall silent, stall, wake up or are replaced, as a member of the fleet sees them.

Workers answer over real connections. Time that must not matter passes in ticks that tests make.
"""

import asyncio
import time

import pytest

from baton.errors import Stale, Unavailable
from baton.v1 import worker_pb2
from router.fleet.heartbeat import LivenessConfig
from router.fleet.member import CANCEL_BATCH, MOST_ORPHANS, Orphans
from router.fleet.snapshot import AssignedPrompt

from .scripted_workers import (
    TIMEOUT_S,
    DecodeWorker,
    PrefillWorker,
    counting,
    first_token,
    heard,
    listen,
    member,
    request_state,
    seen,
    token,
)

QUICK = LivenessConfig(silence_s=0.6, stall_s=2.0)


@pytest.fixture
async def cluster(cluster_of):
    return await cluster_of(prefill=1, decode=1)


@pytest.fixture(params=["prefill", "decode"])
def worker(request, cluster):
    return {"prefill": cluster.prefills, "decode": cluster.decodes}[request.param][0]


def view(cluster, worker):
    return member(cluster, worker).view


def tick(cluster, worker, times):
    """Lets ticks pass for one worker without any time in which it could answer."""
    for _ in range(times):
        member(cluster, worker).tick()


async def reconnecting(cluster, worker):
    """Waits until every stream of a worker has been opened anew, as far as the worker lets it."""
    for _ in member(cluster, worker)._streams:
        await heard(worker.described)


def forget_described(worker):
    while not worker.described.empty():
        worker.described.get_nowait()


async def test_a_worker_suspected_of_silence_gets_nothing_new_and_keeps_what_it_has(
    cluster, worker
):
    waiting = listen(cluster, worker)
    tick(cluster, worker, cluster.liveness.suspect_ticks)
    assert view(cluster, worker).state == "SILENT"
    assert "no heartbeat for" in view(cluster, worker).reason
    assert not cluster.fleet.snapshot().ready
    await cluster.until_state(worker, "READY")  # its next heartbeat tells, on the same streams
    assert waiting.empty()
    assert worker.broken.empty()


async def test_heartbeats_put_the_clock_back(cluster):
    worker = cluster.decodes[0]
    streams, suspect_ticks = member(cluster, worker)._streams, cluster.liveness.suspect_ticks
    for _ in range(3):
        tick(cluster, worker, suspect_ticks - 1)
        await seen(lambda: max(stream.silent_ticks for stream in streams) < suspect_ticks - 1)
    assert view(cluster, worker).state == "READY"


async def test_a_lost_worker_fails_who_waits_and_finds_its_streams_broken(cluster, worker):
    worker.stop_still()
    waiting = [listen(cluster, worker, f"h{i}") for i in range(3)]
    tick(cluster, worker, cluster.liveness.lost_ticks)
    for queue in waiting:
        error = await heard(queue)
        assert isinstance(error, Unavailable)
        assert f"{worker.record.incarnation} is lost: no heartbeat" in str(error)
    streams = member(cluster, worker)._streams
    broken = {await heard(worker.broken) for _ in streams}
    assert broken == ({"Watch", "StreamEvents"} if worker in cluster.decodes else {"Watch"})
    assert view(cluster, worker).state == "SILENT"
    assert not cluster.fleet.snapshot().ready


async def test_who_comes_too_late_to_a_lost_worker_is_told_too(cluster, worker):
    worker.stop_still()
    tick(cluster, worker, cluster.liveness.lost_ticks)
    late = listen(cluster, worker)
    tick(cluster, worker, 1)
    assert isinstance(await heard(late), Unavailable)


async def test_a_worker_that_wakes_is_ready_again_on_fresh_streams(cluster, worker):
    forget_described(worker)
    worker.stop_still()
    tick(cluster, worker, cluster.liveness.lost_ticks)
    await reconnecting(cluster, worker)
    tick(cluster, worker, 5)
    assert view(cluster, worker).state == "SILENT"
    worker.wake()
    await cluster.until_state(worker, "READY")
    assert cluster.fleet.snapshot().ready


async def test_connecting_to_a_stopped_worker_is_given_up_and_tried_again(cluster, worker):
    forget_described(worker)
    worker.stop_still()
    tick(cluster, worker, cluster.liveness.lost_ticks)
    for _ in range(3):
        await reconnecting(cluster, worker)
        tick(cluster, worker, cluster.liveness.lost_ticks)
        assert view(cluster, worker).state == "SILENT"
    await reconnecting(cluster, worker)
    worker.wake()
    await cluster.until_state(worker, "READY")


@pytest.mark.parametrize("mute", ["Watch", "StreamEvents"])
async def test_a_decode_worker_needs_both_streams(cluster, mute):
    worker = cluster.decodes[0]
    forget_described(worker)
    worker.stop_still(mute)
    waiting = listen(cluster, worker)
    tick(cluster, worker, cluster.liveness.lost_ticks)
    assert isinstance(await heard(waiting), Unavailable)
    await reconnecting(cluster, worker)
    await seen(lambda: any(stream.alive for stream in member(cluster, worker)._streams))
    assert view(cluster, worker).state == "SILENT"  # one of two is not enough
    worker.wake()
    await cluster.until_state(worker, "READY")


async def test_a_router_that_was_itself_asleep_blames_nobody(cluster_of):
    liveness = LivenessConfig(silence_s=2.0)
    cluster = await cluster_of(prefill=1, decode=1, liveness=liveness)
    waiting = [listen(cluster, worker) for worker in cluster.workers]
    time.sleep(1.5 * liveness.silence_s)  # noqa: ASYNC251 - nothing of this process runs
    await asyncio.sleep(liveness.tick_s)  # the late tick
    assert [view(cluster, worker).state for worker in cluster.workers] == ["READY", "READY"]
    assert all(queue.empty() for queue in waiting)


async def test_silence_is_noticed_by_itself_and_so_is_its_end(cluster_of):
    cluster = await cluster_of(prefill=1, decode=2, liveness=QUICK)
    silent = cluster.decodes[0]
    waiting = listen(cluster, silent)
    silent.stop_still()
    assert isinstance(await heard(waiting), Unavailable)
    assert view(cluster, silent).state == "SILENT"
    await cluster.until_state(cluster.decodes[1], "READY")
    silent.wake()
    await cluster.until_state(silent, "READY")


async def test_streams_of_a_silent_decode_worker_go_on_elsewhere(cluster_of):
    cluster = await cluster_of(prefill=1, decode=2, liveness=QUICK)

    def falls_silent(worker):
        def run(sequence, ahead):
            worker.run_to_end(sequence, ahead, most=2)
            worker.stop_still()

        return run

    first = cluster.decodes[0]
    first.runs.append(falls_silent(first))
    assert (await cluster.run(request_state(max_tokens=6)))[0] == counting(6)
    assert cluster.decodes[1].requests
    first.wake()
    await cluster.until_state(first, "READY")


async def test_a_prompt_on_a_silent_prefill_worker_is_computed_elsewhere(cluster_of):
    cluster = await cluster_of(prefill=2, decode=1, liveness=QUICK)
    first = cluster.prefills[0]

    async def falls_silent(request):
        yield first_token(*token(request.sequence))
        first.stop_still()
        await asyncio.Event().wait()

    first.scripts.append(falls_silent)
    assert (await cluster.run(request_state()))[0] == counting(5)
    assert await heard(first.ended) == "r-1"  # its call was cancelled
    first.wake()


async def test_a_worker_whose_engine_is_stuck_is_stalled_until_it_gets_on(cluster, worker):
    waiting = listen(cluster, worker)
    worker.tell(step_age_ms=1e3 * cluster.liveness.stall_s + 1)
    stalled = await cluster.until_state(worker, "STALLED")
    assert "at one step for 10.0 s" in stalled.reason
    assert "stalled" in str(await heard(waiting))
    late = listen(cluster, worker)
    assert isinstance(await heard(late), Unavailable)  # at the next heartbeat
    worker.tell(step_age_ms=5.0)
    await cluster.until_state(worker, "READY")
    assert worker.broken.empty()  # it answers: there is nothing to open anew


async def test_a_worker_whose_steps_are_long_is_not_stalled_by_one(cluster, worker):
    stall_ms = 1e3 * cluster.liveness.stall_s
    waiting = listen(cluster, worker)
    worker.tell(step_ms=stall_ms / 10, step_age_ms=1.9 * stall_ms)
    await cluster.until(lambda s: s.prefill[0].load.step_ms or s.decode[0].load.step_ms)
    assert view(cluster, worker).state == "READY"
    worker.tell(step_ms=stall_ms / 10, step_age_ms=2.1 * stall_ms)
    await cluster.until_state(worker, "STALLED")
    await heard(waiting)


async def test_heartbeats_without_changes_wake_nobody(cluster):
    watch, events = (stream for stream in member(cluster, cluster.decodes[0])._streams)
    changed = cluster.fleet.changed
    for stream in (watch, events):
        stream.silent_ticks = 7
        await seen(lambda stream=stream: stream.silent_ticks < 7)
    assert not changed.is_set()


async def test_a_sequence_that_nobody_waits_for_is_cancelled_if_it_goes_on(cluster):
    worker = cluster.decodes[0]
    mine = listen(cluster, worker, "mine")
    async with asyncio.timeout(TIMEOUT_S):
        while worker.cancelled.empty():
            worker.send("lost", 1)
            worker.send("mine", 2)
            await asyncio.sleep(0.05)
    assert await heard(worker.cancelled) == "lost"
    assert worker.cancelled.empty()
    assert list((await heard(mine)).token_ids) == [2]


async def test_the_end_of_a_sequence_that_nobody_waits_for_is_no_orphan(cluster):
    worker, followed = cluster.decodes[0], member(cluster, cluster.decodes[0])
    last = listen(cluster, worker, "last")
    worker.send("done", 1, reason=1)
    worker.send("given up", abort="no room")
    worker.send("last", 3)
    await heard(last)
    assert not followed._orphans._now


async def test_one_cancel_of_orphans_at_a_time(cluster):
    worker, followed = cluster.decodes[0], member(cluster, cluster.decodes[0])
    stuck, calls = asyncio.Event(), []

    async def on_cancel(handoff_id):
        calls.append(handoff_id)
        await stuck.wait()

    worker.on_cancel = on_cancel
    followed._orphans = Orphans()
    for _ in range(4):
        followed._orphans.saw("lost")
        followed._cancel_orphans()
    await seen(lambda: calls)
    stuck.set()
    assert await heard(worker.cancelled) == "lost"
    assert calls == ["lost"]


async def test_events_of_an_earlier_stream_are_not_waited_for(cluster):
    """What was subscribed while no stream was open is gone on the worker when one is."""
    worker = cluster.decodes[0]
    worker.stop_still("StreamEvents")
    worker.break_streams()
    worker.wake()
    await cluster.until_state(worker, "UNREACHABLE")
    between = listen(cluster, worker)
    assert "opened anew" in str(await heard(between))
    await cluster.until_state(worker, "READY")


async def test_what_a_watch_tells_of_the_cache_replaces_what_an_earlier_one_told(cluster, worker):
    worker.cached = [1, 2]
    for _ in range(2):
        worker.break_watches()
        await cluster.until_state(worker, "UNREACHABLE")
        await cluster.until_state(worker, "READY")
        assert view(cluster, worker).cached.leading_blocks(worker.cached) == len(worker.cached)
        worker.cached = [3]
    assert view(cluster, worker).cached.leading_blocks([1, 2]) == 0


async def replace(cluster, old, new):
    """Another process takes an old one's address, while the registry still lists both."""
    await old.stop()
    new.record.address = old.record.address
    await new.start()
    await cluster.join(new)


@pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])
async def test_another_process_at_the_same_address_is_not_taken_for_the_old_one(cluster, kind):
    old = (cluster.prefills if kind is PrefillWorker else cluster.decodes)[0]
    old.tell(queue_tokens=7)
    await cluster.until(lambda s: s.prefill[0].load.queue_tokens or s.decode[0].load.queue_tokens)
    member(cluster, old).assigned["h"] = AssignedPrompt(5, 0.0)
    waiting = listen(cluster, old)
    new = kind("new")
    await replace(cluster, old, new)
    try:
        fresh = await cluster.until_state(new, "READY")
        assert (fresh.load.queue_tokens, fresh.assigned, fresh.assigned_sequences) == (0, (), 0)
        await cluster.until(lambda s: "has taken the place" in view(cluster, old).reason)
        assert view(cluster, old).state == "UNREACHABLE"
        assert isinstance(await heard(waiting), Unavailable)
        gone = member(cluster, old)
        with pytest.raises(Stale, match="another process, new, has taken"), gone.calling():
            await gone.worker.Describe(worker_pb2.DescribeRequest())
        # The old one's streams do not come back to fight for the router's place there.
        await asyncio.sleep(0.3)
        assert view(cluster, new).state == "READY"
        assert new.broken.empty()
    finally:
        await new.stop()


# Sequences whose Cancel was lost.


def see(orphans, *handoff_ids):
    for handoff_id in handoff_ids:
        orphans.saw(handoff_id)
    return orphans.end_round()


def test_an_event_that_a_cancel_crossed_is_no_orphan():
    orphans = Orphans()
    assert see(orphans, "h1") == []
    assert see(orphans) == []
    assert see(orphans, "h1") == []


def test_events_that_go_on_are():
    orphans = Orphans()
    assert see(orphans, "h1", "h2") == []
    assert see(orphans, "h2", "h3") == ["h2"]
    assert see(orphans, "h2") == ["h2"]  # that Cancel was lost too
    assert see(orphans) == []


def test_what_is_remembered_and_what_is_told_is_bounded():
    orphans, names = Orphans(), [f"h{i}" for i in range(2 * MOST_ORPHANS)]
    see(orphans, *names)
    assert len(orphans._before) == MOST_ORPHANS
    assert len(see(orphans, *names)) == CANCEL_BATCH
