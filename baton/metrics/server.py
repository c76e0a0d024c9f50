"""`GET /metrics` on a port of its own, by the HTTP server that prometheus_client uses.

Connections are threads, few and short-lived; the page itself is made on the process's event loop,
to which everything that it shows belongs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

from baton import tls
from baton.errors import ConfigError

log = logging.getLogger(__name__)

Page = Callable[[str], tuple[str, bytes]]  # of an Accept header: (content type, body)

_SILENCE_S = 5.0
_MAX_CONNECTIONS = 16  # at a time; one scraper needs one


@contextlib.asynccontextmanager
async def serving(page: Page, host: str, port: int) -> AsyncGenerator[str, None]:
    """Serves `page` meanwhile; gives its host:port. Port 0 takes a free one.

    Raises ConfigError when the port is taken.
    """
    loop = asyncio.get_running_loop()

    async def on_loop(accept: str) -> tuple[str, bytes]:
        return page(accept)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, kind, body = "200 OK", "text/plain", b"GET /metrics\n"
        if (method := environ["REQUEST_METHOD"]) not in ("GET", "HEAD"):
            status = "405 Method Not Allowed"
        elif environ["PATH_INFO"] != "/metrics":
            status = "404 Not Found"
        else:
            made = asyncio.run_coroutine_threadsafe(on_loop(environ.get("HTTP_ACCEPT", "")), loop)
            try:
                kind, body = made.result(_SILENCE_S)
            except Exception:
                log.exception("metrics could not be shown")
                status, body = "500 Internal Server Error", b"metrics could not be shown\n"
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [] if method == "HEAD" else [body]

    try:
        server = _Server(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another port with "
            "--metrics-port"
        ) from error
    server.set_app(app)
    scheme = "http"
    if tls.current().serves:
        scheme, context = "https", tls.current().context()
        # The handshake is left to the connection's thread: the one that accepts must not wait.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    address = f"{host}:{server.server_address[1]}"
    log.info("metrics at %s://%s/metrics", scheme, address)
    try:
        yield address
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S  # of silence, after which the connection is cut

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class _Server(ThreadingWSGIServer):
    """The library's server, with a bound on the connections that are open at a time."""

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._open: set[Any] = set()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the library's look-up of the host's full name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, or closes one too many."""
        if len(self._open) >= _MAX_CONNECTIONS:
            self.shutdown_request(request)
        else:
            self._open.add(request)
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The scraper broke off, or was cut off."""
        log.debug("a scraper broke off", exc_info=True)

    def server_close(self) -> None:
        """Stops listening, and ends what is open."""
        super().server_close()
        for request in tuple(self._open):
            self.shutdown_request(request)
