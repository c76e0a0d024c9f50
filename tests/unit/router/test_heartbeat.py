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

    async def follow(self, line):
        self.opened += 1
        line.opened()
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
async def stream():
    return Stream()


@pytest.fixture
async def line(stream):
    line = HeartbeatStream("line", stream.follow, stream.on_lost)
    assert (line.alive, line.state, line.why) == (False, "UNREACHABLE", "not connected yet")
    await seen(lambda: line.alive)
    yield line
    await line.close()


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
async def test_a_stream_that_ends_is_told_and_opened_again(line, stream, error, why):
    stream.end(error)
    await seen(lambda: stream.lost)
    assert (line.alive, line.state, line.why) == (False, "UNREACHABLE", why)
    await seen(lambda: line.alive)
    assert (stream.opened, stream.lost) == (2, 1)


async def test_after_stale_there_is_no_other_stream(line, stream):
    stream.end(Stale("it is another process"))
    await seen(lambda: stream.lost)
    await seen(line._task.done)
    assert (line.alive, line.why, stream.opened) == (False, "it is another process", 1)


async def test_a_stream_that_is_cut_is_silent_until_the_next_is_open(line, stream):
    line.cut("not a word")
    line.opened()  # what was on its way over the old stream is no heartbeat
    assert (line.alive, line.state, line.why) == (False, "SILENT", "not a word")
    await seen(lambda: line.alive)
    assert (stream.opened, stream.lost) == (2, 0)


async def test_between_two_streams_nobody_is_silent(line, stream):
    line.tick()
    assert line.silent_ticks == 1
    line.heard()
    assert line.silent_ticks == 0
    stream.end()
    await seen(lambda: stream.lost)
    line.tick()
    assert line.silent_ticks == 0
    line.cut("nothing is open")
    await seen(lambda: line.alive)


async def test_one_that_never_answered_is_not_asked_again_at_once(stream):
    async def refuse(line):
        stream.opened += 1
        raise Unavailable("nobody is there")

    told = []
    line = HeartbeatStream("line", refuse, told.append, lambda: 30.0)
    await asyncio.sleep(0.5)
    assert (stream.opened, told) == (1, [False])
    await line.close()
    line = HeartbeatStream("line", refuse, told.append)
    await seen(lambda: stream.opened == 4)
    assert not any(told)  # it was not there before
    await line.close()
