"""Errors keep their meaning over gRPC: one table both ways, with retry advice and the bad field."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import struct
import weakref
from typing import Any

import pytest
import pytest_asyncio
from grpc import ChannelConnectivity, StatusCode
from grpc.aio import AioRpcError, Metadata
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import errors
from baton.net import rpc
from baton.net.server import Health, bind
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.proxy import Proxy
from tests.waiting import WAIT_S, eventually

BASES = {errors.BatonError, errors.RetryableError, errors.TransferFailed}
AT_START = {errors.ConfigError, errors.CheckpointError}  # no caller meets them
ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)]
OVER_HTTP = {errors.ContextOverflow}  # over gRPC an InvalidRequest
ERRORS = [cls for cls in ALL if cls not in BASES | AT_START | OVER_HTTP]


def test_every_error_that_can_meet_a_caller_has_a_code():
    """docs/reference/sdk.md, which is tested too, says which."""
    codes = {cls: rpc.code_of(cls("why")) for cls in ERRORS}
    assert len(codes) > 10 and len(set(codes.values())) == len(codes)
    for other in (errors.TransferFailed, errors.ConfigError, ValueError):
        assert rpc.code_of(other("why")) is StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("text", "error"), [("CANCELLED", errors.Unavailable), ("why", errors.Cancelled)]
)
def test_a_call_that_a_stopping_server_dropped_can_be_tried_again(text, error):
    failed = AioRpcError(StatusCode.CANCELLED, Metadata(), Metadata(), details=text)
    assert type(rpc.error_of(failed)) is error


class Work:
    """What a call holds while it runs."""


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Fails as the test says."""

    def __init__(self):
        self.error: Exception | type[Exception] = errors.InternalError("not set")
        self.channel: Any = None
        self.work: Any = None  # a reference to what the last call held

    async def Tokenize(self, request, context):
        work = Work()
        self.work = weakref.ref(work)
        raise self.error

    async def Generate(self, request, context):
        work = Work()
        self.work = weakref.ref(work)
        yield inference_pb2.GenerateResponse()
        raise self.error


@contextlib.asynccontextmanager
async def served(servicer=None, **limits):
    """A server with these limits: a channel to it, and its address as the channel's."""
    server, address = bind("127.0.0.1", 0, **limits)
    servicer = servicer or Scripted()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    Health().add_to(server, ["baton.v1.InferenceService"])
    await server.start()
    async with rpc.channel(address) as channel:
        channel.address = address
        yield channel
    await server.stop(None)


@pytest_asyncio.fixture
async def scripted():
    """A server on loopback and a stub for it."""
    servicer = Scripted()
    async with served(servicer) as servicer.channel:
        yield servicer, inference_pb2_grpc.InferenceServiceStub(servicer.channel)


async def failure(stub):
    """What a unary call raises."""
    with pytest.raises(errors.BatonError) as failed, rpc.translated():
        await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=WAIT_S)
    return failed.value


async def stream_failure(stub):
    """What a stream raises after its messages."""
    with pytest.raises(errors.BatonError) as failed, rpc.translated():
        async for _ in stub.Generate(inference_pb2.GenerateRequest(), timeout=WAIT_S):
            pass
    return failed.value


async def test_errors_keep_class_text_and_details_over_a_call(scripted):
    servicer, stub = scripted
    text = "the cause, and the fix: ä"
    details = [
        errors.Overloaded(text, 0.25),
        errors.Unavailable(text, 90.0),
        errors.InvalidRequest(text, "sampling.top_p"),
    ]
    for error in [*(cls(text) for cls in ERRORS), *details]:
        servicer.error = error
        for received in (await failure(stub), await stream_failure(stub)):
            assert (type(received), str(received)) == (type(error), text)
            assert vars(received) == vars(error)


async def test_a_channel_to_a_role_stays_connected_while_nothing_is_called(monkeypatch):
    """Or a link would seem to have ended. gRPC's time is half an hour, a second the shortest."""
    monkeypatch.setattr(rpc, "OPTIONS", [*rpc.OPTIONS, ("grpc.client_idle_timeout_ms", 1000)])
    async with served() as other, rpc.channel(other.address, role="worker") as held:
        for channel in (held, other):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        await asyncio.wait_for(other.wait_for_state_change(ChannelConnectivity.READY), WAIT_S)
        await asyncio.sleep(0.5)
        assert held.get_state() is ChannelConnectivity.READY


async def test_a_channel_to_a_role_leaves_a_connection_that_has_fallen_silent(monkeypatch):
    """By the limit of our channels alone: gRPC's own is out of reach here."""
    limits = [(name, 1000 if "ping" in name else value) for name, value in rpc._UNWATCHED]
    monkeypatch.setattr(rpc, "_UNWATCHED", limits)
    others = {"grpc.keepalive_time_ms": 300, "grpc.http2.ping_timeout_ms": rpc._NEVER}
    health = Health()
    server, address = bind("127.0.0.1", 0)
    health.add_to(server, [])
    await server.start()
    monkeypatch.setattr(rpc, "OPTIONS", [*(dict(rpc.OPTIONS) | others).items()])
    async with (
        Proxy(int(address.rpartition(":")[2])) as proxy,
        rpc.channel(proxy.address, role="worker") as channel,
        asyncio.timeout(WAIT_S),
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        (connection,) = proxy._connections
        proxy.hold(connection.caller)  # another one works
        with pytest.raises(errors.Unavailable, match="ping timeout"), rpc.translated():
            await stub.Check(health_pb2.HealthCheckRequest())
        await channel.channel_ready()
    await server.stop(None)


async def test_a_bug_and_an_unknown_code_are_internal(scripted, caplog):
    servicer, stub = scripted
    servicer.error = ZeroDivisionError("oops")
    with caplog.at_level(logging.ERROR):
        received = await failure(stub)
    assert type(received) is errors.InternalError
    assert str(received) == "unexpected ZeroDivisionError: oops"
    (record,) = (record for record in caplog.records if record.name == "baton.net.rpc")
    assert record.exc_info is not None and record.exc_info[1] is servicer.error
    with pytest.raises(errors.InternalError, match=r"^UNIMPLEMENTED: "), rpc.translated():
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=WAIT_S)


@pytest.fixture
def no_gc():
    """What dies during the test dies by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_a_call_that_failed_leaves_nothing_to_the_garbage_collector(scripted, no_gc):
    """Large requests that are refused would otherwise stay in memory for minutes."""
    servicer, stub = scripted
    servicer.error = errors.Stale  # the class: an instance would keep its traceback
    for fail in (failure, stream_failure):
        await fail(stub)
        work = lambda: asyncio.sleep(0, servicer.work())  # noqa: E731
        await eventually(work, lambda found: found is None, "the server is not done with the call")


@pytest.mark.parametrize("char", ["x", "\N{GRINNING FACE}"])
async def test_a_long_text_is_cut_instead_of_breaking_the_status(scripted, char):
    servicer, stub = scripted
    servicer.error = errors.InvalidRequest("bad: " + char * 100_000, "input")
    received = await failure(stub)
    assert isinstance(received, errors.InvalidRequest)
    assert str(received).startswith(f"bad: {char * 100}")
    assert received.field == "input"


METHODS = [
    "/baton.v1.InferenceService/Tokenize",
    "/baton.v1.InferenceService/Generate",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


async def test_malformed_requests_are_refused_with_one_line(scripted, caplog):
    channel = scripted[0].channel
    for method in METHODS * 5:
        arity = "stream" if "Reflection" in method else "unary"
        raw: Any = b"\xff\xff" if arity == "unary" else iter([b"\xff\xff"])
        with pytest.raises(errors.InvalidRequest, match=method), rpc.translated():
            async for _ in getattr(channel, f"{arity}_stream")(method)(raw, timeout=WAIT_S):
                pass
    (record,) = caplog.records
    assert record.name == "baton.net.rpc" and record.exc_info is None


async def nothing():
    """The request of a call that never comes."""
    await asyncio.Event().wait()
    yield b""


def refuse(method, context):
    raise errors.Unauthenticated("who are you?")


@pytest.mark.parametrize("arity", ["unary", "stream"])
async def test_a_caller_without_a_key_is_refused_before_the_request_is_read(arity):
    method = METHODS[arity == "stream"]
    async with served(authorize=refuse) as channel:
        call = getattr(channel, f"stream_{arity}")(method)(nothing(), timeout=WAIT_S)
        with pytest.raises(errors.Unauthenticated), rpc.translated():
            await (call if arity == "unary" else call.read())


async def test_a_request_that_is_too_large_is_not_parsed():
    async with served(max_request_bytes=lambda: 1000) as channel:
        call = channel.unary_unary(METHODS[0])(b"\xff" * 1001, timeout=WAIT_S)
        with pytest.raises(errors.InvalidRequest, match="1001 bytes"), rpc.translated():
            await call


async def test_a_request_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(rpc, "RECEIVE_S", 0.1)
    async with served() as channel:
        call = channel.stream_unary(METHODS[0])(nothing(), timeout=WAIT_S)
        with pytest.raises(errors.DeadlineExceeded, match="did not come"), rpc.translated():
            await call


class Running(inference_pb2_grpc.InferenceServiceServicer):
    """Streams until it is told to end; its unary answer is the port of who calls."""

    def __init__(self):
        self.end = asyncio.Event()

    async def Generate(self, request, context):
        while not self.end.is_set():
            yield inference_pb2.GenerateResponse()
            await asyncio.sleep(0.02)

    async def Tokenize(self, request, context):
        return inference_pb2.TokenizeResponse(token_ids=[int(context.peer().rsplit(":")[-1])])


async def test_a_client_connects_anew_in_time_and_its_streams_run_on():
    servicer = Running()
    async with served(servicer, reconnect_s=0.3) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream, peers = stub.Generate(inference_pb2.GenerateRequest(), timeout=WAIT_S), set()
        async for _ in stream:
            answer = await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=WAIT_S)
            peers.update(answer.token_ids)  # the ports of its connections
            if len(peers) > 5:  # far more time than its own connection has passed
                servicer.end.set()
        assert await stream.code() is StatusCode.OK


async def test_a_call_does_not_hold_an_old_connection_for_ever(monkeypatch):
    monkeypatch.setattr(rpc, "LONGEST_CALL_S", 0.3)
    async with served(Running(), reconnect_s=0.3) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(errors.Unavailable), rpc.translated():
            async for _ in stub.Generate(inference_pb2.GenerateRequest(), timeout=WAIT_S):
                pass


async def test_calls_at_a_time_are_limited(monkeypatch):
    monkeypatch.setattr(rpc, "MAX_CALLS", 2)
    async with served(Running()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running = [stub.Generate(inference_pb2.GenerateRequest(), timeout=WAIT_S) for _ in range(2)]
        for stream in running:
            await stream.read()
        with pytest.raises(errors.Overloaded), rpc.translated():
            await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=WAIT_S)
        for stream in running:
            stream.cancel()
        # A call is counted until the server is done with it.
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(AioRpcError):
                    await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=WAIT_S)
                    break
                await asyncio.sleep(0.01)


def h2_frame(kind, flags, stream, payload=b""):
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


async def call_with_a_small_window(port, method):
    """A reader of the frames of a call that may get one byte of output; and its writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = {
        ":method": "POST", ":scheme": "http", ":path": method, ":authority": "a",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    literals = b"".join(
        b"\0" + b"".join(struct.pack("B", len(text)) + text.encode() for text in pair)
        for pair in headers.items()
    )
    window = struct.pack(">HI", 4, 1)  # SETTINGS_INITIAL_WINDOW_SIZE
    request = h2_frame(1, 4, 1, literals) + h2_frame(0, 1, 1, bytes(5))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2_frame(4, 0, 0, window) + request)

    async def frame():
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] in (4, 6) and not head[4]:  # SETTINGS and PING are answered
            writer.write(h2_frame(head[3], 1, 0, payload if head[3] == 6 else b""))
        return head[3], head[4]

    return frame, writer


class Loud(inference_pb2_grpc.InferenceServiceServicer):
    """Has output, and does not wait for long until it is read."""

    async def Generate(self, request, context):
        output = inference_pb2.GenerateResponse(started={"request_id": "x" * 99})
        writing = asyncio.ensure_future(context.write(output))
        await asyncio.wait([writing], timeout=0.1)
        writing.cancel()
        raise errors.Cancelled("it does not read")

    async def Tokenize(self, request, context):
        return inference_pb2.TokenizeResponse()


async def test_a_caller_that_gives_no_window_is_cut_off(monkeypatch):
    monkeypatch.setattr(rpc, "SEND_S", 0.1)
    data, headers, end_of_stream, end_of_headers = 0, 1, 1, 4

    async def status():
        while await frame() != (headers, end_of_stream | end_of_headers):
            pass

    async with asyncio.timeout(WAIT_S), served(Loud()) as channel:
        port = int(channel.address.split(":")[1])
        frame, writer = await call_with_a_small_window(port, METHODS[1])
        while await frame() != (data, 0):
            pass
        ended = asyncio.create_task(status())  # without the rest of the output
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        while not ended.done():  # gRPC holds a call until the next
            await stub.Tokenize(inference_pb2.TokenizeRequest())
            await asyncio.sleep(0.01)
        ended.result()
        names = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
        assert "_handle_exceptions" not in names
        writer.close()
