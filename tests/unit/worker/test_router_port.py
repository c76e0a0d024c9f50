"""How a worker counts that a router is silent, and what it takes from one at most."""

import asyncio
import contextlib
import struct
import time
from unittest.mock import Mock

import pytest
import uvloop
from google.protobuf.message import DecodeError

from baton.net.connection import count_fields, framed
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.dispatch_pb2 import RouterMessage
from baton.v1.worker_pb2 import LoadReport
from baton.worker import router_port
from baton.worker.metrics import LoadTracker
from baton.worker.router_port import MIN_HEARTBEAT_S, RouterConnection, RouterPort

from .running import until


def test_a_silence_is_counted_in_heartbeats_whatever_is_sent_meanwhile():
    """uvloop's timers, of whole milliseconds, come a little early."""

    async def beats():
        worker = Mock(load_tracker=LoadTracker(), report=LoadReport, incarnation="d-1")
        connection = RouterConnection(Mock(worker=worker, routers=set()))
        connection._beat = Mock(wraps=connection._beat)
        transport = Mock(is_closing=lambda: False, get_write_buffer_size=lambda: 0)
        transport.get_extra_info = lambda name: None if name == "peercert" else Mock()
        connection.connection_made(transport)
        hello = RouterMessage()
        hello.hello.heartbeat_ms = 50
        connection.take(hello)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for pause_s in (0.007, 0.0213, 0.034) * 8:
            await asyncio.sleep(pause_s)
            _ = connection.outgoing
        took = loop.time() - began
        connection.connection_lost(None)
        return connection._beats_unheard, took

    count, took = uvloop.run(beats())
    assert 0 < count <= took / MIN_HEARTBEAT_S + 1


class Worker:
    """Takes a millisecond for each part."""

    incarnation = "d-1"
    max_message_bytes = 1 << 20

    def __init__(self):
        self.load_tracker, self.done, self.left = LoadTracker(), [], []

    def report(self):
        return LoadReport()

    def take(self, router, message):
        for part in (*message.cancel, *message.reserve):
            time.sleep(0.001)
            self.done.append((router.name, part))
            yield

    def lost(self, router):
        self.left.append(router.name)


@pytest.fixture
async def port():
    """Of a worker that is not asked for much."""
    port = RouterPort(Worker())
    port.number = port.listen("127.0.0.1", 0)
    await port.open()
    yield port
    await port.aclose()


async def connected(port, *messages, hello="r"):
    """A router's reader and writer, behind its hello, if it says one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
    for message in ([RouterMessage(hello={"router_id": hello})] if hello else []) + [*messages]:
        writer.write(framed(message))
    return reader, writer


async def ended(reader):
    """Once the worker has ended the connection."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


async def test_parts_of_messages_leave_others_their_turns(port):
    """However many, in however many messages, of however many connections."""
    many = RouterMessage(cancel=["c"] * 100, reserve=[ReserveRequest()])
    small = [RouterMessage(cancel=["s"])] * 100
    writers = [(await connected(port, many, *small, hello=name))[1] for name in ("a", "b")]
    seen = set()  # how many were done in each turn of ours
    async with asyncio.timeout(60):
        while len(port.worker.done) < 402:
            seen.add(len(port.worker.done))
            await asyncio.sleep(0)
    assert len(seen) > 50  # five parts fit into a turn
    for name in ("a", "b"):
        done = [part for whose, part in port.worker.done if whose == name]
        assert done == [*many.cancel, *many.reserve, *(["s"] * 100)]
    first = [whose for whose, _ in port.worker.done[:150]]
    assert {*first} == {"a", "b"}  # in turn
    for writer in writers:
        writer.close()


@pytest.mark.parametrize(
    ("hello", "sent", "why"),
    [
        ("", struct.pack(">I", router_port.MAX_HELLO_BYTES + 1), "too large"),
        ("r", struct.pack(">I", Worker.max_message_bytes + 1), "too large"),
        ("r", framed(RouterMessage(cancel=[""] * 4097)), "over 4096 parts"),
        ("r", struct.pack(">I", 2) + b"\x12\x05", "no RouterMessage"),
    ],
)
async def test_what_is_too_much_ends_the_connection(port, caplog, hello, sent, why):
    reader, writer = await connected(port, hello=hello)
    writer.write(sent)
    await ended(reader)
    writer.close()
    assert [why in record.getMessage() for record in caplog.records] == [True]
    assert port.worker.done == []


async def test_bytes_of_messages_that_do_not_end_are_bounded(port, monkeypatch):
    monkeypatch.setattr(router_port, "MAX_UNFINISHED_BYTES", 300_000)
    half = struct.pack(">I", 1 << 20)
    small, large = await connected(port), await connected(port)
    small[1].write(half + bytes(100_000))
    await until(lambda: sum(router.num_unfinished for router in port.routers) > 99_000)
    large[1].write(half + bytes(250_000))
    await ended(large[0])
    await until(lambda: len(port.routers) == 1)
    for _, writer in (small, large):
        writer.close()


async def test_connections_are_limited(port, monkeypatch, caplog):
    monkeypatch.setattr(router_port, "MAX_ROUTERS", 3)
    routers = [await connected(port) for _ in range(3)]
    for _ in range(20):
        reader, writer = await connected(port)
        await ended(reader)
        writer.close()
    assert len(port.routers) == 3 and len(caplog.records) == 1
    for _, writer in routers:
        writer.close()


@pytest.mark.parametrize("heartbeat_ms", [0, (1 << 32) - 1])
async def test_a_silent_router_is_lost_whatever_heartbeats_it_wants(
    port, monkeypatch, heartbeat_ms
):
    monkeypatch.setattr(router_port, "ROUTER_SILENCE_S", 0.1)
    monkeypatch.setattr(router_port, "BEAT_S", 0.05)
    hello = RouterMessage(hello={"router_id": "r", "heartbeat_ms": heartbeat_ms})
    reader, writer = await connected(port, hello, hello="")
    writer.write(struct.pack(">I", 1000) + bytes(10))  # and no more
    await ended(reader)
    writer.close()
    assert port.worker.left == ["r"]


def test_fields_are_counted_as_they_are_parsed():
    message = RouterMessage(cancel=["a", "b" * 300], hello={"router_id": "r"}, keep_traces=["t"])
    assert count_fields(message.SerializeToString(), 100) == 4
    assert count_fields(b"\x12\x00" * 1000, 10) == 11
    fixed = b"\x61" + bytes(8) + b"\x65" + bytes(4) + b"\x58\xff\x01"  # of no known field
    assert count_fields(fixed, 10) == 3
    for broken in (b"\x12", b"\x12\x80", b"\x0b", b"\xff" * 20):
        with pytest.raises(DecodeError):
            count_fields(broken, 10)
