"""`GET /metrics` on a port of its own, on the process's event loop: no thread, nothing left behind.

What is shown belongs to the event loop, so it is also read there. One request a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from baton.errors import ConfigError

log = logging.getLogger(__name__)

Page = Callable[[str], tuple[str, bytes]]  # of an Accept header: (content type, body)

_REQUEST_BYTES = 16 << 10
_REQUEST_S = 5.0
_MOST_CONNECTIONS = 16  # at a time; one scraper needs one


@contextlib.asynccontextmanager
async def serving(page: Page, host: str, port: int) -> AsyncGenerator[str, None]:
    """Serves `page` meanwhile; gives its host:port. Port 0 takes a free one.

    Raises ConfigError when the port is taken.
    """
    exchanges: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(exchanges) >= _MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(_exchange(page, reader, writer))
        exchanges.add(task)
        task.add_done_callback(exchanges.discard)

    try:
        server = await asyncio.start_server(connected, host, port, limit=_REQUEST_BYTES)
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
        for task in exchanges:
            task.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
        await server.wait_closed()


async def _exchange(page: Page, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request and its answer, in bounded time."""
    try:
        async with asyncio.timeout(_REQUEST_S):
            request = await reader.readuntil(b"\r\n\r\n")
            writer.write(_answer(page, request.decode("latin-1")))
            await writer.drain()
    except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
        log.debug("a scraper broke off")
    except Exception:
        log.exception("metrics could not be shown")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _answer(page: Page, request: str) -> bytes:
    """The whole response to the head of a request."""
    first, *headers = request.split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.split(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", "text/plain", b"GET /metrics\n", method)
    if path != "/metrics":
        return _response("404 Not Found", "text/plain", b"GET /metrics\n", method)
    fields = (header.partition(":") for header in headers)
    accept = ",".join(value for name, _, value in fields if name.lower() == "accept")
    return _response("200 OK", *page(accept), method)


def _response(status: str, content_type: str, body: bytes, method: str) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)
