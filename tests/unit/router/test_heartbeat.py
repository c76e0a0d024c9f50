"""A stream that must not fall silent: opened, cut, and opened again."""

import asyncio

import pytest

from baton.errors import Stale, Unavailable
from router.fleet.heartbeat import HeartbeatStream, LivenessConfig

from .scripted_workers import seen


class Stream:
    """Streams whose ends a test chooses."""

    def __init__(self):
        self.opened = 0
        self.lost = 0
        self._end = asyncio.Event()
        self._error = None

    async def follow(self, stream):
        self.opened += 1
        stream.opened()
        self._end.clear()
        await self._end.wait()
        if self._error is not None:
            raise self._error

    def on_lost(self, changed):
        assert changed
        self.lost += 1

    def end(self, error=None):
        self._error = error
        self._end.set()


@pytest.fixture
async def remote():
    return Stream()


@pytest.fixture
async def stream(remote):
    stream = HeartbeatStream("stream", remote.follow, remote.on_lost)
    assert (stream.alive, stream.state, stream.why) == (False, "UNREACHABLE", "not connected yet")
    await seen(lambda: stream.alive)
    yield stream
    await stream.close()


@pytest.mark.parametrize("silence_s", [0.3, 0.6, 1.5, 30.0])
def test_a_worker_is_suspected_after_three_beats_and_lost_after_twice_that(silence_s):
    liveness = LivenessConfig(silence_s=silence_s)
    assert liveness.lost_ticks * liveness.tick_s == pytest.approx(silence_s)
    assert liveness.suspect_ticks * liveness.tick_s == pytest.approx(silence_s / 2, rel=0.1)
    assert liveness.heartbeat_ms * 3 <= 500 * silence_s
    assert liveness.heartbeat_ms <= 200


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "the worker closed the stream"),
        (Unavailable("it broke"), "it broke"),
        (ValueError("a bug of ours"), "ValueError: a bug of ours"),
    ],
)
async def test_a_stream_that_ends_is_told_and_opened_again(stream, remote, error, why):
    remote.end(error)
    await seen(lambda: remote.lost)
    assert (stream.alive, stream.state, stream.why) == (False, "UNREACHABLE", why)
    await seen(lambda: stream.alive)
    assert (remote.opened, remote.lost) == (2, 1)


async def test_after_stale_there_is_no_other_stream(stream, remote):
    remote.end(Stale("it is another process"))
    await seen(lambda: remote.lost)
    await seen(stream._task.done)
    assert (stream.alive, stream.why, remote.opened) == (False, "it is another process", 1)


async def test_a_stream_that_is_cut_is_silent_until_the_next_is_open(stream, remote):
    stream.cut("not a word")
    stream.opened()  # what was on its way over the old stream is no heartbeat
    assert (stream.alive, stream.state, stream.why) == (False, "SILENT", "not a word")
    await seen(lambda: stream.alive)
    assert (remote.opened, remote.lost) == (2, 0)


async def test_between_two_streams_nobody_is_silent(stream, remote):
    stream.tick()
    assert stream.silent_ticks == 1
    stream.heard()
    assert stream.silent_ticks == 0
    remote.end()
    await seen(lambda: remote.lost)
    stream.tick()
    assert stream.silent_ticks == 0
    stream.cut("nothing is open")
    await seen(lambda: stream.alive)


async def test_one_that_never_answered_is_not_asked_again_at_once(remote):
    async def refuse(stream):
        remote.opened += 1
        raise Unavailable("nobody is there")

    told = []
    stream = HeartbeatStream("stream", refuse, told.append, lambda: 30.0)
    await asyncio.sleep(0.5)
    assert (remote.opened, told) == (1, [False])
    await stream.close()
    stream = HeartbeatStream("stream", refuse, told.append)
    await seen(lambda: remote.opened == 4)
    assert not any(told)  # it was not there before
    await stream.close()
