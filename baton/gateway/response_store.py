"""Responses that `previous_response_id` and GET find again, in one SQLite database of a folder.

SQLite, as for batches, and not etcd: a response has up to megabytes, and etcd keeps all of its few
GiB in memory, takes 1.5 MiB a value, and is not needed by anybody on another machine. The router
processes of a machine, and routers that share the folder, see the same responses.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from baton.errors import ConfigError, InvalidRequest, quoted
from baton.gateway.database import Database
from baton.net.http_errors import HttpError

MAX_HISTORY_BYTES = 16 << 20  # of a conversation, as of a body
ALIVE_S = 30.0  # after which a background response whose router has not been heard of has failed
_VERSION = 1  # of the tables
_EXPIRED_AT_A_TIME = 100
_SCHEMA = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- later ones have higher numbers
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, previous TEXT NOT NULL, expires_at REAL NOT NULL,
    alive_until REAL,  -- of a background response that runs
    input BLOB NOT NULL,  -- new items, a list in JSON
    body BLOB NOT NULL,  -- the response in JSON
    bytes INTEGER AS (length(input) + length(body))
);
CREATE INDEX responses_by_tenant ON responses (tenant, number);
CREATE INDEX responses_by_expiry ON responses (expires_at);
"""


class StoredResponse(NamedTuple):
    """A response, and what came before its output."""

    id: str
    previous: str  # id, or empty
    input: bytes
    body: bytes
    is_running: bool = False  # in the background
    is_lost: bool = False  # its router ended before it did


def prepare(folder: Path) -> None:
    """Creates the folder and its database. Raises ConfigError where they cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ResponseStore(folder, 0, 0.0).close()
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--response-dir {folder} cannot be used: {reason}") from error


class ResponseStore(Database):
    """The database, for one thread. Raises HttpError 404 for what is not the tenant's."""

    def __init__(self, folder: Path, max_bytes: int, lifetime_s: float) -> None:
        """`max_bytes`: each tenant's share, beyond which its oldest responses are removed."""
        super().__init__(folder / "responses.sqlite3", _SCHEMA, _VERSION, "--response-dir")
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s

    def add(self, tenant: str, response: StoredResponse) -> None:
        """Adds a response; removes expired ones, and the tenant's oldest beyond its share."""
        now = time.time()
        alive_until = now + ALIVE_S if response.is_running else None
        with self._transaction():
            self._db.execute(
                "DELETE FROM responses WHERE number IN "
                "(SELECT number FROM responses WHERE expires_at < ? LIMIT ?)",
                (now, _EXPIRED_AT_A_TIME),
            )
            self._db.execute(
                "INSERT INTO responses (id, tenant, previous, expires_at, alive_until, input, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (response.id, tenant, response.previous, now + self._lifetime_s, alive_until,
                 response.input, response.body),
            )  # fmt: skip
            self._remove_beyond_share(tenant)

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
            running and alive_until < now,
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
            if response.is_running:
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
            self._remove_beyond_share(tenant)
        return bool(changed)

    def keep_alive(self, response_ids: Collection[str]) -> set[str]:
        """Which of this process's responses still run: the others were cancelled or deleted."""
        with self._transaction():
            return {
                response_id
                for response_id in response_ids
                if self._db.execute(
                    "UPDATE responses SET alive_until = ? WHERE id = ? AND alive_until IS NOT NULL",
                    (time.time() + ALIVE_S, response_id),
                ).rowcount
            }

    def _remove_beyond_share(self, tenant: str) -> None:
        self._db.execute(
            "DELETE FROM responses WHERE number IN (SELECT number FROM (SELECT number, "
            "SUM(bytes) OVER (ORDER BY number DESC) AS total FROM responses WHERE tenant = ?) "
            "WHERE total > ?)",
            (tenant, self._max_bytes),
        )
