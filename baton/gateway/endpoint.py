"""Endpoints: a body in JSON is read, decompressed and parsed, then answered."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.errors import InvalidRequest, quoted
from baton.gateway.headers import caller_of
from baton.net.http_errors import HttpError
from baton.net.http_server import HttpExchange
from baton.net.rpc import MAX_MESSAGE_BYTES, max_request_bytes
from router.generation_service import Caller, GenerationService

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
_LARGE_BODY_BYTES = 64 << 10  # larger ones are parsed on a thread, off the event loop
_CODINGS = frozenset(("gzip", "x-gzip", "deflate"))  # of bodies
_MAX_CODINGS = 2  # one around the other
T = TypeVar("T")


@dataclass(frozen=True)
class Endpoint(Generic[T]):
    """What answers the POSTs to one path: `parse` reads a body, `answer` does what it asks for."""

    parse: Callable[[bytes], T]
    answer: Callable[[GenerationService, T, Caller, HttpExchange], Awaitable[None]]

    async def __call__(
        self, service: GenerationService, exchange: HttpExchange, caller: Caller | None = None
    ) -> None:
        """Answers a POST, of `caller` where its headers do not say whose it is."""
        caller = caller or caller_of(exchange)
        service.tenant_of(caller).check()
        await self.answer(service, await self._parsed(service, exchange), caller, exchange)

    async def _parsed(self, service: GenerationService, exchange: HttpExchange) -> T:
        """What the body says. JSON is read under any content-type: `curl -d` sends a form's.

        That lets web pages post here, but not with a key, which is no cookie that a browser adds.
        """
        max_bytes = max_request_bytes(service.max_context)
        body = await exchange.body(max_bytes, MAX_BODY_BYTES)
        if body is None:
            close = ((b"connection", b"close"),)  # what is left of it is not read
            raise HttpError(413, f"the body is over {max_bytes} bytes", close)
        if codings := exchange.headers.get(b"content-encoding"):
            body = await service.admission.prompts.run_in_thread(decoded, body, codings, max_bytes)
        try:
            if len(body) <= _LARGE_BODY_BYTES:
                return self.parse(body)
            return await service.admission.prompts.run_in_thread(self.parse, body)
        except InvalidRequest as error:
            kind = exchange.headers.get(b"content-type", b"").decode("latin-1")
            if error.field or "json" in kind.lower():
                raise
            raise InvalidRequest(
                f"{error} (its content-type is {quoted(kind)}: send application/json)"
            ) from error


def decoded(body: bytes, codings: bytes, max_bytes: int) -> bytes:
    """A body without its Content-Encoding.

    Raises HttpError 415 for other codings than gzip and deflate, HttpError 413 where it has more
    than `max_bytes`, and InvalidRequest where it is not what its coding says.
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
        if name == "deflate":  # zlib's format; some clients send what is within alone
            has_header = body[:1] == b"x" and int.from_bytes(body[:2], "big") % 31 == 0
            inflater = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        else:
            inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            body = inflater.decompress(body, max_bytes + 1)
        except zlib.error as error:
            raise InvalidRequest(f"the body is not {name}: {error}") from error
        if len(body) > max_bytes:
            raise HttpError(413, f"the body is over {max_bytes} bytes without its {name}")
        if not inflater.eof or inflater.unused_data:
            where = "behind its end" if inflater.eof else "missing at its end"
            raise InvalidRequest(f"the body is not one piece of {name}: bytes are {where}")
    return body
