"""OpenAI's /v1/files and /v1/batches: many requests in a file, answered in a file, at low priority.

Off without `--batch-dir`. Requests are the tenant's whose key they have, and nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from baton.config import ApiConfig
from baton.errors import InvalidRequest, Overloaded
from baton.gateway import api
from baton.gateway.batch_runner import BatchRunner
from baton.gateway.batch_store import (
    MAX_FILE_BYTES,
    Batch,
    Batches,
    BatchRequest,
    BatchStore,
    File,
    Files,
)
from baton.gateway.generation import Endpoint
from baton.gateway.headers import caller_of
from baton.http_errors import Header, HttpError
from baton.http_server import UNREAD_S, HttpExchange
from router.admission.tenants import Tenant
from router.frontend import Caller, GenerationService

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it tells of clients' mistakes

MAX_UPLOADS = 16  # at a time
MAX_PARTS = 16  # of a form
_MAX_FIELD_BYTES = 1024
_MAX_FORM_BYTES = MAX_FILE_BYTES + (64 << 10)
_MAX_NAME_CHARS = 255
_READ_BYTES = 256 << 10
_RETRY_S = 1.0
_CONTENT: tuple[Header, ...] = ((b"content-type", b"application/octet-stream"),)

Handler = Callable[[HttpExchange], Awaitable[None]]
T = TypeVar("T")
Item = TypeVar("Item", File, Batch)


class BatchApi:
    """Answers the paths in `routes`, and runs batches while inside `running`."""

    def __init__(
        self,
        service: GenerationService,
        config: ApiConfig,
        endpoints: Mapping[str, Endpoint[Any]],
    ) -> None:
        """`endpoints` are those that a batch may be for, by path."""
        self._service = service
        self._config = config
        self._endpoints = endpoints
        self._uploads = 0
        self._runner: BatchRunner | None = None
        create = Endpoint(service, partial(api.decode, BatchRequest), self._create_batch)
        self.routes: dict[str, dict[str, Handler]] = {
            "/v1/files": {"GET": self._list_files, "POST": self._create_file},
            "/v1/files/{id}": {
                "GET": self._calling(BatchStore.file),
                "DELETE": self._calling(BatchStore.delete),
            },
            "/v1/files/{id}/content": {"GET": self._content},
            "/v1/batches": {"GET": self._list_batches, "POST": partial(self._if_on, create)},
            "/v1/batches/{id}": {"GET": self._calling(BatchStore.batch)},
            "/v1/batches/{id}/cancel": {"POST": self._calling(BatchStore.cancel)},
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Batches run while inside, if they are on."""
        if (folder := self._config.batch_dir) is None:
            yield
            return
        self._runner = BatchRunner(
            folder, self._store, self._service, self._endpoints, self._config.batch_concurrency
        )
        task = asyncio.create_task(self._runner.run(), name="batches")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _store(self, tenant: str) -> BatchStore:
        assert self._config.batch_dir is not None
        return BatchStore(self._config.batch_dir / tenant, self._config.batch_disk)

    def _callers(self, exchange: HttpExchange) -> tuple[Tenant, BatchStore]:
        """Who calls, and what it has here."""
        if self._config.batch_dir is None:
            raise HttpError(
                404, f"{exchange.path}: this router was started without --batch-dir DIR"
            )
        tenant = self._service.tenant_of(caller_of(exchange))
        return tenant, self._store(tenant.name)

    async def _if_on(self, handler: Handler, exchange: HttpExchange) -> None:
        self._callers(exchange)
        await handler(exchange)

    def _calling(self, method: Callable[[BatchStore, str], Any]) -> Handler:
        """A handler that calls a method of the store with the id in the path."""

        async def handler(exchange: HttpExchange) -> None:
            _, store = self._callers(exchange)
            found = await asyncio.to_thread(method, store, _id(exchange))
            if self._runner and method is BatchStore.cancel:
                self._runner.wake.set()
            exchange.answer(200, msgspec.json.encode(found))

        return handler

    async def _create_file(self, exchange: HttpExchange) -> None:
        tenant, store = self._callers(exchange)
        kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
        media_type, options = parse_options_header(kind)
        if media_type != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest(
                "send multipart/form-data with the fields purpose and file", "file"
            )
        if int(exchange.headers.get(b"content-length", b"0")) > _MAX_FORM_BYTES:
            raise _too_large()
        if self._uploads >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being uploaded", _RETRY_S)
        tenant.charge_request()
        self._uploads += 1
        try:
            with exchange.body_parts() as parts:
                upload = await asyncio.to_thread(_Upload, store, options[b"boundary"])
                with contextlib.closing(upload):
                    async for part in parts:
                        await asyncio.to_thread(upload.write, part)
                    file = await asyncio.to_thread(upload.finish)
        finally:
            self._uploads -= 1
        exchange.answer(200, msgspec.json.encode(file))

    async def _create_batch(
        self,
        service: GenerationService,
        request: BatchRequest,
        caller: Caller,
        exchange: HttpExchange,
    ) -> None:
        tenant, store = self._callers(exchange)
        if request.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise InvalidRequest(f"endpoint must be one of {known}", "endpoint")
        tenant.charge_request()
        batch = await asyncio.to_thread(store.create, request)
        if self._runner:
            self._runner.wake.set()
        exchange.answer(200, msgspec.json.encode(batch))

    async def _content(self, exchange: HttpExchange) -> None:
        """The bytes of a file, no faster than they are read."""
        _, store = self._callers(exchange)
        file_id = _id(exchange)
        await asyncio.to_thread(store.file, file_id)
        with await asyncio.to_thread(store.content(file_id).open, "rb") as file:
            part = await asyncio.to_thread(file.read, _READ_BYTES)
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

    async def _list_files(self, exchange: HttpExchange) -> None:
        _, store = self._callers(exchange)
        query = _Query(exchange, limit=10_000)
        if query.text("order", "desc") not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", "order")
        purpose = query.text("purpose", "")
        found = [
            file for file in await asyncio.to_thread(store.files) if purpose in ("", file.purpose)
        ]
        page = query.page(found, newest_first=query.text("order", "desc") == "desc")
        exchange.answer(200, msgspec.json.encode(Files(**page)))

    async def _list_batches(self, exchange: HttpExchange) -> None:
        _, store = self._callers(exchange)
        query = _Query(exchange, limit=20, most=100)
        page = query.page(await asyncio.to_thread(store.batches), newest_first=True)
        exchange.answer(200, msgspec.json.encode(Batches(**page)))


def _id(exchange: HttpExchange) -> str:
    return exchange.path.split("/")[3]


def _too_large() -> HttpError:
    return HttpError(413, f"a file may have {MAX_FILE_BYTES} bytes")


class _Query:
    """What follows a path's question mark, of the lists."""

    def __init__(self, exchange: HttpExchange, limit: int, most: int = 10_000) -> None:
        self._given = parse_qs(exchange.query.decode("latin-1"), keep_blank_values=True)
        text = self.text("limit", str(limit))
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
            raise InvalidRequest(f"limit must be a number between 1 and {most}", "limit")
        self._limit = int(text)
        self._after = self.text("after", "")

    def text(self, name: str, default: str) -> str:
        return self._given.get(name, [default])[-1]

    def page(self, items: list[Item], *, newest_first: bool) -> dict[str, Any]:
        """What `Files` and `Batches` have, of items that come oldest first."""
        if newest_first:
            items = [item for item in reversed(items) if not self._after or item.id < self._after]
        else:
            items = [item for item in items if item.id > self._after]
        page = items[: self._limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        more = len(items) > self._limit
        return {"data": page, "has_more": more, "first_id": first, "last_id": last}


class _Upload:
    """A form with a file, which goes to the disk as it comes. On threads, one call at a time."""

    def __init__(self, store: BatchStore, boundary: bytes) -> None:
        self._store = store
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._field = b""  # whose data come
        self._fields: dict[bytes, bytearray] = {}
        self._parts = self._bytes = 0
        self._filename: str | None = None
        self._ended = False
        store.check_room()
        self._part = store.part()
        self._file = self._part.open("xb")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": partial(self._add_header, 0),
                    "on_header_value": partial(self._add_header, 1),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_data,
                    "on_part_data": self._add_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            self.close()
            raise InvalidRequest(f"content-type: {error}", "file") from error

    def write(self, part: bytes) -> None:
        """Takes more of the form. Raises InvalidRequest, or HttpError 413."""
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise InvalidRequest(f"this is no form: {error}", "file") from error
        self._store.check_room()

    def finish(self) -> File:
        """The file, once the form has ended."""
        if not self._ended:
            raise InvalidRequest("the form ends before its last boundary", "file")
        if self._filename is None or not self._bytes:
            raise InvalidRequest("file is missing or empty", "file")
        if bytes(self._fields.get(b"purpose", b"")) != b"batch":
            raise InvalidRequest("purpose must be given, and be batch", "purpose")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._store.add(self._part, self._filename)

    def close(self) -> None:
        """Removes what is not a file yet."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _begin(self) -> None:
        self._headers = {}
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"a form may have {MAX_PARTS} parts", "file")

    def _add_header(self, which: int, data: bytes, start: int, end: int) -> None:
        self._header[which] += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._field = options.get(b"name", b"")
        if self._field == b"file":
            if self._filename is not None:
                raise InvalidRequest("one file is taken at a time", "file")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self._filename = name[:_MAX_NAME_CHARS] or "file.jsonl"
        else:
            self._fields.setdefault(self._field, bytearray())

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == b"file":
            self._bytes += end - start
            if self._bytes > MAX_FILE_BYTES:
                raise _too_large()
            self._file.write(memoryview(data)[start:end])
        else:
            value = self._fields[self._field]
            value += data[start:end]
            if len(value) > _MAX_FIELD_BYTES:
                raise InvalidRequest(f"a field may have {_MAX_FIELD_BYTES} bytes", "purpose")

    def _end(self) -> None:
        self._ended = True
