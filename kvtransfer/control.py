"""Calls of a prefill worker to a decode worker, multiplexed over one gRPC stream.

A call costs two messages; a unary call would also cost an HTTP/2 stream with headers and a status.
The caller opens the stream with its first call, and again after it has broken, each on a connection
of its own. A broken stream fails its unanswered calls with Unavailable, as a lost connection does:
no other error that a call raises comes from anything but its answer.

A stream on which nothing comes counts as broken, too, as a router's to a silent worker does. While
calls wait for their answers, which may take long, pings ask whether the other end is there.
Silence is counted in ticks of the caller's own event loop: one that was stopped counts one tick.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from baton.config import RouterLimits
from baton.errors import DeadlineExceeded, InvalidRequest, Unavailable
from baton.net import rpc
from baton.net.failures import error_of, failure_of
from baton.net.tasks import cancelled, in_background, uninterrupted
from baton.v1 import handoff_pb2 as pb
from baton.v1.handoff_pb2_grpc import HandoffServiceServicer, HandoffServiceStub

_NAMES: dict[type[Any], str] = {
    pb.OfferRequest: "offer",
    pb.ReadyRequest: "ready",
    pb.CommitRequest: "commit",
    pb.AbortRequest: "abort",
}
_MAX_CALLS = 8192  # unanswered calls of one stream
_TICK_S = 0.1
_LOST_TICKS = round(RouterLimits.silence_s / _TICK_S)  # a router's default for a worker
_PING_TICKS = _LOST_TICKS // 3


@dataclass(eq=False)
class _Stream:
    """The caller's end of one stream."""

    outgoing: asyncio.Queue[pb.ControlRequest | None] = field(default_factory=asyncio.Queue)
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)  # by call id
    silent_ticks: int = 0  # since something came, while calls wait
    ticking: asyncio.TimerHandle | None = None  # while calls wait
    reading: asyncio.Task[None] | None = None

    async def requests(self) -> AsyncIterator[pb.ControlRequest]:
        """The queued requests, until None is queued."""
        while (request := await self.outgoing.get()) is not None:
            yield request

    def take(self, response: pb.ControlResponse) -> None:
        """Completes the call that an answer belongs to."""
        self.silent_ticks = 0
        if (waiting := self.waiting.pop(response.call_id, None)) is None or waiting.done():
            return  # cancelled meanwhile
        name = response.WhichOneof("answer")
        if name == "failure":
            waiting.set_exception(error_of(response.failure))
        else:
            waiting.set_result(getattr(response, name or ""))


class Control:
    """Calls to one decode worker. Event-loop thread only."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._stream: _Stream | None = None
        self._reading: set[asyncio.Task[None]] = set()  # of the stream, and of lost ones

    @property
    def lost(self) -> bool:
        """Whether there is no connection."""
        return self._stream is None

    async def call(self, request: Any, timeout_s: float) -> Any:
        """The answer to an Offer, Ready, Commit or Abort.

        A call that is cancelled or times out is cancelled at the decode worker, too. Raises the
        decode worker's error, Unavailable if it is gone, DeadlineExceeded.
        """
        number, stream = next(self._numbers), self._stream or self._open()
        message = pb.ControlRequest(call_id=number, **{_NAMES[type(request)]: request})
        waiting = stream.waiting[number] = asyncio.get_running_loop().create_future()
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        stream.outgoing.put_nowait(message)
        if stream.ticking is None:
            stream.silent_ticks = 0
            self._tick_later(stream)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):  # raised by the decode worker
                raise
            raise DeadlineExceeded(f"no answer within {timeout_s:.3g} s") from None
        finally:
            if stream.waiting.pop(number, None) is not None:
                cancel = pb.ControlRequest(call_id=number, cancel=pb.CancelRequest())
                stream.outgoing.put_nowait(cancel)

    async def close(self) -> None:
        """Closes stream and connection; no call waits any more."""
        await cancelled(*self._reading)

    def _open(self) -> _Stream:
        channel = rpc.channel(self._address, role="worker")
        stream = self._stream = _Stream()
        stream.reading = in_background(self._reading, self._read(stream, channel))
        return stream

    def _tick_later(self, stream: _Stream) -> None:
        loop = asyncio.get_running_loop()
        stream.ticking = loop.call_later(_TICK_S, self._tick, stream)

    def _tick(self, stream: _Stream) -> None:
        """Counts silence while calls wait."""
        stream.ticking = None
        if not stream.waiting:
            return
        stream.silent_ticks += 1
        if stream.silent_ticks >= _LOST_TICKS:
            silent_s = stream.silent_ticks * _TICK_S
            self._end(stream, Unavailable(f"the decode worker is silent for {silent_s:.1f} s"))
            if stream.reading is not None:
                stream.reading.cancel()
            return
        if stream.silent_ticks % _PING_TICKS == 0:
            ping = pb.ControlRequest(call_id=next(self._numbers), ping=pb.PingRequest())
            stream.outgoing.put_nowait(ping)
        self._tick_later(stream)

    def _end(self, stream: _Stream, why: Unavailable) -> None:
        """From now on no call waits for this stream, and the next one opens another."""
        stream.outgoing.put_nowait(None)  # ends `requests`
        if self._stream is stream:
            self._stream = None
        waiting, stream.waiting = stream.waiting, {}
        for call in waiting.values():
            if not call.done():
                call.set_exception(why)

    async def _read(self, stream: _Stream, channel: Any) -> None:
        """Receives answers until the stream ends, whatever its status; then no call waits."""
        ended = Unavailable("the decode worker has ended its calls")
        try:
            async for response in HandoffServiceStub(channel).Control(stream.requests()):
                stream.take(response)
        except grpc.RpcError as error:
            ended = Unavailable(str(rpc.error_of(error)))
        finally:
            self._end(stream, ended)
            await uninterrupted(channel.close(None))


Handle = Callable[[Any], Awaitable[Any]]


class ControlServicer(HandoffServiceServicer):
    """The called end. `handle`: the method for each field of a ControlRequest."""

    def __init__(self, handle: Mapping[str, Handle]) -> None:
        self._handle = {"ping": _pinged, **handle}
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
        """Ends all streams after the answers already queued, and accepts no new ones."""
        self._closed = True
        for answers in self._streams:
            answers.put_nowait(None)

    async def _take(
        self,
        requests: AsyncIterator[pb.ControlRequest],
        answers: asyncio.Queue[pb.ControlResponse | None],
    ) -> None:
        """Starts each call in order; if the stream breaks, cancels the running ones."""
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            async for request in requests:
                number, name = request.call_id, request.WhichOneof("call")
                if name == "cancel":
                    if (running := calls.get(number)) is not None:
                        running.cancel()
                    continue
                if number in calls or len(calls) + answers.qsize() >= _MAX_CALLS:
                    raise InvalidRequest(f"call {number} runs already, or {len(calls)} do")
                call = calls[number] = asyncio.create_task(self._answer(request, name, answers))
                call.add_done_callback(partial(_forget, calls, number))
            if calls:  # the caller has stopped sending, but still reads
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
                raise InvalidRequest("unknown kind of call", "call")
            answer = {name: await self._handle[name](getattr(request, name))}
        except Exception as error:
            answer = {"failure": failure_of(error)}
        answers.put_nowait(pb.ControlResponse(call_id=request.call_id, **answer))


async def _pinged(request: pb.PingRequest) -> pb.PingResponse:
    return pb.PingResponse()


def _forget(calls: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del calls[number]
