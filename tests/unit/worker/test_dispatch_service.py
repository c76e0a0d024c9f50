"""What a worker accepts on routers' streams, and how it divides its time between them."""

import asyncio
import contextlib
import time

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.net import message_stream, rpc
from baton.net.server import Health, bind
from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.dispatch_pb2 import RouterMessage, WorkerMessage
from baton.v1.worker_pb2 import LoadReport
from baton.worker import dispatch_service
from baton.worker.dispatch_service import DispatchService, count_fields
from baton.worker.metrics import LoadTracker

from .running import CONNECT, PATIENCE_S, until


class Worker:
    """Handles a part in a millisecond."""

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
async def service():
    """Of a worker that does little."""
    service = DispatchService(Worker())
    server, service.address = bind("127.0.0.1", 0, max_message_bytes=2 << 20)
    service.add_to(server)
    Health().add_to(server, [dispatch_service.NAME])
    await server.start()
    yield service
    await service.aclose()
    await server.stop(None)


@pytest.fixture
async def connect(service):
    """Opens a router's stream, of raw bytes, and sends messages."""
    async with contextlib.AsyncExitStack() as stack:

        async def connect(name, *messages, **metadata):
            # A connection of its own, as each router has.
            channel = await stack.enter_async_context(rpc.channel(service.address))
            pairs = {"baton-router-id": name, **metadata}
            call = channel.stream_stream(CONNECT)(metadata=tuple(pairs.items()))
            for message in messages:
                await call.write(message.SerializeToString())
            return call

        yield connect


@pytest.fixture
async def opened(service, connect):
    """A router's stream, its first message, and the worker's end of it."""
    call = await connect("r")
    first = WorkerMessage.FromString(await call.read())
    (router,) = service.routers
    return call, first, router


async def ended(call):
    """The status with which the worker ends a stream."""
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.RpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
    return raised.value


async def test_parts_of_messages_leave_others_their_turns(service, connect):
    """However many, in however many messages, of however many streams."""
    many = RouterMessage(cancel=["c"] * 100, reserve=[ReserveRequest()])
    small = [RouterMessage(cancel=["s"])] * 100
    calls = [await connect(name) for name in "abcd"]
    worker, seen = service.worker, set()  # how many were done in each turn of ours

    async def write_all(call):
        for one in (many, *small):
            await call.write(one.SerializeToString())

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as writing:
        for call in calls:
            writing.create_task(write_all(call))
        while len(worker.done) < 4 * 201:
            seen.add(len(worker.done))
            await asyncio.sleep(0)
    assert len(seen) > 30  # five parts fit into a turn
    for name in "abcd":
        done = [part for whose, part in worker.done if whose == name]
        assert done == [*many.cancel, *many.reserve, *(["s"] * 100)]
    assert {whose for whose, _ in worker.done[:350]} == {*"abcd"}  # in turn


@pytest.mark.parametrize(
    ("sent", "code", "why"),
    [
        (bytes(3 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
        (bytes(Worker.max_message_bytes + 1), grpc.StatusCode.INVALID_ARGUMENT, "too large"),
        (
            RouterMessage(cancel=[""] * 4097).SerializeToString(),
            grpc.StatusCode.INVALID_ARGUMENT,
            "over 4096 parts",
        ),
        (b"\x0a\x05", grpc.StatusCode.INVALID_ARGUMENT, "no RouterMessage"),
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "no RouterMessage"),
    ],
)
async def test_bytes_that_are_refused_end_their_stream_alone(service, connect, sent, code, why):
    other = await connect("other")
    call = await connect("r")
    await call.read()
    with contextlib.suppress(grpc.RpcError):
        await call.write(sent)
    error = await ended(call)
    assert (error.code(), why in error.details()) == (code, True)
    await until(lambda: service.worker.left == ["r"])
    await other.write(RouterMessage(cancel=["h"]).SerializeToString())
    await until(lambda: service.worker.done == [("other", "h")])


async def test_a_refusal_during_the_first_message_has_its_status(service, connect):
    """The worker's first write is still under way when the stream ends."""

    async def refused():
        call = await connect("r")
        with contextlib.suppress(grpc.RpcError):
            await call.write(b"\xff\xff")
        return (await ended(call)).code()

    codes = [await asyncio.gather(*(refused() for _ in range(8))) for _ in range(40)]
    assert {code for some in codes for code in some} == {grpc.StatusCode.INVALID_ARGUMENT}


async def test_a_heartbeat_interval_that_is_no_number_is_refused(service, connect):
    error = await ended(await connect("r", **{"baton-heartbeat-ms": "often"}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "milliseconds" in error.details()
    assert not service.routers


async def test_streams_are_limited_also_where_one_connection_has_thousands(
    service, connect, monkeypatch, caplog
):
    monkeypatch.setattr(dispatch_service, "MAX_ROUTERS", 3)
    routers = [await connect("r") for _ in range(3)]
    for router in routers:
        await router.read()
    async with rpc.channel(service.address) as channel:
        calls = [channel.stream_stream(CONNECT)() for _ in range(1000)]
        codes = await asyncio.gather(*[call.code() for call in calls])
    assert {*codes} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(service.routers) == 3 and len(caplog.records) <= 2


@pytest.mark.parametrize("how", ["half-close", "cancel"])
async def test_a_stream_that_ends_frees_what_its_router_asked_for(service, opened, how):
    call, _, _ = opened
    if how == "half-close":
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    else:
        call.cancel()
    await until(lambda: service.worker.left == ["r"] and not service.routers)


async def test_a_router_that_does_not_read_is_cut_off(service, opened, monkeypatch):
    monkeypatch.setattr(message_stream, "MAX_UNSENT_BYTES", 1 << 20)
    call, _, router = opened
    async with asyncio.timeout(PATIENCE_S):
        while not router.ended.done():
            router.outgoing.events.add(abort_reason="x" * (1 << 18))
            await asyncio.sleep(0)
    assert router._unsent_bytes <= 2 << 20 and service.worker.left == ["r"]
    error = await ended(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "left unread" in error.details()


async def test_what_a_slow_router_missed_comes_in_few_messages_with_the_last_load(service, opened):
    call, first, router = opened
    assert (first.incarnation, first.HasField("report")) == ("d-1", True)
    sent = 0
    while not router._sealed:  # until gRPC takes no more
        router.outgoing.events.add(handoff_id=str(sent), abort_reason="x" * 100_000)
        sent += 1
        await asyncio.sleep(0.001)
    for queued in (5, 7):
        service.worker.report = lambda queued=queued: LoadReport(load={"queue_tokens": queued})
        service.worker.load_tracker.wake()
        await asyncio.sleep(0.06)
    for _ in range(200):
        router.outgoing.events.add(handoff_id=str(sent))
        sent += 1
        await asyncio.sleep(0)
    names, messages, reports = [], 0, []
    async with asyncio.timeout(PATIENCE_S):
        while len(names) < sent or not reports:
            message = WorkerMessage.FromString(await call.read())
            messages += 1
            names += [event.handoff_id for event in message.events]
            if message.HasField("report"):
                reports.append(message.report.load.queue_tokens)
    assert names == [str(number) for number in range(sent)], "none is lost or comes twice"
    assert messages < sent * 3 / 4 and reports[-1] == 7


async def test_a_report_is_sent_though_its_timer_fires_early(service, opened):
    call, _, router = opened
    service.worker.report = lambda: LoadReport(load={"queue_tokens": 5})
    service.worker.load_tracker.wake()
    assert router._loop.time() < router._report_after
    router._reporting.cancel()
    router._report()
    async with asyncio.timeout(PATIENCE_S):
        assert WorkerMessage.FromString(await call.read()).report.load.queue_tokens == 5


async def test_a_report_that_is_early_goes_with_the_next_message(service, opened):
    call, _, router = opened
    service.worker.report = lambda: LoadReport(load={"queue_tokens": 5})
    router._report_after = router._loop.time() + 1e6
    service.worker.load_tracker.wake()
    router.outgoing.events.add(handoff_id="before")
    async with asyncio.timeout(PATIENCE_S):
        assert not WorkerMessage.FromString(await call.read()).HasField("report")
        router._report_after = 0.0
        router.outgoing.events.add(handoff_id="after")
        message = WorkerMessage.FromString(await call.read())
    assert [event.handoff_id for event in message.events] == ["after"]
    assert message.report.load.queue_tokens == 5


async def test_a_router_that_wants_no_heartbeats_gets_none_and_may_say_nothing(service, connect):
    silent = await connect("silent")
    often = await connect("often", **{"baton-heartbeat-ms": "50"})
    await silent.read()
    for _ in range(5):
        await asyncio.wait_for(often.read(), PATIENCE_S)
    assert not silent.done() and len(service.routers) == 2
    (router,) = [one for one in service.routers if one.name == "silent"]
    assert router._heartbeat is None


async def test_a_worker_that_leaves_sends_what_is_on_its_way_and_takes_no_more(
    service, connect, opened
):
    call, _, router = opened
    router.outgoing.events.add(handoff_id="last")
    service.worker.report = lambda: LoadReport(state=3)
    await service.aclose()
    message = WorkerMessage.FromString(await call.read())
    assert message.events[0].handoff_id == "last" and message.report.state == 3
    assert await call.read() is grpc.aio.EOF
    assert (await ended(await connect("late"))).code() is grpc.StatusCode.UNAVAILABLE


async def test_reflection_describes_the_service_so_that_any_client_can_call_it(service, connect):
    """As grpcurl does: names, descriptors, and messages that are made of them."""
    async with rpc.channel(service.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest
        wanted = [
            request(list_services=""),
            request(file_containing_symbol="baton.v1.DispatchService"),
        ]
        listed, found = [answer async for answer in stub.ServerReflectionInfo(iter(wanted))]
    names = [one.name for one in listed.list_services_response.service]
    assert "baton.v1.DispatchService" in names
    assert any(
        b"DispatchService" in file for file in found.file_descriptor_response.file_descriptor_proto
    )
    service_ = descriptor_pool.Default().FindServiceByName("baton.v1.DispatchService")
    connect_ = service_.methods_by_name["Connect"]
    assert (connect_.client_streaming, connect_.server_streaming) == (True, True)
    assert connect_.input_type.full_name == "baton.v1.RouterMessage"


def test_fields_are_counted_as_they_are_parsed():
    message = RouterMessage(cancel=["a", "b" * 300], reserve=[ReserveRequest()], keep_traces=["t"])
    assert count_fields(message.SerializeToString(), 100) == 4
    assert count_fields(b"\x12\x00" * 1000, 10) == 11
    fixed = b"\x61" + bytes(8) + b"\x65" + bytes(4) + b"\x58\xff\x01"  # of no known field
    assert count_fields(fixed, 10) == 3
    for broken in (b"\x12", b"\x12\x80", b"\x0b", b"\xff" * 20):
        with pytest.raises(DecodeError):
            count_fields(broken, 10)
