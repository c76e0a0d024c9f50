"""Conversations beside the responses of a tenant: lists of items that requests continue."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from baton.errors import InvalidRequest, quoted
from baton.gateway.responses_store import MAX_HISTORY_BYTES, ResponseStore
from baton.net.http_errors import HttpError

# Of an item of a response, with the response's id, and whether it is one of the input.
_ITEM_ID = re.compile(r"[a-z]+_(.+?)(_input)?_\d+")


class StoredItem(NamedTuple):
    """An item in JSON, and its id."""

    id: str
    body: bytes


class StoredConversation(NamedTuple):
    """A conversation without its items."""

    id: str
    created_at: int
    metadata: bytes


class Context(NamedTuple):
    """What precedes a request's own items: lists of items in JSON; and items by id."""

    before: Sequence[bytes] = ()
    referenced: Mapping[str, bytes] = MappingProxyType({})


class _Output(Struct):
    """The part of a stored response that is added to a conversation."""

    output: Raw


class ConversationStore(ResponseStore):
    """The database, for one thread. Raises HttpError 404 for what is not the tenant's."""

    def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem]
    ) -> None:
        with self._transaction():
            self._db.execute(
                "INSERT INTO conversations (id, tenant, created_at, expires_at, metadata, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (conversation.id, tenant, conversation.created_at, time.time() + self._lifetime_s,
                 conversation.metadata, len(conversation.metadata)),
            )  # fmt: skip
            self._add(conversation.id, items)
            self._make_room(tenant)

    def conversation(self, tenant: str, conversation_id: str) -> StoredConversation:
        row = self._row(
            "SELECT * FROM conversations WHERE id = ? AND tenant = ? AND expires_at >= ?",
            conversation_id, tenant, time.time(),
        )  # fmt: skip
        if row is None:
            raise HttpError(404, f"there is no conversation {quoted(conversation_id)}")
        return StoredConversation(row["id"], row["created_at"], row["metadata"])

    def update_conversation(
        self, tenant: str, conversation_id: str, metadata: bytes
    ) -> StoredConversation:
        """Replaces the metadata."""
        with self._transaction():
            found = self.conversation(tenant, conversation_id)
            self._db.execute(
                "UPDATE conversations SET metadata = ?, bytes = bytes + ? WHERE id = ?",
                (metadata, len(metadata) - len(found.metadata), conversation_id),
            )
        return found._replace(metadata=metadata)

    def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Removes a conversation and its items; responses remain."""
        with self._transaction():
            self.conversation(tenant, conversation_id)
            self._db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def add_items(self, tenant: str, conversation_id: str, items: Sequence[StoredItem]) -> None:
        """Adds items at the end, and keeps the conversation for its lifetime from now on."""
        with self._transaction():
            self.conversation(tenant, conversation_id)
            self._add(conversation_id, items)
            self._make_room(tenant)

    def items(
        self, tenant: str, conversation_id: str, after: str, limit: int, *, newest_first: bool
    ) -> list[StoredItem]:
        """At most `limit` items behind the one with the id `after`, or from the first one."""
        self.conversation(tenant, conversation_id)
        place = self._row(
            "SELECT number FROM items WHERE conversation = ? AND id = ?", conversation_id, after
        )
        if after and place is None:
            raise HttpError(404, f"there is no item {quoted(after)} in {conversation_id}")
        first = 0 if place is None else place[0]
        if newest_first:
            found = self._db.execute(
                "SELECT id, body FROM items WHERE conversation = ? AND (? = 0 OR number < ?) "
                "ORDER BY number DESC LIMIT ?",
                (conversation_id, first, first, limit),
            )
        else:
            found = self._db.execute(
                "SELECT id, body FROM items WHERE conversation = ? AND number > ? "
                "ORDER BY number LIMIT ?",
                (conversation_id, first, limit),
            )
        return [StoredItem(*row) for row in found]

    def item(self, tenant: str, conversation_id: str, item_id: str) -> bytes:
        self.conversation(tenant, conversation_id)
        row = self._row(
            "SELECT body FROM items WHERE conversation = ? AND id = ?", conversation_id, item_id
        )
        if row is None:
            raise HttpError(404, f"there is no item {quoted(item_id)} in {conversation_id}")
        return bytes(row[0])

    def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> StoredConversation:
        """Removes an item; returns its conversation."""
        with self._transaction():
            size = len(self.item(tenant, conversation_id, item_id))
            self._db.execute(
                "DELETE FROM items WHERE conversation = ? AND id = ?", (conversation_id, item_id)
            )
            self._db.execute(
                "UPDATE conversations SET bytes = bytes - ? WHERE id = ?", (size, conversation_id)
            )
            return self.conversation(tenant, conversation_id)

    # What a request continues.

    def context(
        self, tenant: str, previous: str, conversation: str, references: Mapping[str, Sequence[str]]
    ) -> Context:
        """What a request names: a response or a conversation, or neither; and single items.

        references: the fields of each item's id. Raises InvalidRequest naming the field.
        """
        before = list[bytes]()
        for response in self.history(tenant, previous):
            before += [response.input, _output(response.body)]
        if conversation:
            before.append(self._all(tenant, conversation))
        return Context(before, self._referenced(tenant, references))

    def _all(self, tenant: str, conversation_id: str) -> bytes:
        try:
            self.conversation(tenant, conversation_id)
        except HttpError as error:
            raise InvalidRequest(str(error), "conversation") from error
        size = self._row("SELECT bytes FROM conversations WHERE id = ?", conversation_id)[0]
        if size > MAX_HISTORY_BYTES:
            raise InvalidRequest(
                f"the conversation has more than {MAX_HISTORY_BYTES} bytes: delete items of it",
                "conversation",
            )
        found = self._db.execute(
            "SELECT body FROM items WHERE conversation = ? ORDER BY number", (conversation_id,)
        )
        return b"[" + b",".join(row[0] for row in found) + b"]"

    def _referenced(self, tenant: str, references: Mapping[str, Sequence[str]]) -> dict[str, bytes]:
        """Items of any of the tenant's conversations and responses, each of which is read once."""
        found, size = dict[str, bytes](), 0
        lists = defaultdict[tuple[str, bool], set[str]](set)  # references by list of a response

        def add(item_id: str, item: bytes) -> None:
            nonlocal size
            found[item_id] = item
            size += len(item) * len(references[item_id])
            if size > MAX_HISTORY_BYTES:
                raise InvalidRequest(
                    f"the items referred to have more than {MAX_HISTORY_BYTES} bytes: refer to "
                    "fewer",
                    references[item_id][0],
                )

        for item_id in references:
            row = self._row(
                "SELECT body FROM items JOIN conversations ON conversations.id = conversation "
                "WHERE items.id = ? AND tenant = ? AND expires_at >= ?",
                item_id, tenant, time.time(),
            )  # fmt: skip
            if row is not None:
                add(item_id, bytes(row[0]))
            elif match := _ITEM_ID.fullmatch(item_id):
                lists[match[1], bool(match[2])].add(item_id)
        for (response_id, is_input), wanted in lists.items():
            try:
                response = self.get(tenant, f"resp_{response_id}")
            except HttpError:
                continue
            items = stored_items(response.input if is_input else _output(response.body))
            for item_id, item in items:
                if item_id in wanted:
                    add(item_id, item)
        for item_id, fields in references.items():
            if item_id not in found:
                raise InvalidRequest(
                    f"there is no item {quoted(item_id)}: send it whole", fields[0]
                )
        return found

    def _add(self, conversation_id: str, items: Sequence[StoredItem]) -> None:
        self._db.executemany(
            "INSERT INTO items (conversation, id, body) VALUES (?, ?, ?)",
            [(conversation_id, *item) for item in items],
        )
        size = sum(len(item.body) for item in items)
        self._db.execute(
            "UPDATE conversations SET bytes = bytes + ?, expires_at = ? WHERE id = ?",
            (size, time.time() + self._lifetime_s, conversation_id),
        )


class _WithId(Struct):
    id: str


def stored_items(items: bytes) -> list[StoredItem]:
    """The items of a list in JSON, each of which has an id."""
    return [
        StoredItem(msgspec.json.decode(one, type=_WithId).id, bytes(one))
        for one in msgspec.json.decode(items, type=list[Raw])
    ]


def _output(response: bytes) -> bytes:
    return bytes(msgspec.json.decode(response, type=_Output).output)
