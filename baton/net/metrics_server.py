"""`GET /metrics` on a port of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from baton.net import http_server
from baton.net.http_errors import HttpError
from baton.net.http_server import HttpExchange

log = logging.getLogger(__name__)

Page = Callable[[str], tuple[str, bytes]]  # of an Accept header: (content type, body)

MAX_CONNECTIONS = 16  # at a time; one scraper needs one


@contextlib.asynccontextmanager
async def serving(page: Page, host: str, port: int | None) -> AsyncIterator[str]:
    """Serves `page` meanwhile; gives its URL. Port 0 takes a free one; None: nowhere.

    Raises ConfigError when the port is taken.
    """
    if port is None:
        yield ""
        return

    async def answer(exchange: HttpExchange) -> None:
        if exchange.path != "/metrics":
            raise HttpError(404, "only /metrics is served here")
        if exchange.method not in ("GET", "HEAD"):
            raise HttpError(405, "/metrics takes GET and HEAD", ((b"allow", b"GET, HEAD"),))
        kind, body = page(exchange.headers.get(b"accept", b"").decode("latin-1"))
        exchange.answer(200, body, kind=(b"content-type", kind.encode()))

    listener = http_server.listen(host, port, "metrics", "--metrics-port")
    async with http_server.serving(answer, listener, MAX_CONNECTIONS) as served:
        log.info("metrics at %s/metrics", served.url)
        yield served.url
