"""OpenAI's /v1/conversations: items that responses continue, kept until their lifetime ends.

They are in the database of stored responses, and belong to the tenant that created them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from baton.gateway import openai
from baton.gateway.batch_store import Metadata, Page, page_of
from baton.gateway.batches import query_of
from baton.gateway.conversation_store import (
    ConversationStore,
    StoredConversation,
    StoredItem,
    stored_items,
)
from baton.gateway.endpoint import Endpoint
from baton.gateway.headers import caller_of
from baton.gateway.openapi import ERRORS, Operation, Routes
from baton.gateway.responses import InputItem, check_items, shown_items
from baton.gateway.responses_api import ItemsQuery, ResponseApi
from baton.net.http_server import HttpExchange

MAX_ITEMS = 20  # of a request, as OpenAI
_PREFIX = "/v1/conversations"
_encode = msgspec.json.encode
Items = Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)]


class ConversationUpdate(Struct, kw_only=True):
    """Metadata that replaces a conversation's."""

    metadata: Metadata | None = None


class NewConversation(ConversationUpdate, kw_only=True):
    """A conversation with its first items."""

    items: Items | None = None


class NewItems(Struct, kw_only=True):
    """Items for the end of a conversation."""

    items: Annotated[Items, Meta(min_length=1)]


class Conversation(Struct):
    """A conversation without its items."""

    id: str
    created_at: openai.Count
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ConversationDeleted(Struct):
    """The answer to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ConversationItems(Page, kw_only=True):
    """A page of a conversation's items."""

    data: list[dict[str, Any]]


class ConversationApi:
    """Answers `ROUTES`."""

    def __init__(self, responses: ResponseApi) -> None:
        self.service = responses.service
        self._tenant_of = responses.tenant_of
        self._database = responses.database
        self.create = self._endpoint(NewConversation, self._create)
        self.update = self._endpoint(ConversationUpdate, self._update)
        self.add_items = self._endpoint(NewItems, self._add_items)

    async def _create(self, body: NewConversation, exchange: HttpExchange) -> None:
        tenant, key = self._tenant_of(exchange), secrets.token_hex(16)
        new = StoredConversation(f"conv_{key}", int(time.time()), _encode(body.metadata or {}))
        items = _new_items(body.items or [], key)
        async with self.service.within(caller_of(exchange)):
            await self._database.call(ConversationStore.create_conversation, tenant, new, items)
        _answer(exchange, new)

    async def _update(self, body: ConversationUpdate, exchange: HttpExchange) -> None:
        metadata = _encode(body.metadata or {})
        _answer(
            exchange, await self._call(exchange, ConversationStore.update_conversation, metadata)
        )

    async def _add_items(self, body: NewItems, exchange: HttpExchange) -> None:
        items = _new_items(body.items, secrets.token_hex(16))
        await self._call(exchange, ConversationStore.add_items, items)
        _answer_page(exchange, items, len(items))

    async def get(self, exchange: HttpExchange) -> None:
        _answer(exchange, await self._call(exchange, ConversationStore.conversation))

    async def delete(self, exchange: HttpExchange) -> None:
        await self._call(exchange, ConversationStore.delete_conversation)
        exchange.answer(200, _encode(ConversationDeleted(_ids(exchange)[0])))

    async def items(self, exchange: HttpExchange) -> None:
        query = query_of(ItemsQuery, exchange)
        found = await self._call(
            exchange, ConversationStore.items, query.after, query.limit + 1,
            newest_first=query.order == "desc",
        )  # fmt: skip
        _answer_page(exchange, found, query.limit)

    async def item(self, exchange: HttpExchange) -> None:
        exchange.answer(200, await self._call(exchange, ConversationStore.item, _ids(exchange)[1]))

    async def delete_item(self, exchange: HttpExchange) -> None:
        item_id = _ids(exchange)[1]
        _answer(exchange, await self._call(exchange, ConversationStore.delete_item, item_id))

    async def _call(
        self, exchange: HttpExchange, work: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls `work(store, tenant, id, …)` for the conversation of the path."""
        tenant = self._tenant_of(exchange)
        async with self.service.within(caller_of(exchange)):
            return await self._database.call(work, tenant, _ids(exchange)[0], *args, **kwargs)

    @staticmethod
    def _endpoint(
        kind: type[openai.T], answer: Callable[[openai.T, HttpExchange], Awaitable[None]]
    ) -> Endpoint[openai.T]:
        return Endpoint(
            lambda text: openai.decode(kind, text), lambda body, call: answer(body, call.exchange)
        )


def _ids(exchange: HttpExchange) -> tuple[str, str]:
    """Ids of the conversation and, or empty, of the item in a path."""
    conversation, _, rest = exchange.path.removeprefix(f"{_PREFIX}/").partition("/")
    return conversation, rest.removeprefix("items/")


def _new_items(items: list[InputItem], key: str) -> list[StoredItem]:
    check_items(items)
    return stored_items(_encode(shown_items(items, key)))


def _answer(exchange: HttpExchange, stored: StoredConversation) -> None:
    metadata = msgspec.json.decode(stored.metadata, type=dict[str, str])
    exchange.answer(200, _encode(Conversation(stored.id, stored.created_at, metadata)))


def _answer_page(exchange: HttpExchange, items: list[StoredItem], limit: int) -> None:
    page = page_of(items, limit, lambda item: item.id)
    data = [Raw(item.body) for item in page.pop("data")]
    exchange.answer(200, _encode({"object": "list", **page, "data": data}))


def _posted(name: str) -> Callable[[ConversationApi, HttpExchange], Awaitable[None]]:
    def handler(owner: ConversationApi, exchange: HttpExchange) -> Awaitable[None]:
        endpoint: Endpoint[Any] = getattr(owner, name)
        return endpoint(owner.service, exchange)

    return handler


_ERRORS = (*ERRORS, "507")
_ONE = ("401", "404", "507")
ROUTES: Routes = {
    _PREFIX: {"POST": Operation(
        _posted("create"), "Create a conversation.", Conversation, _ERRORS, NewConversation,
    )},
    f"{_PREFIX}/{{id}}": {
        "GET": Operation(ConversationApi.get, "A conversation.", Conversation, _ONE),
        "POST": Operation(
            _posted("update"), "Replace a conversation's metadata.", Conversation, _ERRORS,
            ConversationUpdate,
        ),
        "DELETE": Operation(
            ConversationApi.delete, "Delete a conversation.", ConversationDeleted, _ONE
        ),
    },
    f"{_PREFIX}/{{id}}/items": {
        "GET": Operation(
            ConversationApi.items, "Items of a conversation.", ConversationItems, ("400", *_ONE),
            query=ItemsQuery,
        ),
        "POST": Operation(
            _posted("add_items"), "Add items to a conversation.", ConversationItems, _ERRORS,
            NewItems,
        ),
    },
    f"{_PREFIX}/{{id}}/items/{{item}}": {
        "GET": Operation(ConversationApi.item, "An item of a conversation.", InputItem, _ONE),
        "DELETE": Operation(
            ConversationApi.delete_item, "Delete an item of a conversation.", Conversation, _ONE
        ),
    },
}  # fmt: skip
