"""`GET /metrics` on a port of its own, on the event loop that owns everything it shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus

from baton.errors import ConfigError

log = logging.getLogger(__name__)

Page = Callable[[str], tuple[str, bytes]]  # of an Accept header: (content type, body)

_SILENCE_S = 5.0  # after which a connection is cut
_MAX_CONNECTIONS = 16  # at a time; one scraper needs one


@contextlib.asynccontextmanager
async def serving(page: Page, host: str, port: int) -> AsyncGenerator[str, None]:
    """Serves `page` meanwhile, one answer a connection; gives its host:port, of a free port for 0.

    Raises ConfigError when the port is taken.
    """
    connections: set[asyncio.Task[None] | None] = set()

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        connections.add(task := asyncio.current_task())
        try:
            if len(connections) <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_SILENCE_S):
                    writer.write(_answer(page, await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a scraper broke off", exc_info=True)
        finally:
            connections.discard(task)
            writer.close()

    try:
        server = await asyncio.start_server(connected, host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port with "
            "--metrics-port"
        ) from error
    address = f"{host}:{server.sockets[0].getsockname()[1]}"
    log.info("metrics at http://%s/metrics", address)
    try:
        yield address
    finally:
        server.close()
        for task in filter(None, tuple(connections)):
            task.cancel()
        await asyncio.gather(*filter(None, connections), return_exceptions=True)


def _answer(page: Page, request: bytes) -> bytes:
    line, *headers = request.decode("latin-1").split("\r\n")
    method, path, *_ = [*line.split(), "", ""]
    fields = (header.partition(":") for header in headers)
    accept = next((value.strip() for name, _, value in fields if name.lower() == "accept"), "")
    status, kind, body = HTTPStatus.OK, "text/plain", b"GET /metrics\n"
    if method not in ("GET", "HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif path.partition("?")[0] != "/metrics":
        status = HTTPStatus.NOT_FOUND
    else:
        try:
            kind, body = page(accept)
        except Exception:
            log.exception("metrics could not be shown")
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, b"metrics could not be shown\n"
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if method == "HEAD" else body)
