"""Files and batches of tenants in a folder, which is all that is known of them.

    DIR/TENANT/file-ID.json, .jsonl     a file: what the API says of it, and its content
    DIR/TENANT/batch_ID.json, .cancel   a batch, and whether somebody asked to cancel it

A file is there once its .json is. A batch's .json is written when it is created, and from then on
by the one process that runs it (`baton.gateway.batch_runner`), so that any process which has the
folder answers for all of it. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from baton.errors import ConfigError, InvalidRequest, Overloaded, quoted
from baton.gateway import api
from baton.net.http_errors import HttpError

MAX_FILE_BYTES = 200 << 20  # OpenAI's, as are the next two
MAX_LINES = 50_000
WINDOW_S = 24 * 3600.0
MAX_FILES = 1000  # of a tenant
MAX_BATCHES = 1000  # of a tenant; with one more the oldest that has ended is forgotten
MAX_UNFINISHED = 100  # of those
_RETRY_S = 60.0  # until there may be room for one more
_BLOCK_BYTES = 4096  # taken by the smallest file
_ID = re.compile(r"(file-[0-9a-f]{24}(-output|-errors)?|batch_[0-9a-f]{24})")

Status = Literal[
    "validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"
]
FINISHED = ("failed", "completed", "expired", "cancelled")
LOCK = ".lock"  # beside tenants' folders: no tenant's name begins with a dot


class File(Struct, kw_only=True):
    """What is known of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    object: Literal["file"] = "file"
    purpose: Literal["batch", "batch_output"] = "batch"
    status: Literal["processed"] = "processed"


class FileDeleted(Struct):
    """That a file is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequest(Struct, kw_only=True):
    """What to run: a file of requests, one in each line, all for one endpoint."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: api.Metadata | None = None


class BatchError(Struct):
    """Why a batch failed, and where in its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    """All reasons that were found."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    """How far a batch has come."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, kw_only=True):
    """A batch; times are Unix seconds."""

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
    metadata: api.Metadata | None = None

    @property
    def finished(self) -> bool:
        return self.status in FINISHED


class _Page(Struct, kw_only=True):
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class Files(_Page, kw_only=True):
    """Some of a tenant's files."""

    data: list[File]


class Batches(_Page, kw_only=True):
    """Some of a tenant's batches, newest first."""

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


S = TypeVar("S", File, Batch)


def prepare(folder: Path) -> None:
    """Makes the folder of `--batch-dir`. Raises ConfigError where nothing can be kept in it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / LOCK).open("ab") as lock:
            try_lock(lock)
    except OSError as error:
        raise ConfigError(f"--batch-dir {folder} cannot be used: {error.strerror}") from error


def try_lock(lock: BinaryIO) -> bool:
    """Takes the lock of a folder until the file is closed, unless another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def new_id(after: str = "") -> str:
    """Later ones sort behind earlier ones, and behind `after`: the clock may be set back."""
    now = max(time.time_ns() // 1_000_000, int(after[:12] or "0", 16) + 1)
    return f"{now:012x}{secrets.token_hex(6)}"


class BatchStore:
    """The files and batches of one tenant. Raises HttpError 404 for what is not this tenant's."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """`most_bytes` is this tenant's share of the disk."""
        self._folder = folder
        self.tenant = folder.name
        self._most_bytes = most_bytes

    @property
    def is_full(self) -> bool:
        """Whether the share is used up."""
        return self._used_bytes() > self._most_bytes

    def check_room(self, more_bytes: int = 0) -> None:
        """Raises InvalidRequest where so much more, or one more file, does not fit."""
        if self._used_bytes() + more_bytes > self._most_bytes:
            raise InvalidRequest(
                f"files and results may take {self._most_bytes} bytes here (--batch-disk): delete "
                "some first",
                "file",
            )
        if sum(1 for _ in self._folder.glob("file-*.json")) >= MAX_FILES:
            raise InvalidRequest(f"there are {MAX_FILES} files: delete some first", "file")

    def part(self) -> BinaryIO:
        """A file to write to, until `keep` gives it its name."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return (self._folder / f"{secrets.token_hex(12)}.part").open("xb")

    def add(self, part: BinaryIO, filename: str) -> File:
        """Makes a file of what was written there."""
        self.check_room()
        file_id, now = self._new_id("file-"), int(time.time())
        file = File(id=file_id, bytes=part.tell(), created_at=now, filename=filename)
        _keep(part, self.content(file_id))
        try:
            self.save(file)
        except OSError:
            self.content(file_id).unlink(missing_ok=True)
            raise
        return file

    def _new_id(self, kind: str) -> str:
        """An id behind all that are here of that kind."""
        last = max((path.stem for path in self._folder.glob(f"{kind}*.json")), default="")
        return kind + new_id(last.removeprefix(kind))

    def save(self, item: File | Batch) -> None:
        """Whole or not at all, and on the disk; a batch for the process that runs it."""
        with self.part() as part:
            try:
                part.write(msgspec.json.encode(item))
                _keep(part, self._folder / f"{item.id}.json")
            except OSError:
                Path(part.name).unlink(missing_ok=True)
                raise

    def content(self, file_id: str) -> Path:
        """Where a file's content is."""
        return self._folder / f"{file_id}.jsonl"

    def file(self, file_id: str) -> File:
        return self._read(file_id, File, "file")

    def open(self, file_id: str) -> BinaryIO:
        """A file's content."""
        self.file(file_id)
        return self.content(file_id).open("rb")

    def files(self) -> list[File]:
        """All of them, oldest first."""
        return self._all("file-", File)

    def delete(self, file_id: str) -> FileDeleted:
        """Deletes a file and its content. Raises HttpError 409 while a batch reads it."""
        self.file(file_id)
        for batch in self.batches():
            if batch.input_file_id == file_id and not batch.finished:
                raise HttpError(409, f"{batch.id} reads {file_id}: cancel it first")
        for path in (self._folder / f"{file_id}.json", self.content(file_id)):
            path.unlink(missing_ok=True)
        return FileDeleted(file_id)

    def create(self, request: BatchRequest) -> Batch:
        """A batch, which waits to be run. Raises Overloaded where too many do."""
        self.file(request.input_file_id)
        batches = self.batches()
        finished = [batch for batch in batches if batch.finished]
        if len(batches) - len(finished) >= MAX_UNFINISHED:
            raise Overloaded(f"{MAX_UNFINISHED} batches have not finished yet", _RETRY_S)
        for batch in finished[: max(0, len(batches) + 1 - MAX_BATCHES)]:
            for path in (self._folder / f"{batch.id}.json", self._cancel_mark(batch.id)):
                path.unlink(missing_ok=True)
        now = time.time()
        batch = Batch(
            id=self._new_id("batch_"),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            created_at=int(now),
            expires_at=int(now + WINDOW_S),
            metadata=request.metadata,
        )
        self.save(batch)
        return batch

    def batch(self, batch_id: str) -> Batch:
        """A batch as it is now, with `cancelling` where that was asked for."""
        return self._marked(self._read(batch_id, Batch, "batch"))

    def batches(self) -> list[Batch]:
        """All of them, oldest first."""
        return [self._marked(batch) for batch in self._all("batch_", Batch)]

    def batch_ids(self) -> list[str]:
        """Of all of them, oldest first."""
        return sorted(path.stem for path in self._folder.glob("batch_*.json"))

    def cancel(self, batch_id: str) -> Batch:
        """Asks whoever runs it to cancel it. Raises HttpError 409 where it has ended."""
        batch = self.batch(batch_id)
        if batch.finished:
            raise HttpError(409, f"{batch_id} is {batch.status}: it cannot be cancelled")
        self._cancel_mark(batch_id).touch()
        return self.batch(batch_id)

    def _cancel_mark(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.cancel"

    def _marked(self, batch: Batch) -> Batch:
        with contextlib.suppress(FileNotFoundError):
            batch.cancelling_at = int(self._cancel_mark(batch.id).stat().st_mtime)
            if not batch.finished:
                batch.status = "cancelling"
        return batch

    def _used_bytes(self) -> int:
        sizes = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    sizes += max(entry.stat().st_size, _BLOCK_BYTES)
        return sizes

    def _read(self, name: str, kind: type[S], what: str) -> S:
        with contextlib.suppress(FileNotFoundError):
            if _ID.fullmatch(name) and name.startswith(what):
                return msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=kind)
        raise HttpError(404, f"there is no {what} {quoted(name)}")

    def _all(self, start: str, kind: type[S]) -> list[S]:
        found = []
        for path in sorted(self._folder.glob(f"{start}*.json")):
            with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        return found


def _keep(part: BinaryIO, path: Path) -> None:
    """Brings it and its name to the disk."""
    part.flush()
    os.fsync(part.fileno())
    Path(part.name).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
