"""The address that a socket listens at, and the error where it cannot."""

from __future__ import annotations

import errno
import socket
from typing import Any

from baton.config import join_address
from baton.errors import ConfigError


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """(family, address) to bind a TCP socket to. An IPv6 `host` may have brackets.

    Raises OSError for a name that is unknown.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    family, *_, address = found[0]
    return family, address


def refusal(
    host: str, port: int, error: OSError, option: str = "--port", purpose: str = ""
) -> ConfigError:
    """The error that names what can be changed: `host`, or the port with `option`."""
    reason = str(error.strerror).partition(" (while")[0]
    advice = f"stop what uses it or choose another port with {option}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        advice = "--host must be an address of this machine"
    where = join_address(host, port) + (f" for {purpose}" if purpose else "")
    return ConfigError(f"cannot listen on {where}: {reason}; {advice}")
