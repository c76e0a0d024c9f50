"""Calls of a prefill worker to a decode worker over one gRPC stream, which both ends keep open.

A call over it costs two messages, where a call of its own would cost a stream of HTTP/2, its
headers and a status, too. The caller opens the stream with its first call, and again after it has
broken; what was not answered by then fails, as calls over a lost connection do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from baton.errors import DeadlineExceeded, InvalidRequest, Unavailable
from baton.net import rpc
from baton.net.failures import error_of, failure_of
from baton.v1 import handoff_pb2 as pb
from baton.v1.handoff_pb2_grpc import HandoffServiceServicer, HandoffServiceStub

_NAMES: dict[type[Any], str] = {
    pb.OfferRequest: "offer",
    pb.ReadyRequest: "ready",
    pb.CommitRequest: "commit",
    pb.AbortRequest: "abort",
}
_MOST_CALLS = 8192  # of a stream, that are not answered
_CONNECTION_LOST = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


@dataclass(eq=False)
class _Stream:
    """One stream, as its caller has it, until it has ended."""

    outgoing: asyncio.Queue[pb.ControlRequest | None] = field(default_factory=asyncio.Queue)
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)  # for answers, by call
    reading: asyncio.Task[None] | None = None

    async def requests(self) -> AsyncIterator[pb.ControlRequest]:
        """All that is sent, until None is."""
        while (request := await self.outgoing.get()) is not None:
            yield request

    def take(self, response: pb.ControlResponse) -> None:
        """Gives an answer to whoever waits for it."""
        if (waiting := self.waiting.pop(response.call_id, None)) is None or waiting.done():
            return  # cancelled meanwhile
        name = response.WhichOneof("answer")
        if name == "failure":
            waiting.set_exception(error_of(response.failure))
        else:
            waiting.set_result(getattr(response, name or ""))


class Control:
    """The calls to one decode worker, by its address. Event-loop thread only."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address, role="decode")
        self._stub = HandoffServiceStub(self._channel)
        self._numbers = itertools.count(1)
        self._stream: _Stream | None = None

    @property
    def lost(self) -> bool:
        """Whether there is no connection."""
        return self._channel.get_state() in _CONNECTION_LOST

    async def call(self, request: Any, timeout_s: float, trace: Mapping[str, str]) -> Any:
        """The answer to an Offer, Ready, Commit or Abort.

        One that is cancelled, or not answered in time, is cancelled there too. Raises what the
        decode worker does, Unavailable where it is gone, DeadlineExceeded.
        """
        number, stream = next(self._numbers), self._stream or self._open()
        message = pb.ControlRequest(call_id=number, trace=trace, **{_NAMES[type(request)]: request})
        waiting = stream.waiting[number] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        stream.outgoing.put_nowait(message)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):  # the decode worker's own
                raise
            raise DeadlineExceeded(f"no answer within {timeout_s:.3g} s") from None
        finally:
            if stream.waiting.pop(number, None) is not None:
                cancel = pb.ControlRequest(call_id=number, cancel=pb.CancelRequest())
                stream.outgoing.put_nowait(cancel)

    async def close(self) -> None:
        """Ends stream and connection; no call waits any more."""
        if (stream := self._stream) is not None and stream.reading is not None:
            stream.reading.cancel()
            await asyncio.wait({stream.reading})
        await self._channel.close(None)

    def _open(self) -> _Stream:
        stream = self._stream = _Stream()
        stream.reading = asyncio.create_task(self._read(stream))
        return stream

    async def _read(self, stream: _Stream) -> None:
        """Takes answers until the stream ends, which all calls that wait then fail with."""
        ended: Exception = Unavailable("the decode worker has ended its calls")
        try:
            async for response in self._stub.Control(stream.requests()):
                stream.take(response)
        except grpc.RpcError as error:
            ended = rpc.error_of(error)
        finally:
            stream.outgoing.put_nowait(None)  # ends what sends
            if self._stream is stream:
                self._stream = None
            waiting, stream.waiting = stream.waiting, {}
            for call in waiting.values():
                if not call.done():
                    call.set_exception(ended)


Handle = Callable[[Any, Mapping[str, str]], Awaitable[Any]]


class ControlServicer(HandoffServiceServicer):
    """The other end: `handle` has, by the call's field, what answers it with its trace context."""

    def __init__(self, handle: Mapping[str, Handle]) -> None:
        self._handle = handle
        self._streams: set[asyncio.Queue[pb.ControlResponse | None]] = set()
        self._closed = False

    async def Control(
        self, request_iterator: AsyncIterator[pb.ControlRequest], context: Any
    ) -> AsyncIterator[pb.ControlResponse]:
        """Answers calls until either end closes the stream. Raises Unavailable."""
        if self._closed:
            raise Unavailable("the decode worker takes no more calls")
        answers: asyncio.Queue[pb.ControlResponse | None] = asyncio.Queue()
        reading = asyncio.create_task(self._take(request_iterator, answers))
        self._streams.add(answers)
        try:
            while (answer := await answers.get()) is not None:
                yield answer
        finally:
            self._streams.discard(answers)
            reading.cancel()
            await asyncio.wait({reading})
        if not reading.cancelled():
            reading.result()

    def close_streams(self) -> None:
        """Ends all streams, behind what is answered already, and takes no more."""
        self._closed = True
        for answers in self._streams:
            answers.put_nowait(None)

    async def _take(
        self,
        requests: AsyncIterator[pb.ControlRequest],
        answers: asyncio.Queue[pb.ControlResponse | None],
    ) -> None:
        """Starts each call in its turn; where the stream is cut, cancels those that run."""
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            async for request in requests:
                number, name = request.call_id, request.WhichOneof("call")
                if name == "cancel":
                    if (running := calls.get(number)) is not None:
                        running.cancel()
                    continue
                if number in calls or len(calls) + answers.qsize() >= _MOST_CALLS:
                    raise InvalidRequest(f"call {number} runs already, or {len(calls)} do")
                call = calls[number] = asyncio.create_task(self._answer(request, name, answers))
                call.add_done_callback(partial(_forget, calls, number))
            if calls:  # the caller sends no more, but still reads
                await asyncio.wait(set(calls.values()))
        finally:
            for call in tuple(calls.values()):
                call.cancel()
            answers.put_nowait(None)

    async def _answer(
        self,
        request: pb.ControlRequest,
        name: str | None,
        answers: asyncio.Queue[pb.ControlResponse | None],
    ) -> None:
        try:
            if name is None:
                raise InvalidRequest("a call of no kind that is known here", "call")
            answer = {name: await self._handle[name](getattr(request, name), request.trace)}
        except Exception as error:
            answer = {"failure": failure_of(error)}
        answers.put_nowait(pb.ControlResponse(call_id=request.call_id, **answer))


def _forget(calls: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del calls[number]
