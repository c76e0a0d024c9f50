"""SQLite databases that processes of one machine share, and the thread that uses one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from baton.errors import ConfigError, Unavailable
from baton.net.http_errors import HttpError

log = logging.getLogger(__name__)
_BUSY_S = 10.0  # longest wait for another process's transaction
_RETRY_S = 1.0
T = TypeVar("T")
P = ParamSpec("P")


@contextlib.contextmanager
def usable(folder: Path, option: str) -> Iterator[None]:
    """Creates a folder for a database, which is opened inside. Raises ConfigError if it cannot."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {folder} cannot be used: {reason}") from error


class Database:
    """A database for one thread, committed to disk; it blocks, and raises sqlite3.Error."""

    def __init__(self, path: Path, schema: str, version: int, option: str) -> None:
        """Creates the tables of `schema` if there are none. Raises ConfigError for other ones.

        `version`: of the tables. `option`: the option that names the folder.
        """
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self.close = self._db.close
        for pragma in (
            "synchronous = FULL", "foreign_keys = ON", f"journal_size_limit = {16 << 20}"
        ):  # fmt: skip
            self._db.execute(f"PRAGMA {pragma}")
        if self._version == 0:
            self._db.execute("PRAGMA auto_vacuum = FULL")
            self._db.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                if self._version == 0:  # no other process was first
                    for statement in schema.split(";\n")[:-1]:
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {version}")
        if self._version != version:
            raise ConfigError(
                f"{path} has version {self._version}, and this is for version {version}: run the "
                f"Baton that made it, or give another {option}"
            )

    @property
    def _version(self) -> int:
        return int(self._row("PRAGMA user_version")[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """A transaction: commits at the end, rolls back on an error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _row(self, statement: str, *values: Any) -> Any:
        return self._db.execute(statement, values).fetchone()


Store = TypeVar("Store", bound=Database)


class DatabaseThread(Generic[Store]):
    """The thread that alone uses a store, which is opened by the first call."""

    def __init__(self, create: Callable[[], Store], folder: Path | None, option: str) -> None:
        self._create = create
        self._folder = folder
        self._option = option
        self._thread = ThreadPoolExecutor(1, option.strip("-"))
        self._store: Store | None = None

    async def call(
        self, work: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls `work(store, …)` in the thread.

        Raises HttpError 507 where the database cannot be read or written, and Unavailable where
        another process writes to it for too long.
        """

        def call() -> T:
            if self._store is None:
                self._store = self._create()
            return work(self._store, *args, **kwargs)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (OSError, sqlite3.Error) as error:
            folder = self._folder
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise Unavailable(f"{folder} is busy: try again", _RETRY_S) from error
            log.error("%s cannot be read or written: %s (%s)", folder, error, self._option)
            raise HttpError(
                507,
                f"{folder} cannot be read or written: {error}: its operator must free or mount its "
                "disk",
            ) from error

    def close(self) -> None:
        """Closes the store and ends the thread, once its calls have ended."""
        self._thread.submit(lambda: self._store and self._store.close())
        self._thread.shutdown()
