"""What is collected into a message, and how a stream ends, over an end that tests write."""

import asyncio

import grpc
import pytest

from baton.errors import InvalidRequest, Unavailable
from baton.net import message_stream
from baton.net.message_stream import MessageStream
from baton.v1.dispatch_pb2 import RouterMessage


class Raw:
    """The other end: reads what is queued, and takes a message when `taking` is set."""

    def __init__(self):
        self.incoming, self.written = asyncio.Queue(), []
        self.taking = asyncio.Event()
        self.taking.set()

    async def read(self):
        data = await self.incoming.get()
        if isinstance(data, Exception):
            raise data
        return data

    async def write(self, data):
        self.written.append(RouterMessage.FromString(data))
        await self.taking.wait()


@pytest.fixture
async def raw():
    return Raw()


@pytest.fixture
async def stream(raw):
    """One that runs; `stream.received` has what has come."""
    stream, received = MessageStream(raw, RouterMessage, RouterMessage), []

    async def reading():
        async for message in stream.messages():
            received.append(message)

    stream.received, stream.life = received, asyncio.create_task(stream.run(reading()))
    await asyncio.sleep(0)
    yield stream
    stream.life.cancel()
    await asyncio.wait({stream.life})


async def turns(count=6):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_a_turn_adds_is_one_message(raw, stream):
    for name in "ab":
        stream.outgoing.cancel.append(name)
    stream.outgoing.keep_traces.append("t")
    await turns()
    assert raw.written == [RouterMessage(cancel="ab", keep_traces="t")]
    stream.outgoing.cancel.append("c")
    stream.seal()
    stream.outgoing.cancel.append("d")
    await turns()
    assert [*raw.written[-1].cancel][-1] == "d" and raw.incoming.empty()


async def test_what_is_not_urgent_leaves_with_the_next_message_or_by_itself(
    raw, stream, monkeypatch
):
    monkeypatch.setattr(message_stream, "SOON_S", 1e6)
    stream.outgoing_soon.cancel.append("a")
    await turns()
    stream.outgoing_soon.cancel.append("b")
    await turns()
    assert not raw.written
    stream.outgoing.cancel.append("c")
    stream.outgoing_soon.cancel.append("d")
    await turns()
    assert raw.written == [RouterMessage(cancel="abcd")]
    stream.outgoing_soon.cancel.append("e")
    stream.flush()
    await turns()
    assert raw.written[1:] == [RouterMessage(cancel="e")]
    monkeypatch.setattr(message_stream, "SOON_S", 0.0)
    stream.outgoing_soon.cancel.append("f")
    while len(raw.written) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert raw.written[2] == RouterMessage(cancel="f")


async def test_turns_in_which_nothing_is_taken_share_a_message(raw, stream):
    raw.taking.clear()
    for number in range(50):
        stream.outgoing.cancel.append(str(number))
        await turns(2)
    raw.taking.set()
    await turns(20)
    cancelled = [name for message in raw.written for name in message.cancel]
    assert cancelled == [str(number) for number in range(50)] and len(raw.written) <= 3
    assert stream._unsent_bytes == 0


async def test_too_many_unsent_bytes_end_the_stream(raw, stream, monkeypatch):
    monkeypatch.setattr(message_stream, "MAX_UNSENT_BYTES", 1000)
    raw.taking.clear()
    for _ in range(20):
        stream.outgoing.cancel.append("x" * 100)
        await turns(2)
    with pytest.raises(Unavailable, match="left unread"):
        await stream.life
    stream.outgoing.cancel.append("late")  # is dropped
    await turns()
    assert not stream._sealed


@pytest.mark.parametrize(
    ("broken", "error", "text"),
    [
        (b"\xff\xff", InvalidRequest, "no RouterMessage"),
        (Unavailable("it broke"), Unavailable, "it broke"),
    ],
    ids=["no message", "the reader's error"],
)
async def test_what_cannot_be_read_ends_the_stream(raw, stream, broken, error, text):
    raw.incoming.put_nowait(RouterMessage(cancel=["a"]).SerializeToString())
    raw.incoming.put_nowait(broken)
    with pytest.raises(error, match=text):
        await stream.life
    assert stream.received == [RouterMessage(cancel=["a"])]


@pytest.mark.parametrize("end", ["theirs", "ours"])
async def test_what_was_added_before_a_stream_is_closed_is_sent(raw, stream, end):
    stream.outgoing_soon.cancel.append("last")
    if end == "theirs":
        raw.incoming.put_nowait(grpc.aio.EOF)
    else:
        stream.close()
    await stream.life
    assert raw.written == [RouterMessage(cancel=["last"])]


async def test_an_end_that_takes_nothing_does_not_keep_a_closed_stream(raw, stream, monkeypatch):
    monkeypatch.setattr(message_stream, "CLOSE_S", 0.05)
    raw.taking.clear()
    stream.outgoing.cancel.append("last")
    raw.incoming.put_nowait(grpc.aio.EOF)
    await stream.life
