"""Workers that fall silent, stall, wake up or are replaced, as a member of the fleet sees them.

Workers answer over real connections. Time that must not matter passes in ticks that tests make.
"""

import asyncio

import pytest

from baton.errors import Stale, Unavailable
from baton.local import certs
from baton.net import tls
from router.fleet.kv_index import AssignedPrompt
from router.fleet.liveness import HeartbeatStream, LivenessConfig

from .scripted_workers import DecodeWorker, PrefillWorker, received, seen
from .snapshots import decode_views, prefill_views


@pytest.fixture(params=["prefill", "decode"])
def worker(request, cluster):
    return {"prefill": cluster.prefills, "decode": cluster.decodes}[request.param][0]


def state(cluster, worker):
    return cluster.member(worker).view.state


def tick(cluster, worker, times):
    """Lets ticks pass for one worker without any time in which it could answer."""
    for _ in range(times):
        cluster.member(worker).tick()


# Silence.


@pytest.mark.parametrize("silence_s", [0.3, 0.6, 1.5, 30.0])
def test_a_worker_is_suspected_when_a_heartbeat_is_late_and_lost_after_three(silence_s):
    liveness = LivenessConfig(silence_s=silence_s)
    assert liveness.lost_ticks * liveness.tick_s == pytest.approx(silence_s)
    suspected_s = liveness.lost_ticks // 2 * liveness.tick_s
    assert liveness.heartbeat_ms / 1e3 * 1.4 <= suspected_s
    assert liveness.heartbeat_ms * 3 <= 1e3 * silence_s


async def test_a_suspected_worker_gets_nothing_new_and_keeps_what_it_has(cluster, worker):
    waiting = cluster.subscribe(worker)
    tick(cluster, worker, cluster.liveness.lost_ticks // 2)
    assert state(cluster, worker) == "SILENT"
    assert "no heartbeat for" in cluster.member(worker).view.reason
    assert cluster.fleet.snapshot().why_not_ready, "nor does decode step in for a moment"
    await cluster.until_state(worker, "READY")  # by its next heartbeat, on the same streams
    assert waiting.empty() and worker.broken.empty()


async def test_a_lost_workers_requests_fail_and_it_comes_back_on_a_fresh_connection(
    cluster, worker
):
    await received(worker.connected)
    worker.stop_still()
    waiting = [cluster.subscribe(worker, f"h{i}") for i in range(3)]
    for _ in range(3):  # an answer is given up and another one waited for
        tick(cluster, worker, cluster.liveness.lost_ticks)
        assert state(cluster, worker) == "SILENT"
        await received(worker.connected)
    for queue in waiting:
        error = await received(queue)
        assert isinstance(error, Unavailable)
        assert f"{worker.record.incarnation} is lost: no heartbeat" in str(error)
    assert await received(worker.broken) == "router"
    late = cluster.subscribe(worker)
    tick(cluster, worker, 1)
    assert isinstance(await received(late), Unavailable)
    with pytest.raises(Unavailable, match="not connected: no heartbeat"):
        _ = cluster.member(worker).outgoing
    worker.wake()
    await cluster.until_state(worker, "READY")


async def test_heartbeats_reset_the_count_of_silence_and_are_no_change(cluster):
    changed, stream = cluster.next_change(), cluster.member(cluster.decodes[0])._stream
    stream.silent_ticks = 7
    await seen(lambda: stream.silent_ticks < 7)
    assert not changed.is_set()


async def test_what_is_sent_in_one_turn_is_one_message(cluster):
    """Also to a worker: what a router tells it leaves together."""
    worker, messages = cluster.decodes[0], []
    take = worker.take
    worker.take = lambda router, message: messages.append(message) or take(router, message)
    mine, other = cluster.subscribe(worker, "mine"), cluster.subscribe(worker, "other")
    for handoff_id, token_id in (("mine", 1), ("nobody's", 9), ("other", 3), ("mine", 2)):
        worker.send(handoff_id, token_id)
    assert [list((await received(mine)).token_ids) for _ in range(2)] == [[1], [2]]
    assert list((await received(other)).token_ids) == [3] and other.empty()
    member = cluster.member(worker)
    member.cancel("mine")
    member.keep_traces(["t"])
    member.cancel("other")
    await seen(lambda: not worker.cancelled.empty())
    (message,) = messages
    assert (list(message.cancel), worker.kept) == (["mine", "other"], ["t"])
    # But for what is so much that a worker would refuse it together.
    names = [f"{number}" * 10_000 for number in range(5)]
    for name in names:
        member.cancel(name)
    await seen(lambda: sum(len(message.cancel) for message in messages) == 7)
    assert [list(message.cancel) for message in messages[1:]] == [names[:2], names[2:]]


async def test_a_worker_whose_engine_is_stuck_is_stalled_until_it_gets_on(cluster, worker):
    stall_ms, waiting = 1e3 * cluster.liveness.stall_s, cluster.subscribe(worker)
    # Twenty of its usual steps may take longer.
    worker.tell(step_ms=stall_ms / 10, step_age_ms=1.9 * stall_ms)
    await cluster.until(
        lambda s: prefill_views(s)[0].load.step_ms or decode_views(s)[0].load.step_ms
    )
    assert state(cluster, worker) == "READY" and waiting.empty()
    worker.tell(step_age_ms=stall_ms + 1)
    stalled = await cluster.until_state(worker, "STALLED")
    assert "at one step for 10.0 s" in stalled.reason
    tick(cluster, worker, 1)
    assert "stalled" in str(await received(waiting))
    late = cluster.subscribe(worker)
    tick(cluster, worker, 1)
    assert isinstance(await received(late), Unavailable)
    worker.tell(step_age_ms=5.0)
    await cluster.until_state(worker, "READY")
    assert worker.broken.empty()  # it answers: there is nothing to open anew


# Streams that end, over a remote end that tests write.


class Remote:
    def __init__(self):
        self.opened, self.lost = 0, []
        self._end = asyncio.Queue()

    async def follow(self, stream):
        self.opened += 1
        stream.opened()
        if error := await self._end.get():
            raise error

    def end(self, error=None):
        self._end.put_nowait(error)


@pytest.fixture
async def remote():
    return Remote()


@pytest.fixture
async def stream(remote):
    stream = HeartbeatStream("stream", remote.follow, remote.lost.append)
    assert (stream.alive, stream.state, stream.why) == (False, "UNREACHABLE", "not connected yet")
    await seen(lambda: stream.alive)
    yield stream
    await stream.close()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "the worker closed the stream"),
        (Unavailable("it broke"), "it broke"),
        (ValueError("a bug of ours"), "ValueError: a bug of ours"),
        (Stale("it is another process"), "it is another process"),
    ],
)
async def test_a_stream_that_ends_is_opened_again_unless_the_worker_was_replaced(
    stream, remote, error, why
):
    stream.tick()
    assert stream.silent_ticks == 1
    remote.end(error)
    await seen(lambda: remote.lost)
    assert (stream.alive, stream.state, stream.why) == (False, "UNREACHABLE", why)
    stream.tick()
    assert stream.silent_ticks == 0, "between two streams there is no silence"
    await seen(stream._task.done if isinstance(error, Stale) else lambda: stream.alive)
    assert (remote.opened, remote.lost) == (1 if isinstance(error, Stale) else 2, [True])


async def test_a_stream_that_is_cut_is_silent_until_the_next_is_open(stream, remote):
    stream.cut("no heartbeat")
    stream.opened()  # what was on its way over the old stream is no heartbeat
    assert (stream.alive, stream.state, stream.why) == (False, "SILENT", "no heartbeat")
    await seen(lambda: stream.alive)
    assert (remote.opened, remote.lost) == (2, [])


async def test_a_worker_that_never_answered_is_called_rarely(remote):
    async def refuse(stream):
        remote.opened += 1
        raise Unavailable("not there")

    stream = HeartbeatStream("stream", refuse, remote.lost.append, lambda: 30.0)
    await asyncio.sleep(0.3)
    assert (remote.opened, remote.lost) == (1, [False])  # it was not there before
    await stream.close()
    stream = HeartbeatStream("stream", refuse, remote.lost.append)
    await seen(lambda: remote.opened == 4)
    await stream.close()


async def test_a_new_connection_replaces_what_was_known_of_the_cache(cluster, worker):
    worker.load_tracker.cached = {1, 2}
    for _ in range(2):
        worker.break_connections()
        view = await cluster.until_state(worker, "UNREACHABLE")
        assert view.reason == "it broke"
        await cluster.until_state(worker, "READY")
        slot = cluster.member(worker).view.slot
        assert set(cluster.fleet._index._stored[slot]) == worker.load_tracker.cached
        worker.load_tracker.cached = {3}


@pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])
async def test_another_process_at_the_same_address_is_not_taken_for_the_old_one(cluster, kind):
    """The registry still lists both."""
    old, new = (cluster.prefills if kind is PrefillWorker else cluster.decodes)[0], kind("new")
    old.tell(queue_tokens=7)
    await cluster.until(
        lambda s: prefill_views(s)[0].load.queue_tokens or decode_views(s)[0].load.queue_tokens
    )
    gone = cluster.member(old)
    gone.assign("h", AssignedPrompt(5, 0.0))
    waiting = cluster.subscribe(old)
    await old.stop()
    new.record.address = old.record.address
    await cluster.add(new)
    fresh = await cluster.until_state(new, "READY")
    assert (fresh.load.queue_tokens, fresh.assigned, fresh.assigned_sequences) == (0, (), 0)
    await cluster.until(lambda s: "has taken the place" in gone.view.reason)
    assert gone.view.state == "UNREACHABLE"
    assert isinstance(await received(waiting), Unavailable)
    with pytest.raises(Stale, match="another process, new, has taken"):
        _ = gone.outgoing
    assert await received(new.broken) == "router"  # the connection that expected the old one
    # It does not come back.
    await asyncio.sleep(0.3)
    assert state(cluster, new) == "READY" and new.broken.empty()


async def test_a_worker_is_connected_to_again_with_the_certificates_of_that_time(
    cluster_of, tmp_path, monkeypatch
):
    certs.write(tmp_path, [])
    ours = (tmp_path / name for name in ("worker.pem", "worker-key.pem", "ca.pem"))
    monkeypatch.setattr(tls, "_process", tls.Credentials(*ours))
    cluster = await cluster_of(0, 1)
    (worker,) = cluster.decodes
    await cluster.until_state(worker, "READY")
    (tmp_path / "ca-key.pem").unlink()
    certs.write(tmp_path, [])  # another authority, and all certificates anew
    await worker.stop()
    assert (await cluster.until_state(worker, "UNREACHABLE")).reason
    await worker.start()
    await cluster.until_state(worker, "READY")
