"""OpenAI's /v1/files and /v1/batches: many requests in a file, answered in a file, at low priority.

Off without `--batch-dir`. Files and batches belong to the tenant that created them.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from baton.config import ApiConfig
from baton.errors import InvalidRequest, Overloaded
from baton.gateway import batch_process, openai
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
from baton.gateway.database import DatabaseThread
from baton.gateway.endpoint import Call, Endpoint
from baton.gateway.field_errors import invalid
from baton.gateway.headers import caller_of
from baton.gateway.openapi import BYTES, ERRORS, Handler, Operation, Routes
from baton.log_format import audit
from baton.net.http_errors import Header, HttpError
from baton.net.http_server import UNREAD_S, HttpExchange
from router.admission.tenants import Tenant
from router.generation_service import GenerationService

log = logging.getLogger(__name__)
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs clients' mistakes

MAX_UPLOADS = 16  # of a tenant at a time
_MAX_NAME_CHARS = 255
_CHECKED_BYTES = 8 << 20  # of an upload, between two checks of the tenant's share
_RETRY_S = 1.0
_CONTENT: tuple[Header, ...] = ((b"content-type", b"application/octet-stream"),)

T = TypeVar("T")
Query = TypeVar("Query")


class BatchApi:
    """Answers `ROUTES`, and has batches run while inside `running`."""

    def __init__(
        self,
        service: GenerationService,
        config: ApiConfig,
        endpoints: Mapping[str, Endpoint[Any]],
    ) -> None:
        """`endpoints`: what a batch may be for, by path."""
        self.service = service
        self.endpoints = endpoints
        self._config = config
        self._num_uploads: Counter[str] = Counter()  # under way, by tenant
        folder, disk = config.batch_dir or Path(), config.batch_disk
        self._database = DatabaseThread(lambda: BatchStore(folder, disk), folder, "--batch-dir")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Batches run while inside, where `--batch-dir` is given."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._database.close)
            if (folder := self._config.batch_dir) is not None:
                await stack.enter_async_context(
                    batch_process.running(folder, self._config, self.service, self.endpoints)
                )
            yield

    def tenant_of(self, exchange: HttpExchange) -> Tenant:
        """The caller's tenant. Raises HttpError 404 without `--batch-dir`."""
        if self._config.batch_dir is None:
            raise HttpError(
                404, f"{exchange.path}: this router was started without --batch-dir DIR"
            )
        return self.service.tenant_of(caller_of(exchange))

    async def in_store(self, work: Callable[..., T], *args: Any) -> T:
        """Calls `work(store, *args)`; see `DatabaseThread.call`."""
        return await self._database.call(work, *args)

    async def create_file(self, exchange: HttpExchange) -> None:
        """Stores an upload."""
        tenant = self.tenant_of(exchange)
        kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
        media_type, options = parse_options_header(kind)
        if media_type != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest(
                "send multipart/form-data with the fields purpose and file", "file"
            )
        if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(415, "send the file without content-encoding")
        size = int(exchange.headers.get(b"content-length", b"0"))
        _check_size(size)
        if self._num_uploads[tenant.name] >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files of this tenant are being uploaded", _RETRY_S)
        tenant.charge_request()
        self._num_uploads[tenant.name] += 1
        try:
            with exchange.body_parts() as parts:
                boundary, folder = options[b"boundary"], self._config.batch_dir
                upload = await self.in_store(_Upload, tenant.name, boundary, size, folder)
                with contextlib.closing(upload):
                    async for part in parts:
                        await self.in_store(upload.write, part)
                    file = await self.in_store(upload.finish)
        finally:
            self._num_uploads[tenant.name] -= 1
        exchange.answer(200, msgspec.json.encode(file))

    async def create_batch(self, exchange: HttpExchange) -> None:
        """Stores a batch, which is run later."""
        self.tenant_of(exchange)  # before its body is looked at
        endpoint = Endpoint(partial(openai.decode, BatchRequest), self._create_batch)
        await endpoint(self.service, exchange)

    async def _create_batch(self, request: BatchRequest, call: Call) -> None:
        tenant = self.tenant_of(call.exchange)
        if request.endpoint not in self.endpoints:
            known = ", ".join(self.endpoints)
            raise InvalidRequest(f"endpoint must be one of {known}", "endpoint")
        tenant.charge_request()
        call.answer(await self.in_store(BatchStore.create, tenant.name, request))

    async def content(self, exchange: HttpExchange) -> None:
        """Sends a file's content, as fast as the client reads it."""
        tenant = self.tenant_of(exchange)
        file = await self.in_store(BatchStore.file, tenant.name, _id(exchange))
        after, left = -1, file.bytes
        while True:
            part, after = await self.in_store(BatchStore.read, file.id, after)
            left -= len(part)
            if not exchange.started:
                exchange.start(200, _CONTENT)
            if not part:  # the file was deleted meanwhile
                exchange.abort()
                return
            if not left:
                exchange.end(part)
                return
            exchange.write(part)
            if not await exchange.drained(UNREAD_S):
                return


def _id(exchange: HttpExchange) -> str:
    return exchange.path.split("/")[3]


def _check_size(size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise HttpError(413, f"a file may have {MAX_FILE_BYTES} bytes, its form included")


def _files(store: BatchStore, tenant: str, exchange: HttpExchange) -> Files:
    return store.files(tenant, query_of(FilesQuery, exchange))


def _batches(store: BatchStore, tenant: str, exchange: HttpExchange) -> Batches:
    return store.batches(tenant, query_of(BatchesQuery, exchange))


def query_of(kind: type[Query], exchange: HttpExchange) -> Query:
    """Decodes the query of a path. Raises InvalidRequest naming the parameter."""
    given = dict(parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True))
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(error) from error


def _answering(find: Callable[[BatchStore, str, HttpExchange], Any]) -> Handler:
    """A handler that answers with what `find(store, tenant, exchange)` returns, in JSON."""

    async def handler(batch_api: BatchApi, exchange: HttpExchange) -> None:
        tenant = batch_api.tenant_of(exchange)
        found = await batch_api.in_store(find, tenant.name, exchange)
        exchange.answer(200, msgspec.json.encode(found))

    return handler


def _by_id(find: Callable[[BatchStore, str, str], Any], action: str = "") -> Handler:
    """A handler of one file or batch; `action` is what the audit log calls a change."""

    def answer(store: BatchStore, tenant: str, exchange: HttpExchange) -> Any:
        found = find(store, tenant, one := _id(exchange))
        if action:
            audit(action, tenant=tenant, id=one)
        return found

    return _answering(answer)


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
        "GET": Operation(
            _answering(_files), "The caller's files.", Files, _LISTING, query=FilesQuery
        ),
        "POST": Operation(
            BatchApi.create_file, "Upload a file of requests.", File, _POST, form=_FORM
        ),
    },
    "/v1/files/{id}": {
        "GET": Operation(_by_id(BatchStore.file), "One file.", File, _ONE),
        "DELETE": Operation(
            _by_id(BatchStore.delete, "file deleted"), "Delete a file.", FileDeleted, (*_ONE, "409")
        ),
    },
    "/v1/files/{id}/content": {
        "GET": Operation(BatchApi.content, "A file's content.", errors=_ONE),
    },
    "/v1/batches": {
        "GET": Operation(
            _answering(_batches), "The caller's batches.", Batches, _LISTING, query=BatchesQuery
        ),
        "POST": Operation(
            BatchApi.create_batch, "Run a file of requests.", Batch, _POST, BatchRequest
        ),
    },
    "/v1/batches/{id}": {"GET": Operation(_by_id(BatchStore.batch), "One batch.", Batch, _ONE)},
    "/v1/batches/{id}/cancel": {
        "POST": Operation(
            _by_id(BatchStore.cancel, "batch cancelled"), "Cancel a batch.", Batch, (*_POST, "409")
        ),
    },
}


class _Upload:
    """A form with a file, which is written to disk as it arrives. In the store's thread."""

    def __init__(
        self, store: BatchStore, tenant: str, boundary: bytes, size: int, folder: Path
    ) -> None:
        """`size`: of the whole form, bytes; 0 if unknown. Raises InvalidRequest."""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": partial(self._add_header, 0),
                    "on_header_value": partial(self._add_header, 1),
                    "on_header_end": self._end_header,
                    "on_part_data": self._add_data,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"content-type: {error}", "file") from error
        store.check_room(tenant, size)
        self._tenant = tenant
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - `close` closes it
        self._filename = ""
        self._header = [b"", b""]
        self._field = b""  # name of the field whose data arrives
        self._purpose = b""
        self._size = 0  # of the form

    def write(self, store: BatchStore, part: bytes) -> None:
        """Parses more of the form. Raises InvalidRequest, or HttpError 413."""
        checked = self._size // _CHECKED_BYTES
        self._size += len(part)
        _check_size(self._size)
        try:
            self._parser.write(part)
        except FormParserError as error:
            raise InvalidRequest(f"the body is not a form: {error}", "file") from error
        if self._size // _CHECKED_BYTES > checked:
            store.check_room(self._tenant, self._file.tell())

    def finish(self, store: BatchStore) -> File:
        """Stores the file, once the form has ended."""
        if self._parser.state is not MultipartState.END:
            raise InvalidRequest("the form ends before its last boundary", "file")
        if not self._file.tell():
            raise InvalidRequest("file is missing or empty", "file")
        if self._purpose != b"batch":
            raise InvalidRequest("purpose must be batch", "purpose")
        self._file.seek(0)
        return store.add(self._tenant, self._filename, self._file)

    def close(self) -> None:
        """Drops what arrived, also what a full disk has not taken; `finish` has stored a copy."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _begin_part(self) -> None:
        self._field = b""

    def _add_header(self, which: int, data: bytes, start: int, end: int) -> None:
        self._header[which] += data[start:end]

    def _end_header(self) -> None:
        (name, value), self._header = self._header, [b"", b""]
        if name.lower() != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._field = options.get(b"name", b"")
        if self._field.startswith(b"expires_after"):
            raise InvalidRequest("expires_after is not supported: leave it out", "expires_after")
        if self._field == b"file":
            if self._filename:
                raise InvalidRequest("send one file at a time", "file")
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self._filename = filename[:_MAX_NAME_CHARS] or "file.jsonl"

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == b"file":
            self._file.write(memoryview(data)[start:end])
        elif self._field == b"purpose":
            self._purpose = (self._purpose + data[start:end])[:32]  # longer is wrong anyway
