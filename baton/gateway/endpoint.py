"""An endpoint reads, decompresses and parses the JSON body of a POST, then answers it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from baton.errors import InvalidRequest, quoted
from baton.gateway.batch_runner import ADMITTED_HEADER
from baton.gateway.headers import caller_of, id_headers, limit_headers, with_request_id
from baton.net.http_errors import HttpError
from baton.net.http_server import HttpExchange
from baton.net.rpc import MAX_MESSAGE_BYTES, max_request_bytes
from baton.v1 import inference_pb2
from router.generation_service import Caller, GenerationService

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
_LARGE_BODY_BYTES = 64 << 10  # larger bodies are parsed in a thread
_CODINGS = frozenset(("gzip", "x-gzip", "deflate"))  # Content-Encodings of bodies
_MAX_CODINGS = 2  # applied one after the other
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A request to an endpoint: who calls, what serves it, and the exchange that is answered."""

    service: GenerationService
    caller: Caller
    exchange: HttpExchange

    def with_request_id(self, request_id: str | None) -> Call:
        """Adds a request id from the body; an id in the headers takes precedence."""
        return replace(self, caller=with_request_id(self.exchange, self.caller, request_id))

    async def run_in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs long work on a thread. Raises DeadlineExceeded at the call's deadline."""
        async with self.service.within(self.caller):
            return await self.service.run_in_thread(work, *args)

    def limit_headers(self) -> dict[bytes, bytes]:
        """Response headers with what is left of the tenant's rate limits."""
        return limit_headers(self.service.tenant_of(self.caller), self.exchange.path)

    def started_headers(self, started: inference_pb2.Started) -> dict[bytes, bytes]:
        """Response headers once the request, or its first choice, was admitted."""
        admitted = {ADMITTED_HEADER.encode(): b"1"} if self.caller.tenant else {}
        return id_headers(self.exchange, started.trace_id) | admitted

    def answer(self, body: Any) -> None:
        """Answers with `body` in JSON."""
        self.exchange.answer(200, msgspec.json.encode(body))


@dataclass(frozen=True)
class Endpoint(Generic[T]):
    """The handler of POSTs to one path: `parse` decodes the body, `answer` responds to it."""

    parse: Callable[[bytes], T]
    answer: Callable[[T, Call], Awaitable[None]]

    async def __call__(
        self, service: GenerationService, exchange: HttpExchange, caller: Caller | None = None
    ) -> None:
        """Answers a POST; `caller` replaces the caller that the headers name."""
        caller = caller or caller_of(exchange)
        call = Call(service, replace(caller, deadline=service.deadline_of(caller)), exchange)
        exchange.answer_headers |= call.limit_headers()
        service.tenant_of(call.caller).check()
        max_bytes, began = max_request_bytes(service.max_context), time.monotonic()
        body = await exchange.body(max_bytes, MAX_BODY_BYTES)
        if body is None:
            close = ((b"connection", b"close"),)  # the rest of the body is not read
            raise HttpError(413, f"the body may have {max_bytes} bytes: send a shorter one", close)
        came = time.monotonic()
        parsed = await self._parsed(call, body, max_bytes)
        times, parsed_at = call.caller.times, time.monotonic()
        times["baton.http.body_ms"] = (came - began) * 1e3
        times["baton.http.parse_ms"] = (parsed_at - came) * 1e3
        await self.answer(parsed, call)

    async def _parsed(self, call: Call, body: bytes, max_bytes: int) -> T:
        """Parses the body as JSON under any content-type, because `curl -d` sends a form's.

        Web pages can therefore post here, but without a key, which browsers do not add.
        """
        headers = call.exchange.headers
        if codings := headers.get(b"content-encoding"):
            body = await call.run_in_thread(decompressed, body, codings, max_bytes)
        try:
            if len(body) <= _LARGE_BODY_BYTES:
                return self.parse(body)
            return await call.run_in_thread(self.parse, body)
        except RecursionError as error:
            raise InvalidRequest("the body is nested too deeply") from error
        except InvalidRequest as error:
            kind = headers.get(b"content-type", b"").decode("latin-1")
            if error.field or "json" in kind.lower():
                raise
            raise InvalidRequest(
                f"{error} (its content-type is {quoted(kind)}: send application/json)"
            ) from error


def decompressed(body: bytes, codings: bytes, max_bytes: int) -> bytes:
    """Decompresses a body.

    Raises HttpError 415 for codings other than gzip and deflate, HttpError 413 if the result has
    more than `max_bytes`, and InvalidRequest if the body does not match its coding.
    """
    names = [name.strip() for name in codings.decode("latin-1").lower().split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > _MAX_CODINGS or not _CODINGS.issuperset(names):
        raise HttpError(
            415,
            f"content-encoding may be gzip or deflate, not {quoted(', '.join(names))}: send the "
            "body without it",
            ((b"accept-encoding", b"gzip, deflate"),),
        )
    for name in reversed(names):
        if name == "deflate":  # zlib's format; some clients send raw deflate data
            has_header = body[:1] == b"x" and int.from_bytes(body[:2], "big") % 31 == 0
            inflater = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        else:
            inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            body = inflater.decompress(body, max_bytes + 1)
        except zlib.error as error:
            raise InvalidRequest(f"the body is not {name}: {error}") from error
        if len(body) > max_bytes:
            raise HttpError(
                413,
                f"the body may have {max_bytes} bytes decompressed ({name}): send a shorter one",
            )
        if not inflater.eof or inflater.unused_data:
            problem = "has bytes after its end" if inflater.eof else "is truncated"
            raise InvalidRequest(f"the {name} data of the body {problem}")
    return body
