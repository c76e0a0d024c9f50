"""Serves the door over HTTP in the router's process, on the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

import uvicorn
from starlette.routing import BaseRoute
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.errors import ConfigError
from baton.gateway.app import app_of
from baton.gateway.wire import WRITE_ON
from router.door import Door
from router.main import Frontend

log = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections: they, not we, should hang up
_UNREAD_MS = 60_000  # that a client may leave sent bytes unread before its connection is reset
_STOP_GRACE_S = 2  # for the last bytes of streams that ended while the router drained


def frontend(host: str, port: int, routes: Sequence[BaseRoute] = ()) -> Frontend:
    """HTTP at `host`:`port` for `router.main.run`; `routes` are served beside our own.

    Listens at once, so that a port in use is a ConfigError before anything has begun.
    """
    listener = listen(host, port)

    def enter(door: Door) -> AbstractAsyncContextManager[None]:
        return serving(door, listener, routes)

    return enter


def listen(host: str, port: int) -> socket.socket:
    """A socket for `serving`; port 0 takes a free one. Raises ConfigError when it is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it: without, a stream's second chunk waits for a delayed ACK.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; "
            "stop what uses it or choose another port with --http-port"
        ) from error
    return listener


@contextlib.asynccontextmanager
async def serving(
    door: Door, listener: socket.socket, routes: Sequence[BaseRoute] = ()
) -> AsyncIterator[None]:
    """Takes connections while inside; at the end what is being answered may finish."""
    server = _server(door, routes)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    # Not `server.serve()`: that takes the process's signals, which are the router's.
    await server.startup(sockets=[listener])
    ticking = asyncio.create_task(server.main_loop(), name="http")
    host, port = listener.getsockname()[:2]
    log.info("HTTP at %s:%d", host, port)
    try:
        yield
    finally:
        server.should_exit = True
        await ticking
        await server.shutdown(sockets=[listener])


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which tells each exchange how to write on to a client that does not read."""

    _unread = False  # the client does not read what this connection still keeps for it

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[WRITE_ON] = self._write_on  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        """An answer is written, which is the connection's last where the client does not read."""
        if self._unread:
            self.transport.close()
        super().on_response_complete()

    def _write_on(self) -> None:
        if self.flow.write_paused:
            self._unread = True
            self.flow.resume_writing()


def _server(door: Door, routes: Sequence[BaseRoute]) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app_of(door, routes),
            http=_Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_GRACE_S,
        )
    )
