"""The store on which both ends of a pair meet to build their process group."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvtransfer.transports.backends import at_least_1ms


def listening_store(host: str) -> tuple[TCPStore, int]:
    """A store that listens on a free port of `host` alone, and that port. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind(address)
        listening.listen()
        port = listening.getsockname()[1]
        store = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listening.fileno(),
        )
    except BaseException:
        listening.close()
        raise
    listening.detach()  # the store owns it now
    return store, port


def connected_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The other end's. Raises RuntimeError when it cannot be reached in time."""
    return TCPStore(host, port, None, False, at_least_1ms(timeout_s), wait_for_workers=False)
