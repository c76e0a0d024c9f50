"""`GET /metrics` on a port of its own, on the event loop to which everything that it shows belongs.

As much HTTP as scrapers need: a connection is for one request and its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from baton.errors import ConfigError

log = logging.getLogger(__name__)

Page = Callable[[str], tuple[str, bytes]]  # of an Accept header: (content type, body)

_SILENCE_S = 5.0  # for a request and its answer, after which the connection is cut
_MAX_CONNECTIONS = 16  # at a time; one scraper needs one


@contextlib.asynccontextmanager
async def serving(page: Page, host: str, port: int) -> AsyncGenerator[str, None]:
    """Serves `page` meanwhile; gives its host:port. Port 0 takes a free one.

    Raises ConfigError when the port is taken.
    """
    connections: set[asyncio.WriteTransport] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.transport
        if len(connections) >= _MAX_CONNECTIONS:
            connection.abort()
            return
        connections.add(connection)
        connection.set_write_buffer_limits(0)  # `drain` waits until all is sent
        try:
            async with asyncio.timeout(_SILENCE_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(page, request.decode("latin-1")))
                await writer.drain()
            connection.close()
        except (TimeoutError, EOFError, OSError, asyncio.LimitOverrunError):
            log.debug("a scraper broke off, or was cut off", exc_info=True)
        finally:
            connections.discard(connection)
            if not connection.is_closing():
                connection.abort()

    try:
        server = await asyncio.start_server(answer, host, port)
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
        for connection in connections:
            connection.abort()
        await server.wait_closed()


def _response(page: Page, request: str) -> bytes:
    first, *headers = request.split("\r\n")
    method, target, *_ = [*first.split(" "), ""]
    status, kind, body = "200 OK", "text/plain", b"GET /metrics\n"
    if method not in ("GET", "HEAD"):
        status = "405 Method Not Allowed"
    elif target.partition("?")[0] != "/metrics":
        status = "404 Not Found"
    else:
        fields = {
            name.lower(): text.strip() for name, _, text in (h.partition(":") for h in headers)
        }
        try:
            kind, body = page(fields.get("accept", ""))
        except Exception:
            log.exception("metrics could not be shown")
            status, body = "500 Internal Server Error", b"metrics could not be shown\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + (body if method != "HEAD" else b"")
