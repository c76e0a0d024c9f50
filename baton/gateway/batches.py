"""OpenAI's /v1/files and /v1/batches: many requests in a file, answered in a file, at low priority.

Off without `--batch-dir`. Requests are the tenant's whose key they have, and nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from baton.config import ApiConfig
from baton.errors import InvalidRequest, Overloaded
from baton.gateway import api
from baton.gateway.batch_runner import BatchRunner
from baton.gateway.batch_store import (
    MAX_FILE_BYTES,
    Batch,
    Batches,
    BatchesQuery,
    BatchRequest,
    BatchStore,
    File,
    FileDeleted,
    Files,
    FilesQuery,
)
from baton.gateway.generation import Endpoint
from baton.gateway.headers import caller_of
from baton.gateway.openapi import BYTES, ERRORS, Handler, Route, Routes
from baton.net.http_errors import Header, HttpError
from baton.net.http_server import UNREAD_S, HttpExchange
from router.admission.tenants import Tenant
from router.generation_service import Caller, GenerationService

log = logging.getLogger(__name__)
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it tells of clients' mistakes

MAX_UPLOADS = 16  # of a tenant at a time
_MAX_NAME_CHARS = 255
_READ_BYTES = 256 << 10
_CHECKED_BYTES = 8 << 20  # of an upload between two looks at the room: each takes milliseconds
_RETRY_S = 1.0
_CONTENT: tuple[Header, ...] = ((b"content-type", b"application/octet-stream"),)

Item = TypeVar("Item", File, Batch)
T = TypeVar("T")
Query = TypeVar("Query", FilesQuery, BatchesQuery)


@dataclass
class BatchApi:
    """Answers `ROUTES`, and runs batches while inside `running`."""

    service: GenerationService
    config: ApiConfig
    endpoints: Mapping[str, Endpoint[Any]]  # that a batch may be for, by path
    _uploads: Counter[str] = field(default_factory=Counter)  # that come, by tenant
    _runner: BatchRunner | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Batches run while inside, if they are on."""
        if self.config.batch_dir is None:
            yield
            return
        self._runner = BatchRunner(self.config.batch_dir, self.config, self.service, self.endpoints)
        task = asyncio.create_task(self._runner.run(), name="batches")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def called(self, exchange: HttpExchange) -> tuple[Tenant, BatchStore]:
        """Who calls, and what it has here. Raises HttpError 404 where there is no folder."""
        if (folder := self.config.batch_dir) is None:
            raise HttpError(
                404, f"{exchange.path}: this router was started without --batch-dir DIR"
            )
        tenant = self.service.tenant_of(caller_of(exchange))
        return tenant, BatchStore(folder / tenant.name, self.config.batch_disk)

    def answer(self, exchange: HttpExchange, found: Any) -> None:
        """Answers with JSON; what was posted may be for the runner."""
        if self._runner and exchange.method == "POST":
            self._runner.wake.set()
        exchange.answer(200, msgspec.json.encode(found))

    async def on_disk(self, work: Callable[..., T], *args: Any) -> T:
        """Runs it on a thread. Raises HttpError 507 where the folder cannot be used."""
        try:
            return await asyncio.to_thread(work, *args)
        except OSError as error:
            text = f"{self.config.batch_dir} cannot be read or written: {error.strerror}"
            log.error("%s (--batch-dir)", text)
            raise HttpError(507, f"{text}: its operator must make room, or it possible") from error

    async def create_file(self, exchange: HttpExchange) -> None:
        """Takes an upload."""
        tenant, store = self.called(exchange)
        kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
        media_type, options = parse_options_header(kind)
        if media_type != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest(
                "send multipart/form-data with the fields purpose and file", "file"
            )
        if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(415, "a file is taken without content-encoding")
        size = int(exchange.headers.get(b"content-length", b"0"))
        _check_size(size)
        if self._uploads[tenant.name] >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files of this tenant are being uploaded", _RETRY_S)
        tenant.charge_request()
        self._uploads[tenant.name] += 1
        try:
            with exchange.body_parts() as parts:
                upload = await self.on_disk(_Upload, store, options[b"boundary"], size)
                with contextlib.closing(upload):
                    async for part in parts:
                        await self.on_disk(upload.write, part)
                    file = await self.on_disk(upload.finish)
        finally:
            self._uploads[tenant.name] -= 1
        self.answer(exchange, file)

    async def create_batch(self, exchange: HttpExchange) -> None:
        """Takes a batch, which is run later."""
        self.called(exchange)  # before its body is looked at
        endpoint = Endpoint(partial(api.decode, BatchRequest), self._create_batch)
        await endpoint(self.service, exchange)

    async def _create_batch(
        self,
        service: GenerationService,
        request: BatchRequest,
        caller: Caller,
        exchange: HttpExchange,
    ) -> None:
        tenant, store = self.called(exchange)
        if request.endpoint not in self.endpoints:
            known = ", ".join(self.endpoints)
            raise InvalidRequest(f"endpoint must be one of {known}", "endpoint")
        tenant.charge_request()
        self.answer(exchange, await self.on_disk(store.create, request))

    async def content(self, exchange: HttpExchange) -> None:
        """The bytes of a file, no faster than they are read."""
        _, store = self.called(exchange)
        with await self.on_disk(store.open, _id(exchange)) as file:
            part = await self.on_disk(file.read, _READ_BYTES)
            exchange.start(200, _CONTENT)
            while more := await asyncio.to_thread(file.read, _READ_BYTES):
                exchange.write(part)
                part = more
                try:
                    async with asyncio.timeout(UNREAD_S):
                        await exchange.writable.wait()
                except TimeoutError:
                    exchange.abort()
                    return
        exchange.end(part)


def _id(exchange: HttpExchange) -> str:
    return exchange.path.split("/")[3]


def _check_size(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise HttpError(413, f"a file may have {MAX_FILE_BYTES} bytes, its form included")


def _files(store: BatchStore, exchange: HttpExchange) -> Files:
    query = _query(FilesQuery, exchange)
    files = [file for file in store.files() if query.purpose in ("", file.purpose)]
    return Files(**_page(files, query, query.order))


def _batches(store: BatchStore, exchange: HttpExchange) -> Batches:
    return Batches(**_page(store.batches(), _query(BatchesQuery, exchange), "desc"))


def _query(kind: type[Query], exchange: HttpExchange) -> Query:
    given = dict(parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True))
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), str(error).rpartition("$.")[2].rstrip("`")) from error


def _page(
    items: Sequence[Item], query: FilesQuery | BatchesQuery, order: Literal["asc", "desc"]
) -> dict[str, Any]:
    """What `Files` and `Batches` have, of items that come oldest first."""
    if order == "desc":
        items = [item for item in reversed(items) if not query.after or item.id < query.after]
    else:
        items = [item for item in items if item.id > query.after]
    page = items[: query.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    more = len(items) > query.limit
    return {"data": page, "has_more": more, "first_id": first, "last_id": last}


def _finding(find: Callable[[BatchStore, HttpExchange], Any]) -> Handler:
    """A handler that answers with what `find`, which may block, returns."""

    async def handler(batch_api: BatchApi, exchange: HttpExchange) -> None:
        _, store = batch_api.called(exchange)
        batch_api.answer(exchange, await batch_api.on_disk(find, store, exchange))

    return handler


def _by_id(find: Callable[[BatchStore, str], Any]) -> Handler:
    return _finding(lambda store, exchange: find(store, _id(exchange)))


_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {"purpose": {"enum": ["batch"]}, "file": BYTES},
}
_LISTING, _ONE = ("400", "401", "404", "507"), ("401", "404", "507")  # errors
_POST = (*ERRORS, "507")
# All are 404 without --batch-dir.
ROUTES: Routes = {
    "/v1/files": {
        "GET": Route(_finding(_files), "The caller's files.", Files, _LISTING, query=FilesQuery),
        "POST": Route(BatchApi.create_file, "Upload a file of requests.", File, _POST, form=_FORM),
    },
    "/v1/files/{id}": {
        "GET": Route(_by_id(BatchStore.file), "One file.", File, _ONE),
        "DELETE": Route(_by_id(BatchStore.delete), "Delete a file.", FileDeleted, (*_ONE, "409")),
    },
    "/v1/files/{id}/content": {
        "GET": Route(BatchApi.content, "A file's content.", errors=_ONE),
    },
    "/v1/batches": {
        "GET": Route(
            _finding(_batches), "The caller's batches.", Batches, _LISTING, query=BatchesQuery
        ),
        "POST": Route(BatchApi.create_batch, "Run a file of requests.", Batch, _POST, BatchRequest),
    },
    "/v1/batches/{id}": {"GET": Route(_by_id(BatchStore.batch), "One batch.", Batch, _ONE)},
    "/v1/batches/{id}/cancel": {
        "POST": Route(_by_id(BatchStore.cancel), "Cancel a batch.", Batch, (*_POST, "409")),
    },
}


class _Upload:
    """A form with a file, which goes to the disk as it comes. On threads, one call at a time."""

    def __init__(self, store: BatchStore, boundary: bytes, size: int) -> None:
        """`size`, of the whole form, is 0 where it is not known."""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": partial(self._add_header, 0),
                    "on_header_value": partial(self._add_header, 1),
                    "on_header_end": self._end_header,
                    "on_part_data": self._add_data,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"content-type: {error}", "file") from error
        store.check_room(size)
        self._store = store
        self._file = store.part()
        self._filename = ""
        self._header = [b"", b""]
        self._field = b""  # whose data come
        self._purpose = b""
        self._size = 0

    def write(self, part: bytes) -> None:
        """Takes more of the form. Raises InvalidRequest, or HttpError 413."""
        checked = self._size // _CHECKED_BYTES
        self._size += len(part)
        _check_size(self._size)
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise InvalidRequest(f"this is no form: {error}", "file") from error
        if self._size // _CHECKED_BYTES > checked:
            self._store.check_room()

    def finish(self) -> File:
        """The file, once the form has ended."""
        if self._parser.state is not MultipartState.END:
            raise InvalidRequest("the form ends before its last boundary", "file")
        if not self._file.tell():
            raise InvalidRequest("file is missing or empty", "file")
        if self._purpose != b"batch":
            raise InvalidRequest("purpose must be given, and be batch", "purpose")
        return self._store.add(self._file, self._filename)

    def close(self) -> None:
        """Removes what is not a file yet."""
        with contextlib.suppress(OSError):  # a full disk is told where it is written to
            self._file.close()
        with contextlib.suppress(OSError):
            Path(self._file.name).unlink()

    def _begin(self) -> None:
        self._field = b""

    def _add_header(self, which: int, data: bytes, start: int, end: int) -> None:
        self._header[which] += data[start:end]

    def _end_header(self) -> None:
        (name, value), self._header = self._header, [b"", b""]
        if name.lower() != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._field = options.get(b"name", b"")
        if self._field == b"file":
            if self._filename:
                raise InvalidRequest("one file is taken at a time", "file")
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self._filename = filename[:_MAX_NAME_CHARS] or "file.jsonl"

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == b"file":
            self._file.write(memoryview(data)[start:end])
        elif self._field == b"purpose":
            self._purpose = (self._purpose + data[start:end])[:32]  # longer is wrong anyway
