"""OpenAI's /v1/responses with what it stores: earlier responses, and those in the background.

Without `--response-dir` nothing is stored. Responses belong to the tenant that created them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from baton.config import ApiConfig
from baton.errors import InvalidRequest
from baton.gateway import openai
from baton.gateway.background import BackgroundResponses, shown
from baton.gateway.batch_store import Page, page_of
from baton.gateway.batches import query_of
from baton.gateway.conversation_store import ConversationStore, stored_items
from baton.gateway.database import DatabaseThread
from baton.gateway.endpoint import Call, Endpoint
from baton.gateway.generation import generate
from baton.gateway.headers import caller_of
from baton.gateway.openapi import ERRORS, Operation, Routes
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.responses import (
    CountedRequest,
    ResponsesRequest,
    parse_counted,
    parse_response,
    parsed_response,
    shown_items,
)
from baton.gateway.responses_output import ResponseGeneration
from baton.gateway.responses_store import ResponseStore, StoredResponse
from baton.gateway.responses_types import Response
from baton.gateway.tokenize import count_chat
from baton.net.http_errors import HttpError
from baton.net.http_server import HttpExchange
from router.generation_service import Caller, GenerationService

_encode = msgspec.json.encode
_PREFIX = "/v1/responses/"


class InputTokens(Struct):
    """The number of a conversation's tokens."""

    input_tokens: openai.Count
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseDeleted(Struct):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ResponseQuery(Struct):
    """How to answer with a response; other parameters are ignored."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None  # sequence number of an event


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
        self.database = DatabaseThread(
            lambda: ConversationStore(folder, config.response_disk, config.response_lifetime_s),
            folder,
            "--response-dir",
        )
        self._background = BackgroundResponses(self.database)
        self.create = Endpoint(parse_response, self._create)
        self.count = Endpoint(parse_counted, self._count)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Responses may run in the background while inside; what still runs then is lost."""
        try:
            async with self._background.running():
                yield
        finally:
            self.database.close()

    # Requests.

    async def _create(self, parsed: ParsedRequest, call: Call) -> None:
        tenant = call.service.tenant_of(call.caller).name
        parsed = await self._with_context(parsed, call.caller, tenant)
        body = parsed.options
        assert isinstance(body, ResponsesRequest)
        stores = self._folder is not None and body.store is not False
        keep = partial(self._keep, call.caller, tenant, body)
        if not body.background:
            start = partial(
                ResponseGeneration,
                keep=keep if stores or body.conversation else None,
                stores=stores,
            )
            await generate(start, parsed, call)
            return
        if not stores:
            text = "background needs store and a router with --response-dir"
            raise InvalidRequest(text, "background")
        self._background.check_room()
        call = call.with_request_id(body.request_id)
        try:
            generation = ResponseGeneration(parsed, call, keep, stores)
            response = await self._background.begin(
                tenant, generation, partial(self._continue, tenant, body)
            )
        except InvalidRequest as error:
            raise parsed.renamed(error) from error
        if body.stream:
            await self._background.follow(tenant, response.id, -1, call.exchange)
        else:
            call.answer(response)

    async def _count(self, parsed: ParsedRequest, call: Call) -> None:
        tenant = call.service.tenant_of(call.caller).name
        parsed = await self._with_context(parsed, call.caller, tenant)
        call.answer(InputTokens(await count_chat(parsed, call)))

    async def _with_context(
        self, parsed: ParsedRequest, caller: Caller, tenant: str
    ) -> ParsedRequest:
        """The request behind the response or conversation, and with the items, that it names."""
        body = parsed.options
        assert isinstance(body, ResponsesRequest)
        previous, conversation = body.previous_response_id or "", body.conversation_id
        named = {"previous_response_id": previous, "conversation": conversation}
        fields = [name for name, given in named.items() if given]
        fields += (places[0] for places in body.references.values())
        if not fields:
            return parsed
        if self._folder is None:
            raise InvalidRequest(
                "responses are not stored: send the whole conversation in input, without "
                f"{fields[0]}, or start the router with --response-dir",
                fields[0],
            )
        if previous and conversation:
            text = "give either previous_response_id or conversation"
            raise InvalidRequest(text, "previous_response_id")
        async with self.service.within(caller):
            context = await self.database.call(
                ConversationStore.context, tenant, previous, conversation, body.references
            )
            return await self.service.run_in_thread(parsed_response, body, context)

    async def _keep(
        self, caller: Caller, tenant: str, body: ResponsesRequest, response: Response
    ) -> None:
        """Stores a response to `body`, which may still run, until the caller's deadline."""
        async with self.service.within(caller):
            await self._store(tenant, body, response)

    async def _store(self, tenant: str, body: ResponsesRequest, response: Response) -> None:
        is_running = response.status == "in_progress"
        if response.store:
            stored = StoredResponse(
                response.id,
                body.previous_response_id or "",
                _new_items(body, response),
                _encode(response),
                is_running,
                is_streamed=bool(body.background and body.stream),
            )
            await self.database.call(ResponseStore.add, tenant, stored)
        if not is_running:
            await self._continue(tenant, body, response)

    async def _continue(self, tenant: str, body: ResponsesRequest, response: Response) -> None:
        """Adds input and output to the conversation."""
        if body.conversation and response.status != "failed":
            items = stored_items(_new_items(body, response))
            items += stored_items(_encode(response.output))
            await self.database.call(
                ConversationStore.add_items, tenant, body.conversation_id, items
            )

    # Stored responses.

    async def get(self, exchange: HttpExchange) -> None:
        """Answers with a response, or streams its events."""
        query = query_of(ResponseQuery, exchange)
        if query.stream:
            after = -1 if query.starting_after is None else query.starting_after
            tenant = self.tenant_of(exchange)
            await self._background.follow(tenant, _id(exchange), after, exchange)
        else:
            exchange.answer(200, _encode(shown(await self._stored(exchange))))

    async def delete(self, exchange: HttpExchange) -> None:
        """Deletes a response; one that runs ends."""
        response_id, tenant = _id(exchange), self.tenant_of(exchange)
        async with self.service.within(caller_of(exchange)):
            await self.database.call(ResponseStore.delete, tenant, response_id)
        self._background.cancel(response_id)
        exchange.answer(200, _encode(ResponseDeleted(response_id)))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Ends a response that runs in the background; one that is cancelled stays so."""
        stored = await self._stored(exchange)
        response = shown(stored)
        if stored.is_running:
            response = msgspec.structs.replace(response, status="cancelled", error=None)
            tenant, body = self.tenant_of(exchange), _encode(response)
            async with self.service.within(caller_of(exchange)):
                has_ended = await self.database.call(ResponseStore.end, tenant, stored.id, body)
            if not has_ended:
                response = shown(await self._stored(exchange))  # it has just ended
            else:
                self._background.cancel(stored.id)
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
        tenant = self.tenant_of(exchange)
        async with self.service.within(caller_of(exchange)):
            return await self.database.call(ResponseStore.get, tenant, _id(exchange))

    def tenant_of(self, exchange: HttpExchange) -> str:
        """The caller's tenant. Raises HttpError if nothing is stored."""
        tenant = self.service.tenant_of(caller_of(exchange)).name
        if self._folder is None:
            text = f"{exchange.path}: this router was started without --response-dir DIR"
            raise HttpError(404, text)
        return tenant


def _id(exchange: HttpExchange) -> str:
    return exchange.path.removeprefix(_PREFIX).partition("/")[0]


def _new_items(body: ResponsesRequest, response: Response) -> bytes:
    """The request's own items, as a list in JSON."""
    key = f"{response.id.removeprefix('resp_')}_input"
    return _encode(shown_items(body.kept_items, key))


_ONE = ("401", "404", "507")
ROUTES: Routes = {
    "/v1/responses": {"POST": Operation(
        lambda owner, exchange: owner.create(owner.service, exchange),
        "Answer a conversation.", Response, (*ERRORS, "507"), ResponsesRequest, streams=True,
        runs=True,
    )},
    "/v1/responses/input_tokens": {"POST": Operation(
        lambda owner, exchange: owner.count(owner.service, exchange),
        "Count a conversation's tokens.", InputTokens, (*ERRORS, "507"), CountedRequest,
    )},
    "/v1/responses/{id}": {
        "GET": Operation(
            ResponseApi.get, "A stored response, or with ?stream=true its events.", Response,
            ("400", *_ONE), query=ResponseQuery,
        ),
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
