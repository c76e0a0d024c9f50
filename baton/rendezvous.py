"""Rendezvous of the processes of a process group: a TCPStore whose values are authenticated.

The store's port is open: any process that reaches it can list keys, and write. So values carry a
MAC by a secret that the group's processes get in another way, and prove again over the group.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

_MAC_BYTES = 32
_OPEN_S = 30.0


@dataclass(frozen=True)
class Place:
    """Address and secret of a store."""

    host: str
    port: int
    secret: bytes

    def connect(self, timeout_s: float) -> Rendezvous:
        """Raises RuntimeError."""
        within = at_least_1ms(timeout_s)
        store = TCPStore(self.host, self.port, None, False, within, wait_for_workers=False)
        return Rendezvous(store, self.secret)


class Rendezvous(Store):
    """An authenticated TCPStore, until it is closed."""

    def __init__(self, store: TCPStore, secret: bytes) -> None:
        super().__init__()
        self._store: TCPStore | None = store
        self._secret = secret

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._opened().set(key, self._mac(key, value) + value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Waits for a value. Raises RuntimeError on a time-out or a wrong MAC."""
        sealed: bytes = self._opened().get(key)
        mac, value = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, value)):
            raise RuntimeError(f"a stranger wrote {key!r} into the group's store")
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._opened().wait(keys, *timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._opened().set_timeout(timeout)

    def close(self) -> None:
        """Frees the port, which a group does not need once it is built."""
        self._store = None

    def hello(self, rank: int) -> torch.Tensor:
        """Proof that rank `rank` has the secret, uint8 `[32]`."""
        return torch.frombuffer(bytearray(self._mac("hello", bytes([rank]))), dtype=torch.uint8)

    def _opened(self) -> TCPStore:
        if self._store is None:
            raise RuntimeError("the group's store is closed")
        return self._store

    def _mac(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + value, "sha256")


def listening_socket(host: str) -> socket.socket:
    """A socket on a free port of `host`, an address of this machine. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family)


def open_store(host: str) -> tuple[Rendezvous, Place]:
    """A new store on a free port of `host`, open until it is closed. Raises OSError."""
    with listening_socket(host) as listening:
        port, secret = listening.getsockname()[1], secrets.token_bytes()
        store = TCPStore(
            host, port, None, True, timedelta(seconds=_OPEN_S), wait_for_workers=False,
            master_listen_fd=listening.fileno(),
        )  # fmt: skip
        listening.detach()  # the store owns it now
    return Rendezvous(store, secret), Place(host, port, secret)


def gloo_group(store: Rendezvous, rank: int, ranks: int, host: str, timeout_s: float) -> Any:
    """A process group between CPUs, over TCP. host: this rank's address, for the others.

    Raises RuntimeError.
    """
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout, options._threads = at_least_1ms(timeout_s), 1
    return distributed.ProcessGroupGloo(store, rank, ranks, options)


def nccl_group(
    store: Rendezvous,
    rank: int,
    ranks: int,
    timeout_s: float,
    high_priority: bool = False,
    config: Mapping[str, int] | None = None,
) -> Any:
    """A process group between GPUs. Raises RuntimeError.

    timeout_s: of torch's watchdog · high_priority: whether its streams go ahead of others · config:
    fields of `ncclConfig_t`.
    """
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    options._timeout = timedelta(seconds=timeout_s)
    for name, value in (config or {}).items():
        setattr(options.config, name, value)
    return distributed.ProcessGroupNCCL(store, rank, ranks, options)


def at_least_1ms(seconds: float) -> timedelta:
    """A time-out for torch, where zero and less mean no time-out."""
    return timedelta(seconds=max(seconds, 0.001))
