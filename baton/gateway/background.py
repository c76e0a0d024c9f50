"""Responses that run in the background; any router process can stream or cancel them.

The events of a stream are written to the database a few times a second. Every client of a stream
reads them there: the one that sent the request, later ones, and those of other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec

from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.gateway import sse
from baton.gateway.conversation_store import ConversationStore
from baton.gateway.database import DatabaseThread
from baton.gateway.responses_output import ResponseGeneration, encode_event
from baton.gateway.responses_store import ALIVE_S, ResponseStore, StoredResponse
from baton.gateway.responses_types import Response, ResponseError
from baton.net.http_errors import HttpError
from baton.net.http_server import HttpExchange
from baton.net.tasks import cancelled, wait_at_most
from router.output.sink import UNREAD_S

log = logging.getLogger(__name__)
MAX_BACKGROUND = 256  # responses that run in a process
TICK_S = 0.1  # between looks for what this process and others wrote
_RETRY_S = 5.0
_encode = msgspec.json.encode


class _Running(NamedTuple):
    """A response that runs in this process."""

    generation: ResponseGeneration
    task: asyncio.Task[None]


class BackgroundResponses:
    """The responses that run in this process, and the clients that follow any."""

    def __init__(self, database: DatabaseThread[ConversationStore]) -> None:
        self._database = database
        self._running: dict[str, _Running] = {}
        self._num_beginning = 0  # not among them yet
        self._num_following = 0
        self._busy = asyncio.Event()  # set while a response runs or is followed
        self._changed = asyncio.Event()  # replaced when it is set
        self._writing = asyncio.Lock()  # held while events are written

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Responses may run while inside; those that still run then are lost."""
        watch = asyncio.create_task(self._watch(), name="responses in the background")
        try:
            yield
        finally:
            await cancelled(watch, *(one.task for one in self._running.values()))

    def check_room(self) -> None:
        """Raises Overloaded if too many run."""
        if len(self._running) + self._num_beginning >= MAX_BACKGROUND:
            text = f"{MAX_BACKGROUND} responses run in the background: try again later"
            raise Overloaded(text, _RETRY_S)

    async def begin(
        self,
        tenant: str,
        generation: ResponseGeneration,
        on_end: Callable[[Response], Awaitable[None]],
    ) -> Response:
        """Stores a response once its request is admitted, and goes on with it.

        `on_end`: called when it has ended, unless it was cancelled. Raises BatonError for a request
        that is not admitted.
        """
        is_stored = asyncio.Event()
        task = asyncio.create_task(self._run(tenant, generation, on_end, is_stored))
        task.add_done_callback(lambda ended: generation.admitted.set())
        self._num_beginning += 1
        try:
            await generation.admitted.wait()
            if task.done():
                task.result()  # raises
            response = generation.response()
            assert generation.keep is not None
            await generation.keep(response)
        except BaseException:
            task.cancel()
            raise
        finally:
            self._num_beginning -= 1
        self._running[response.id] = _Running(generation, task)
        task.add_done_callback(lambda _: self._forget(response.id))
        self._busy.set()
        is_stored.set()
        return response

    def cancel(self, response_id: str) -> None:
        """Cancels a response if it runs in this process."""
        if one := self._running.get(response_id):
            one.task.cancel()

    async def follow(
        self, tenant: str, response_id: str, after: int, exchange: HttpExchange
    ) -> None:
        """Streams the events of a response, those that come included.

        after: sequence number of the last event that the client has, or -1. Raises InvalidRequest
        for a response that has no events.
        """
        found = await self._database.call(ResponseStore.get, tenant, response_id)
        if not found.is_streamed:
            text = f"{response_id} has no events: it was not created with background and stream"
            raise InvalidRequest(text, "stream")
        exchange.start(200, sse.HEADERS)
        self._num_following += 1
        self._busy.set()
        try:
            await self._send_events(tenant, response_id, after, exchange)
        finally:
            self._num_following -= 1
            self._rest()

    async def _send_events(
        self, tenant: str, response_id: str, after: int, exchange: HttpExchange
    ) -> None:
        while True:
            changed = self._changed
            try:
                found = await self._database.call(ResponseStore.events, tenant, response_id, after)
            except (BatonError, HttpError) as error:  # it was deleted, or the disk fails
                members = {"code": "server_error", "message": str(error), "param": None}
                exchange.end(encode_event("error", after + 1, members))
                return
            after, response = found.last, found.response
            if not found.events and (response.is_lost or not response.is_running):
                exchange.end(_last_event(response, after + 1))
                return
            if not found.events and await wait_at_most(sse.KEEP_ALIVE_S, changed.wait()):
                continue
            exchange.write(found.events or sse.WAITING)
            if not await exchange.drained(UNREAD_S):
                return

    async def _run(
        self,
        tenant: str,
        generation: ResponseGeneration,
        on_end: Callable[[Response], Awaitable[None]],
        is_stored: asyncio.Event,
    ) -> None:
        response = await generation.run_in_background()
        await is_stored.wait()
        try:
            await self._write({response.id: generation})
            body = _encode(response)
            if await self._database.call(ResponseStore.end, tenant, response.id, body):
                await on_end(response)
        except (BatonError, HttpError) as error:
            log.error("response %s is lost: %s", response.id, error)

    def _forget(self, response_id: str) -> None:
        del self._running[response_id]
        self._rest()

    def _rest(self) -> None:
        if not (self._running or self._num_following):
            self._busy.clear()

    async def _watch(self) -> None:
        """Writes events, tells other processes that responses run, and sees what these change."""
        loop, version, alive_at = asyncio.get_running_loop(), (0, 0), 0.0
        while True:
            await self._busy.wait()
            await asyncio.sleep(TICK_S)  # another process's change of a file has no event
            try:
                await self._write({name: one.generation for name, one in self._running.items()})
                if self._running and loop.time() >= alive_at:
                    await self._database.call(ResponseStore.keep_alive, list(self._running))
                    alive_at = loop.time() + ALIVE_S / 3
                now = await self._database.call(ResponseStore.version)
                if now != version:
                    await self._on_change()
                    version = now
            except (BatonError, HttpError) as error:
                log.warning("responses in the background: %s", error)

    async def _write(self, generations: Mapping[str, ResponseGeneration]) -> None:
        """Stores the events that responses have by now."""
        async with self._writing:
            new = {name: one for name, one in generations.items() if one.log}
            if not new:
                return
            events = {name: (one.num_events - 1, b"".join(one.log)) for name, one in new.items()}
            counts = {name: len(one.log) for name, one in new.items()}
            await self._database.call(ResponseStore.add_events, events)
            for name, one in new.items():
                del one.log[: counts[name]]

    async def _on_change(self) -> None:
        """Ends what was cancelled or deleted, and wakes those who follow responses."""
        running = list(self._running)
        for response_id in set(running) - await self._database.call(ResponseStore.running, running):
            self.cancel(response_id)
        self._changed.set()
        self._changed = asyncio.Event()


def shown(stored: StoredResponse) -> Response:
    """A stored response as it is now."""
    response = msgspec.json.decode(stored.body, type=Response)
    if stored.is_lost:
        text = "the router that ran it has ended: send it again"
        response.status = "failed"
        response.error = ResponseError("server_error", text, "server_error", None)
    return response


def _last_event(stored: StoredResponse, number: int) -> bytes:
    """What ends a stream behind its stored events, which lack the end of one that was stopped."""
    response = shown(stored)
    if stored.is_lost:
        return encode_event("response.failed", number, {"response": response})
    if response.status == "cancelled":  # no event is called so
        return encode_event("response.incomplete", number, {"response": response})
    return b": end\n\n"
