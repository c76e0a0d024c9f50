"""Files and batches of all tenants, in one SQLite database in the folder of `--batch-dir`.

The gateways of all routers that share the folder create files and batches here; one batch runner
(`baton.gateway.batch_runner`) adds results and changes the status of batches. Everything blocks,
and raises sqlite3.Error where the database cannot be read or written.
"""

# ruff: noqa: S608 - only constants are put into statements

from __future__ import annotations

import codecs
import contextlib
import fcntl
import operator
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from baton.errors import ConfigError, InvalidRequest, Overloaded, quoted
from baton.gateway.database import Database, usable
from baton.net.http_errors import HttpError

MAX_FILE_BYTES = 200 << 20  # OpenAI's, as are the next two
MAX_LINES = 50_000
WINDOW_S = 24 * 3600.0
MAX_FILES = 1000  # of a tenant
MAX_BATCHES = 1000  # of a tenant; beyond, the oldest finished one is forgotten
MAX_UNFINISHED = 100  # of those
_RETRY_S = 60.0  # before another batch may be created
_READ_BYTES = 256 << 10
_VERSION = 1  # of the tables
_SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    created_at INTEGER NOT NULL, bytes INTEGER NOT NULL DEFAULT 0,
    ready INTEGER NOT NULL DEFAULT 0  -- 0 for results while the batch runs
);
CREATE INDEX files_by_tenant ON files (tenant, id);
CREATE TABLE chunks (  -- contents of files; in a file of results, `number` is the input's line
    file_id TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    number INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (file_id, number)
);
CREATE TABLE batches (  -- `body` is `Batch` in JSON
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, body TEXT NOT NULL,
    status TEXT AS (json_extract(body, '$.status'))
);
CREATE INDEX batches_by_tenant ON batches (tenant, id);
"""

Status = Literal[
    "validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"
]
FINISHED = ("failed", "completed", "expired", "cancelled")
_FILES = "SELECT * FROM files WHERE tenant = ? AND ready"
_BATCHES = "SELECT * FROM batches WHERE tenant = ?"
Metadata = Annotated[  # OpenAI's limits
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class File(Struct, kw_only=True):
    """A file, as the API describes it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    object: Literal["file"] = "file"
    purpose: Literal["batch", "batch_output"] = "batch"
    status: Literal["processed"] = "processed"


class FileDeleted(Struct):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequest(Struct, kw_only=True):
    """A request to run a file of requests, one a line, all for one endpoint."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: None = None


class BatchError(Struct):
    """Why a batch failed, and the input's line at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """All reasons why a batch failed."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    """Requests of a batch, by result."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, kw_only=True):
    """A batch, as the API describes it; times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: Literal["24h"] = "24h"
    object: Literal["batch"] = "batch"
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: Metadata | None = None

    @property
    def result_files(self) -> dict[str, str]:
        """The ids of the files of its results, by the result."""
        number = self.id.removeprefix("batch_")
        return {"completed": f"file-{number}-output", "failed": f"file-{number}-errors"}


class Page(Struct, kw_only=True):
    """A page of a list."""

    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class Files(Page, kw_only=True):
    """A page of a tenant's files."""

    data: list[File]


class Batches(Page, kw_only=True):
    """A page of a tenant's batches, newest first."""

    data: list[Batch]


class FilesQuery(Struct):
    """Which files to list."""

    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str = ""


class BatchesQuery(Struct):
    """Which batches to list."""

    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class LineResult(NamedTuple):
    """One line's result."""

    line: int  # number in the input file, from 0
    kind: Literal["completed", "failed"]
    data: bytes  # a line of JSON


def prepare(folder: Path) -> None:
    """Creates the folder and its database. Raises ConfigError where they cannot be used."""
    with usable(folder, "--batch-dir"):
        for pattern in ("*/file-*.json", "*/batch_*.json"):
            if found := next(folder.glob(pattern), None):
                raise ConfigError(
                    f"--batch-dir {folder} has batches of an older version, such as {found}: "
                    "finish them with that version, then give an empty folder"
                )
        with lock_file(folder) as lock:
            try_lock(lock)
        BatchStore(folder, 0).close()


def lock_file(folder: Path) -> BinaryIO:
    """The file whose lock the process holds that runs the folder's batches."""
    return (folder / ".lock").open("ab")


def try_lock(lock: BinaryIO) -> bool:
    """Locks a file until it is closed everywhere; False while another process has the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_id(after: str = "") -> str:
    """An id that sorts behind all earlier ones, and behind `after`: the clock may be set back."""
    now = max(time.time_ns() // 1_000_000, int(after[:12] or "0", 16) + 1)
    return f"{now:012x}{secrets.token_hex(6)}"


class BatchStore(Database):
    """The database, for one thread. Raises HttpError 404 for what is not the tenant's."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: each tenant's share of the disk. Raises ConfigError for unknown tables."""
        super().__init__(folder / "batches.sqlite3", _SCHEMA, _VERSION, "--batch-dir")
        self._max_bytes = max_bytes

    # Files.

    def check_room(self, tenant: str, more_bytes: int = 0, more_files: int = 1) -> None:
        """Raises InvalidRequest if the tenant may not have these bytes and files in addition."""
        if self._used_bytes(tenant) + more_bytes > self._max_bytes:
            raise InvalidRequest(
                f"files and results may take {self._max_bytes} bytes (--batch-disk): delete some "
                "first",
                "file",
            )
        count = self._row("SELECT COUNT(*) FROM files WHERE tenant = ?", tenant)[0]
        if count + more_files > MAX_FILES:
            raise InvalidRequest(f"there are {MAX_FILES} files: delete some first", "file")

    def add(self, tenant: str, filename: str, content: BinaryIO) -> File:
        """Adds a file. Raises InvalidRequest if the tenant may have no more."""
        with self._transaction():
            file_id = self._new_id("file-")
            columns = {"filename": filename, "purpose": "batch", "ready": 1}
            self._add_file(file_id, tenant, **columns)
            for number, data in enumerate(iter(partial(content.read, _READ_BYTES), b"")):
                self._add_chunk(file_id, number, data)
            self.check_room(tenant, more_files=0)
        return self.file(tenant, file_id)

    def file(self, tenant: str, file_id: str) -> File:
        row = self._row(f"{_FILES} AND id = ?", tenant, file_id)
        if row is None:
            raise HttpError(404, f"there is no file {quoted(file_id)}")
        return msgspec.convert(dict(row), File)

    def files(self, tenant: str, query: FilesQuery) -> Files:
        """A page of the tenant's files."""
        select, values = f"{_FILES} AND ? IN ('', purpose)", (tenant, query.purpose)
        rows = self._page(select, values, query, query.order)
        return Files(**page_of([msgspec.convert(dict(row), File) for row in rows], query.limit))

    def read(self, file_id: str, after: int = -1) -> tuple[bytes, int]:
        """Some of a file's content, from behind chunk `after` on, and the last chunk's number.

        Empty at the end.
        """
        parts, num_bytes = [], 0
        select = "SELECT number, data FROM chunks WHERE file_id = ? AND number > ? ORDER BY number"
        for number, data in self._db.execute(select, (file_id, after)):
            parts.append(data)
            after, num_bytes = number, num_bytes + len(data)
            if num_bytes >= _READ_BYTES:
                break
        return b"".join(parts), after

    def lines(self, file_id: str, max_bytes: int) -> Iterator[bytes]:
        """The lines of a file; the first one over `max_bytes` is the last.

        They are without their ends, and without the byte order marks of editors and shells.
        """
        rest, after = b"", -1
        while len(rest) <= max_bytes:
            data, after = self.read(file_id, after)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.removeprefix(codecs.BOM_UTF8)
        yield rest.removeprefix(codecs.BOM_UTF8)

    def delete(self, tenant: str, file_id: str) -> FileDeleted:
        """Deletes a file. Raises HttpError 409 while a batch reads it."""
        with self._transaction():
            self.file(tenant, file_id)
            for _, batch in self._unfinished():
                if batch.input_file_id == file_id:
                    raise HttpError(409, f"{batch.id} reads {file_id}: cancel it first")
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return FileDeleted(file_id)

    # Batches.

    def create(self, tenant: str, request: BatchRequest) -> Batch:
        """Creates a batch, which the runner finds. Raises Overloaded where too many wait."""
        with self._transaction():
            self.file(tenant, request.input_file_id)
            count, finished = self._row(
                f"SELECT COUNT(*), TOTAL(status IN {FINISHED}) FROM batches WHERE tenant = ?",
                tenant,
            )
            if count - finished >= MAX_UNFINISHED:
                raise Overloaded(f"{MAX_UNFINISHED} batches have not finished yet", _RETRY_S)
            self._db.execute(
                f"DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE tenant = ? AND "
                f"status IN {FINISHED} ORDER BY id LIMIT ?)",
                (tenant, max(0, count + 1 - MAX_BATCHES)),
            )
            now = time.time()
            batch = Batch(
                id=self._new_id("batch_"),
                endpoint=request.endpoint,
                input_file_id=request.input_file_id,
                created_at=int(now),
                expires_at=int(now + WINDOW_S),
                metadata=request.metadata,
            )
            self._db.execute(
                "INSERT INTO batches VALUES (?, ?, ?)", (batch.id, tenant, _json(batch))
            )
        return batch

    def batch(self, tenant: str, batch_id: str) -> Batch:
        row = self._row(f"{_BATCHES} AND id = ?", tenant, batch_id)
        if row is None:
            raise HttpError(404, f"there is no batch {quoted(batch_id)}")
        return _batch(row)

    def batches(self, tenant: str, query: BatchesQuery) -> Batches:
        """A page of the tenant's batches, newest first."""
        rows = self._page(_BATCHES, (tenant,), query, "desc")
        return Batches(**page_of([_batch(row) for row in rows], query.limit))

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Asks the runner to cancel a batch. Raises HttpError 409 where it has finished."""
        with self.changing(tenant, batch_id) as batch:
            if batch.status in FINISHED:
                raise HttpError(409, f"{batch_id} is {batch.status}: it cannot be cancelled")
            batch.status = "cancelling"
            batch.cancelling_at = batch.cancelling_at or int(time.time())
        return batch

    @contextlib.contextmanager
    def changing(self, tenant: str, batch_id: str) -> Iterator[Batch]:
        """A transaction that writes the changes made to a batch within."""
        with self._transaction():
            batch = self.batch(tenant, batch_id)
            yield batch
            self._db.execute("UPDATE batches SET body = ? WHERE id = ?", (_json(batch), batch_id))

    # For the runner.

    def unfinished(self) -> list[tuple[str, Batch, bool]]:
        """Batches to run, oldest first, with tenants, and whether a tenant's share is used up."""
        found = self._unfinished()
        is_full = {tenant: self._used_bytes(tenant) > self._max_bytes for tenant, _ in found}
        return [(tenant, batch, is_full[tenant]) for tenant, batch in found]

    def _unfinished(self) -> list[tuple[str, Batch]]:
        select = f"SELECT tenant, body FROM batches WHERE status NOT IN {FINISHED} ORDER BY id"
        return [(row["tenant"], _batch(row)) for row in self._db.execute(select)]

    def count_batches(self) -> dict[str, int]:
        """Batches of all tenants by their status."""
        return dict(self._db.execute("SELECT status, COUNT(*) FROM batches GROUP BY status"))

    def begin(self, tenant: str, batch_id: str, total: int) -> None:
        """Makes a batch in progress, with files for the results of its `total` requests."""
        with self.changing(tenant, batch_id) as batch:
            for file_id in batch.result_files.values():
                name = f"{file_id}.jsonl"
                self._add_file(file_id, tenant, filename=name, purpose="batch_output")
            batch.in_progress_at, batch.request_counts.total = int(time.time()), total
            if batch.status == "validating":
                batch.status = "in_progress"

    def done(self, batch: Batch) -> set[int]:
        """The numbers of the lines that have results."""
        select = "SELECT number FROM chunks WHERE file_id IN (?, ?)"
        return {number for (number,) in self._db.execute(select, (*batch.result_files.values(),))}

    def add_results(self, tenant: str, batch_id: str, results: Sequence[LineResult]) -> None:
        """Adds results and counts them, all or none."""
        with self.changing(tenant, batch_id) as batch:
            counts = batch.request_counts
            for line, kind, data in results:
                self._add_chunk(batch.result_files[kind], line, data)
                setattr(counts, kind, getattr(counts, kind) + 1)

    def finish(
        self, tenant: str, batch_id: str, status: Status, errors: Sequence[BatchError]
    ) -> Batch:
        """Finishes a batch and publishes its results."""
        now = int(time.time())
        with self.changing(tenant, batch_id) as batch:
            if batch.in_progress_at:
                batch.finalizing_at = now
            for kind, field in (("completed", "output_file_id"), ("failed", "error_file_id")):
                file_id = batch.result_files[kind]
                publish = "UPDATE files SET ready = 1, created_at = ? WHERE id = ? AND bytes > 0"
                if self._db.execute(publish, (now, file_id)).rowcount:
                    setattr(batch, field, file_id)
                self._db.execute("DELETE FROM files WHERE id = ? AND NOT ready", (file_id,))
            batch.errors = BatchErrors(list(errors)) if errors else None
            batch.status = status
            setattr(batch, f"{status}_at", now)
        return batch

    # Statements.

    def _page(
        self, select: str, values: Sequence[Any], query: FilesQuery | BatchesQuery, order: str
    ) -> list[Any]:
        """The rows of a page and one more; `after` may be the id of something deleted since."""
        behind = "<" if order == "desc" else ">"
        page = f"{select} AND (? = '' OR id {behind} ?) ORDER BY id {order} LIMIT ?"
        values = (*values, query.after, query.after, query.limit + 1)
        return self._db.execute(page, values).fetchall()

    def _new_id(self, kind: Literal["file-", "batch_"]) -> str:
        table = "files" if kind == "file-" else "batches"
        last = self._row(f"SELECT MAX(id) FROM {table}")[0] or ""
        return kind + new_id(last.removeprefix(kind))

    def _add_file(self, file_id: str, tenant: str, **columns: Any) -> None:
        columns |= {"id": file_id, "tenant": tenant, "created_at": int(time.time())}
        marks = ", ".join("?" * len(columns))
        insert = f"INSERT INTO files ({', '.join(columns)}) VALUES ({marks})"
        self._db.execute(insert, (*columns.values(),))

    def _add_chunk(self, file_id: str, number: int, data: bytes) -> None:
        self._db.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file_id, number, data))
        self._db.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(data), file_id))

    def _used_bytes(self, tenant: str) -> int:
        return int(self._row("SELECT TOTAL(bytes) FROM files WHERE tenant = ?", tenant)[0])


def _batch(row: Any) -> Batch:
    return msgspec.json.decode(row["body"], type=Batch)


def _json(batch: Batch) -> str:
    return msgspec.json.encode(batch).decode()


def page_of(
    items: list[Any], limit: int, id_of: Callable[[Any], str] = operator.attrgetter("id")
) -> dict[str, Any]:
    """The members of a page, from its items and perhaps one more."""
    page = items[:limit]
    first, last = (id_of(page[0]), id_of(page[-1])) if page else (None, None)
    return {"data": page, "has_more": len(items) > limit, "first_id": first, "last_id": last}
