"""Responses and their streams that clients find again, in one SQLite database of a folder.

SQLite, as for batches, and not etcd: a response has up to megabytes, and etcd keeps all of its few
GiB in memory, takes 1.5 MiB a value, and is not needed by anybody on another machine. The router
processes of a machine, and routers that share the folder, see the same responses.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from baton.errors import InvalidRequest, quoted
from baton.gateway.database import Database, usable
from baton.net.http_errors import HttpError

MAX_HISTORY_BYTES = 16 << 20  # of a conversation, as of a body
ALIVE_S = 30.0  # after which a background response whose router has not been heard of has failed
_VERSION = 2  # of the tables
_EXPIRED_AT_A_TIME = 100
_READ_BYTES = 1 << 20  # of a stream's events, at a time
_BETWEEN_EVENTS = b"\n\n"
_SCHEMA = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- later ones have higher numbers
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, previous TEXT NOT NULL, expires_at REAL NOT NULL,
    alive_until REAL,  -- of a background response that runs
    input BLOB NOT NULL,  -- new items, a list in JSON
    body BLOB NOT NULL,  -- the response in JSON
    event_bytes INTEGER,  -- of its stream, if it has one
    bytes INTEGER AS (length(input) + length(body) + ifnull(event_bytes, 0))
);
CREATE INDEX responses_by_tenant ON responses (tenant, number);
CREATE INDEX responses_by_expiry ON responses (expires_at);
CREATE TABLE events (
    response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    last INTEGER NOT NULL,  -- sequence number of the last event of the row
    events BLOB NOT NULL,  -- as they are sent
    PRIMARY KEY (response, last)
);
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at REAL NOT NULL,
    metadata BLOB NOT NULL,  -- in JSON
    bytes INTEGER NOT NULL  -- of metadata and items
);
CREATE INDEX conversations_by_tenant ON conversations (tenant, number);
CREATE INDEX conversations_by_expiry ON conversations (expires_at);
CREATE TABLE items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    body BLOB NOT NULL,  -- in JSON
    UNIQUE (conversation, id)
);
CREATE INDEX items_by_id ON items (id);
"""
_EXPIRED = (
    "DELETE FROM responses WHERE number IN "
    "(SELECT number FROM responses WHERE expires_at < ? LIMIT ?)",
    "DELETE FROM conversations WHERE number IN "
    "(SELECT number FROM conversations WHERE expires_at < ? LIMIT ?)",
)
# Ids of a tenant's oldest responses and conversations, but for its share.
_BEYOND_SHARE = """
SELECT id FROM (
    SELECT id, SUM(bytes) OVER (ORDER BY expires_at DESC, number DESC) AS total FROM (
        SELECT id, number, expires_at, bytes FROM responses WHERE tenant = :tenant
        UNION ALL
        SELECT id, number, expires_at, bytes FROM conversations WHERE tenant = :tenant
    )
) WHERE total > :most
"""
_REMOVED = "DELETE FROM responses WHERE id = ?", "DELETE FROM conversations WHERE id = ?"


class StoredResponse(NamedTuple):
    """A response, and what came before its output."""

    id: str
    previous: str  # id, or empty
    input: bytes
    body: bytes
    is_running: bool = False  # in the background
    is_lost: bool = False  # its router ended before it did
    is_streamed: bool = False  # its events are stored, too


class StoredEvents(NamedTuple):
    """Events of a stream, and the state of its response once they were read."""

    events: bytes
    last: int  # sequence number of the last one
    response: StoredResponse


def prepare(folder: Path) -> None:
    """Creates the folder and its database. Raises ConfigError where they cannot be used."""
    with usable(folder, "--response-dir"):
        ResponseStore(folder, 0, 0.0).close()


class ResponseStore(Database):
    """The database, for one thread. Raises HttpError 404 for what is not the tenant's."""

    def __init__(self, folder: Path, max_bytes: int, lifetime_s: float) -> None:
        """`max_bytes`: each tenant's share, beyond which its oldest responses are removed."""
        super().__init__(folder / "responses.sqlite3", _SCHEMA, _VERSION, "--response-dir")
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s

    def add(self, tenant: str, response: StoredResponse) -> None:
        """Adds a response; removes what has expired, and the tenant's oldest beyond its share."""
        now = time.time()
        alive_until = now + ALIVE_S if response.is_running else None
        with self._transaction():
            self._db.execute(
                "INSERT INTO responses (id, tenant, previous, expires_at, alive_until, input, body,"
                " event_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (response.id, tenant, response.previous, now + self._lifetime_s, alive_until,
                 response.input, response.body, 0 if response.is_streamed else None),
            )  # fmt: skip
            self._make_room(tenant)

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        now = time.time()
        row = self._row(
            "SELECT * FROM responses WHERE id = ? AND tenant = ? AND expires_at >= ?",
            response_id, tenant, now,
        )  # fmt: skip
        if row is None:
            raise HttpError(404, f"there is no response {quoted(response_id)}")
        alive_until = row["alive_until"]
        running = alive_until is not None
        return StoredResponse(
            row["id"], row["previous"], row["input"], row["body"], running,
            running and alive_until < now, row["event_bytes"] is not None,
        )  # fmt: skip

    def history(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """A response and those before it, oldest first. Raises InvalidRequest."""
        found, size = list[StoredResponse](), 0
        while response_id:
            try:
                response = self.get(tenant, response_id)
            except HttpError as error:
                raise InvalidRequest(
                    f"{error}, or it is of an earlier turn and was removed: send the conversation "
                    "in input",
                    "previous_response_id",
                ) from error
            if response.is_running and not response.is_lost:
                raise InvalidRequest(f"{response_id} has not ended", "previous_response_id")
            found.append(response)
            size += len(response.input) + len(response.body)
            if size > MAX_HISTORY_BYTES:
                raise InvalidRequest(
                    f"the conversation has more than {MAX_HISTORY_BYTES} bytes: send its last part "
                    "in input",
                    "previous_response_id",
                )
            response_id = response.previous
        return found[::-1]

    def delete(self, tenant: str, response_id: str) -> None:
        """Removes a response; one that runs ends."""
        with self._transaction():
            self.get(tenant, response_id)
            self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    # In the background.

    def end(self, tenant: str, response_id: str, body: bytes) -> bool:
        """Stores the end of a response that runs; False if it was cancelled or deleted."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE responses SET body = ?, alive_until = NULL WHERE id = ? AND tenant = ? AND "
                "alive_until IS NOT NULL",
                (body, response_id, tenant),
            ).rowcount
            self._make_room(tenant)
        return bool(changed)

    def add_events(self, events: Mapping[str, tuple[int, bytes]]) -> None:
        """Adds to the streams of responses that run, by id: the last event's number, and events."""
        with self._transaction():
            for response_id, (last, sent) in events.items():
                if self._db.execute(
                    "UPDATE responses SET event_bytes = event_bytes + ? WHERE id = ? AND "
                    "alive_until IS NOT NULL",
                    (len(sent), response_id),
                ).rowcount:
                    self._db.execute(
                        "INSERT INTO events VALUES (?, ?, ?)", (response_id, last, sent)
                    )

    def events(self, tenant: str, response_id: str, after: int) -> StoredEvents:
        """The stream's next events; empty at the end of what is stored.

        after: sequence number of the event before them, or -1.
        """
        response = self.get(tenant, response_id)
        found, size, last = list[bytes](), 0, after
        for row in self._db.execute(
            "SELECT last, events FROM events WHERE response = ? AND last > ? ORDER BY last",
            (response_id, after),
        ):
            events = row["events"].split(_BETWEEN_EVENTS)[:-1]
            new = events[-(row["last"] - last) :]
            found += new
            last = row["last"]
            size += len(row["events"])
            if size > _READ_BYTES:
                break
        return StoredEvents(b"".join(one + _BETWEEN_EVENTS for one in found), last, response)

    def version(self) -> tuple[int, int]:
        """Differs after a change of the database, by this process or another one."""
        return int(self._row("PRAGMA data_version")[0]), self._db.total_changes

    def running(self, response_ids: Collection[str]) -> set[str]:
        """Which of these still run: the others have ended, or were cancelled or deleted."""
        return {
            response_id
            for response_id in response_ids
            if self._row(
                "SELECT 1 FROM responses WHERE id = ? AND alive_until IS NOT NULL", response_id
            )
        }

    def keep_alive(self, response_ids: Collection[str]) -> None:
        """Tells other processes that these responses still run here."""
        with self._transaction():
            self._db.executemany(
                "UPDATE responses SET alive_until = ? WHERE id = ? AND alive_until IS NOT NULL",
                [(time.time() + ALIVE_S, response_id) for response_id in response_ids],
            )

    # Room.

    def _make_room(self, tenant: str) -> None:
        """Removes what has expired, and what the tenant has beyond its share, oldest first."""
        now, kept = time.time(), {"tenant": tenant, "most": self._max_bytes}
        for statement in _EXPIRED:
            self._db.execute(statement, (now, _EXPIRED_AT_A_TIME))
        for row in self._db.execute(_BEYOND_SHARE, kept).fetchall():
            for statement in _REMOVED:
                self._db.execute(statement, (row[0],))
