"""OpenAI's /v1/responses with what it stores: earlier responses, and those in the background.

Without `--response-dir` nothing is stored. Responses belong to the tenant that created them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from baton.config import ApiConfig
from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.gateway import api
from baton.gateway.batch_store import Page, page_of
from baton.gateway.batches import query_of
from baton.gateway.database import DatabaseThread
from baton.gateway.endpoint import Endpoint
from baton.gateway.generation import generate
from baton.gateway.headers import caller_of, with_request_id
from baton.gateway.openapi import ERRORS, Operation, Routes
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.response_store import ResponseStore, StoredResponse
from baton.gateway.responses import (
    CountedRequest,
    ResponsesRequest,
    input_items,
    parse_counted,
    parse_response,
    parsed_response,
)
from baton.gateway.responses_output import Response, ResponseError, ResponseGeneration
from baton.gateway.tokenize import count_chat
from baton.net.http_errors import HttpError
from baton.net.http_server import HttpExchange
from router.generation_service import Caller, GenerationService

log = logging.getLogger(__name__)
MAX_BACKGROUND = 256  # responses that run in a process
WATCH_S = 1.0  # between looks for what other processes cancelled
_RETRY_S = 5.0
_encode = msgspec.json.encode
_PREFIX = "/v1/responses/"


class InputTokens(Struct):
    """The number of a conversation's tokens."""

    input_tokens: api.Count
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseDeleted(Struct):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemsQuery(Struct):
    """Which items to list."""

    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class InputItems(Page, kw_only=True):
    """A page of the new items of a response's input."""

    data: list[dict[str, Any]]


class ResponseApi:
    """Answers `ROUTES`."""

    def __init__(self, service: GenerationService, config: ApiConfig) -> None:
        self.service = service
        self._folder = config.response_dir
        folder = config.response_dir or Path()
        self._database = DatabaseThread(
            lambda: ResponseStore(folder, config.response_disk, config.response_lifetime_s),
            folder,
            "--response-dir",
        )
        self._running: dict[str, asyncio.Task[None]] = {}  # in the background, by id
        self.create = Endpoint(parse_response, self._create)
        self.count = Endpoint(parse_counted, self._count)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Responses may run in the background while inside; what still runs then is lost."""
        watch = asyncio.create_task(self._watch(), name="responses in the background")
        try:
            yield
        finally:
            tasks = [watch, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._database.close()

    # Requests.

    async def _create(
        self,
        service: GenerationService,
        parsed: ParsedRequest,
        caller: Caller,
        exchange: HttpExchange,
    ) -> None:
        body, tenant = parsed.options, service.tenant_of(caller).name
        assert isinstance(body, ResponsesRequest)
        parsed = await self._with_history(parsed, tenant)
        stores = self._folder is not None and body.store is not False
        keep = self._keeper(tenant, body) if stores else None

        start = partial(ResponseGeneration, keep=keep)
        if not body.background:
            await generate(start, service, parsed, caller, exchange)
            return
        if body.stream or not stores:
            need = "store and a router with --response-dir" if not stores else "stream to be false"
            raise InvalidRequest(f"background needs {need}", "background")
        if len(self._running) >= MAX_BACKGROUND:
            text = f"{MAX_BACKGROUND} responses run in the background: try again later"
            raise Overloaded(text, _RETRY_S)
        caller = with_request_id(exchange, caller, body.request_id)
        try:
            await self._begin(tenant, start(service, parsed, caller, exchange))
        except InvalidRequest as error:
            raise parsed.renamed(error) from error

    async def _count(
        self,
        service: GenerationService,
        parsed: ParsedRequest,
        caller: Caller,
        exchange: HttpExchange,
    ) -> None:
        parsed = await self._with_history(parsed, service.tenant_of(caller).name)
        exchange.answer(200, _encode(InputTokens(await count_chat(service, parsed, caller))))

    async def _with_history(self, parsed: ParsedRequest, tenant: str) -> ParsedRequest:
        """The request behind the response that it names."""
        body = parsed.options
        assert isinstance(body, ResponsesRequest)
        if (previous := body.previous_response_id) is None:
            return parsed
        if self._folder is None:
            raise InvalidRequest(
                "responses are not stored: send the whole conversation in input, without "
                "previous_response_id, or start the router with --response-dir",
                "previous_response_id",
            )
        history = await self._database.call(ResponseStore.history, tenant, previous)
        return await self.service.run_in_thread(parsed_response, body, history)

    def _keeper(
        self, tenant: str, body: ResponsesRequest
    ) -> Callable[[Response], Coroutine[Any, Any, None]]:
        """Stores a response to `body`."""

        async def keep(response: Response) -> None:
            stored = StoredResponse(
                response.id,
                body.previous_response_id or "",
                _encode(input_items(body, response.id.removeprefix("resp_"))),
                _encode(response),
                response.status == "in_progress",
            )
            await self._database.call(ResponseStore.add, tenant, stored)

        return keep

    # In the background.

    async def _begin(self, tenant: str, generation: ResponseGeneration) -> None:
        """Answers once the request is admitted, and goes on with it."""
        is_stored = asyncio.Event()
        task = asyncio.create_task(self._run(tenant, generation, is_stored))
        task.add_done_callback(lambda ended: generation.admitted.set())
        try:
            await generation.admitted.wait()
            if task.done():
                return await task  # which raises
            response = generation.response()
            assert generation.keep is not None
            await generation.keep(response)
        except BaseException:
            task.cancel()
            raise
        self._running[response.id] = task
        task.add_done_callback(lambda ended: self._running.pop(response.id))
        is_stored.set()
        generation.exchange.answer(200, _encode(response))
        return None

    async def _run(
        self, tenant: str, generation: ResponseGeneration, is_stored: asyncio.Event
    ) -> None:
        response = await generation.run_in_background()
        await is_stored.wait()
        try:
            await self._database.call(ResponseStore.end, tenant, response.id, _encode(response))
        except (BatonError, HttpError) as error:
            log.error("response %s is lost: %s", response.id, error)

    async def _watch(self) -> None:
        """Tells other processes that responses run, and ends those that were cancelled there."""
        while True:
            await asyncio.sleep(WATCH_S)  # another process's change of a file has no event
            if not (ids := list(self._running)):
                continue
            try:
                kept = await self._database.call(ResponseStore.keep_alive, ids)
            except (BatonError, HttpError) as error:
                log.warning("responses in the background: %s", error)
                continue
            for response_id in set(ids) - kept:
                if task := self._running.get(response_id):
                    task.cancel()

    # Stored responses.

    async def get(self, exchange: HttpExchange) -> None:
        """Answers with a response."""
        if b"stream=true" in exchange.query:
            raise InvalidRequest("stored responses are not streamed: leave stream out", "stream")
        exchange.answer(200, _encode(_shown(await self._stored(exchange))))

    async def delete(self, exchange: HttpExchange) -> None:
        """Deletes a response; one that runs ends."""
        response_id, tenant = _id(exchange), self._tenant(exchange)
        await self._database.call(ResponseStore.delete, tenant, response_id)
        if task := self._running.get(response_id):
            task.cancel()
        exchange.answer(200, _encode(ResponseDeleted(response_id)))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Ends a response that runs in the background; one that is cancelled stays so."""
        stored = await self._stored(exchange)
        response = _shown(stored)
        if stored.is_running:
            response = msgspec.structs.replace(response, status="cancelled", error=None)
            tenant, body = self._tenant(exchange), _encode(response)
            if not await self._database.call(ResponseStore.end, tenant, stored.id, body):
                response = _shown(await self._stored(exchange))  # it has just ended
            elif task := self._running.get(stored.id):
                task.cancel()
        if response.status != "cancelled":
            raise HttpError(409, f"{stored.id} is {response.status}: it cannot be cancelled")
        exchange.answer(200, _encode(response))

    async def items(self, exchange: HttpExchange) -> None:
        """Answers with a page of the items of a response's input."""
        query = query_of(ItemsQuery, exchange)
        stored = await self._stored(exchange)
        items = msgspec.json.decode(stored.input, type=list[dict[str, Any]])
        if query.order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        first = ids.index(query.after) + 1 if query.after in ids else 0
        page = page_of(items[first : first + query.limit + 1], query.limit, lambda item: item["id"])
        exchange.answer(200, _encode(InputItems(**page)))

    async def _stored(self, exchange: HttpExchange) -> StoredResponse:
        return await self._database.call(ResponseStore.get, self._tenant(exchange), _id(exchange))

    def _tenant(self, exchange: HttpExchange) -> str:
        tenant = self.service.tenant_of(caller_of(exchange)).name
        if self._folder is None:
            text = f"{exchange.path}: this router was started without --response-dir DIR"
            raise HttpError(404, text)
        return tenant


def _id(exchange: HttpExchange) -> str:
    return exchange.path.removeprefix(_PREFIX).partition("/")[0]


def _shown(stored: StoredResponse) -> Response:
    response = msgspec.json.decode(stored.body, type=Response)
    if stored.is_lost:
        text = "the router that ran it has ended: send it again"
        response.status = "failed"
        response.error = ResponseError("server_error", text, "server_error", None)
    return response


_ONE = ("401", "404", "507")
ROUTES: Routes = {
    "/v1/responses": {"POST": Operation(
        lambda owner, exchange: owner.create(owner.service, exchange),
        "Answer a conversation.", Response, (*ERRORS, "507"), ResponsesRequest, streams=True,
    )},
    "/v1/responses/input_tokens": {"POST": Operation(
        lambda owner, exchange: owner.count(owner.service, exchange),
        "Count a conversation's tokens.", InputTokens, (*ERRORS, "507"), CountedRequest,
    )},
    "/v1/responses/{id}": {
        "GET": Operation(ResponseApi.get, "A stored response.", Response, ("400", *_ONE)),
        "DELETE": Operation(
            ResponseApi.delete, "Delete a stored response.", ResponseDeleted, _ONE
        ),
    },
    "/v1/responses/{id}/cancel": {"POST": Operation(
        ResponseApi.cancel, "Cancel a response in the background.", Response,
        (*ERRORS, "409", "507"),
    )},
    "/v1/responses/{id}/input_items": {"GET": Operation(
        ResponseApi.items, "New items of a response's input.", InputItems, ("400", *_ONE),
        query=ItemsQuery,
    )},
}  # fmt: skip
