"""Finds and checks free TCP ports."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from baton.net import http_server, listening

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST, _TRIES = 10_000, 20  # lower ports are those of well-known servers


def check_free(host: str, port: int, option: str = "--port") -> None:
    """Raises ConfigError if `host`:`port` is in use."""
    try:
        _listen(*listening.resolve(host, port))
    except OSError as error:
        raise listening.refusal(host, port, error, option) from error


def free(host: str = "127.0.0.1") -> int:
    """A port that is free now; another process may take it before the caller does.

    That is unlikely: it is outside the range from which the system assigns ports. Raises
    ConfigError if `host` is no address of this machine.
    """
    try:
        handed_out_from = int(_RANGE.read_text().split()[0])
    except OSError:
        handed_out_from = 0
    try:
        family, (address, _, *rest) = listening.resolve(host, 0)
        if handed_out_from > _LEAST:
            for _ in range(_TRIES):
                port = _LEAST + secrets.randbelow(handed_out_from - _LEAST)
                with contextlib.suppress(OSError):
                    return _listen(family, (address, port, *rest))
        return _listen(family, (address, 0, *rest))
    except OSError as error:
        raise listening.refusal(host, 0, error) from error


def hold(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that reserves a port for listeners of this user with SO_REUSEPORT; 0: a free port.

    It does not listen, and gets no connections. Raises ConfigError if the port is in use.
    """
    check_free(host, port, option)
    family, address = listening.resolve(host, port)
    held = socket.socket(family, socket.SOCK_STREAM)
    # Bound without SO_REUSEPORT first, or it would share the port with another program's listener.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(address)
    except OSError as error:
        held.close()
        raise listening.refusal(host, port, error, option) from error
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


class Listener:
    """A port of a child process whose successor listens at the same socket.

    Both accept from one queue, so that no connection is lost when one closes it. It is open while a
    child has it; without a child, clients are refused at once.
    """

    def __init__(self, listen: Callable[[], socket.socket]) -> None:
        """`listen` opens the socket."""
        self._listen = listen
        self._socket: socket.socket | None = None
        self._users = 0

    def take(self) -> int:
        """A descriptor for one more child. Raises ConfigError if the port is in use."""
        if self._socket is None:
            self._socket = self._listen()
        self._users += 1
        return self._socket.fileno()

    def give_back(self) -> None:
        """Reports that a child with a descriptor has ended."""
        self._users -= 1
        if not self._users and self._socket is not None:
            self._socket.close()
            self._socket = None


def metrics_listener(host: str, port: int | None) -> Listener | None:
    """The listener of a metrics page; None without a port."""
    if port is None:
        return None
    return Listener(partial(http_server.listen, host, port, "metrics", "--metrics-port"))


def consecutive(host: str, first: int, count: int, option: str = "--port") -> list[int]:
    """`count` ports from `first` on, or free ones for 0. Raises ConfigError if one is in use."""
    if not first:
        found: dict[int, None] = {}
        while len(found) < count:
            found[free(host)] = None
        return list(found)
    for port in range(first, first + count):
        check_free(host, port, option)
    return list(range(first, first + count))


def _listen(family: int, address: Any) -> int:
    """Listens for a moment, to check the port, and returns its number."""
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # As servers do; otherwise connections in TIME_WAIT would count as a listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        return int(listener.getsockname()[1])
