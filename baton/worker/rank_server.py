"""One rank on a host that is not the worker's first: `python -m baton.worker.rank_server FD`.

Started by `rank_hosts.py`, whose host's settings it has; all others come from the first process.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from baton import log_format
from baton.config import WorkerConfig, model_path
from baton.engine import build
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.rank import ignore_signals, serve, serving
from baton.engine.ranks import RankWork, dtype_named
from baton.errors import BatonError
from baton.net import object_connection, tls
from baton.net.object_connection import ObjectConnection
from baton.rendezvous import Place, listening_socket
from baton.worker.rank_hosts import DRAIN, KV, STEPS, own_address
from kvtransfer import copier, transports
from kvtransfer.pool import KvPool
from kvtransfer.remote_pool import PoolServer

log = logging.getLogger(__name__)

_GREETING_S = 5.0
_MOST_GREETINGS = 32  # at a time, of who has not proven anything yet


def main() -> None:
    """Serves one first process, and ends with it or with who started this."""
    starter = Connection(int(sys.argv[1]))
    ignore_signals()
    with serving():
        config, number, secret = starter.recv()
        handler = logging.StreamHandler()
        handler.setFormatter(log_format.formatter(config.log_format))
        logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
        tls.use_config(config, config.insecure)
        server = _RankServer(config, secret)
        starter.send(server.address)
        threading.Thread(target=server.follow, args=(starter,), daemon=True).start()
        connection = server.steps.get()
        told = connection.recv()
        try:
            work = of_this_host(told, config, number)
        except BatonError as error:
            connection.send(str(error))
        else:
            serve(connection, work, server.serve_pool)
    os._exit(0)  # at once: threads may wait for other ends of links


def of_this_host(told: dict[str, Any], config: WorkerConfig, number: int) -> RankWork:
    """What the first process told (`RankWork.elsewhere`), with this host's own settings.

    number: of the rank among those of this host. Raises ConfigError, CheckpointError.
    """
    ranks, path = config.engine.tp // config.nnodes, model_path(config.engine.model)
    settings = replace(config.engine, **told["settings"])
    host, port, secret = told["store"]
    return RankWork(
        backend=build.backend_of(settings, ranks).of_rank(Shard(number, ranks)),
        path=path,
        config=replace(ModelConfig.load(path), max_context=told["max_context"]),
        dtype=dtype_named(told["dtype"]),
        shard=Shard(*told["shard"]),
        exchange=Place(host, port, bytes.fromhex(secret)),
        host=own_address(config),
        timeout_s=told["timeout_s"],
        log_level=log.getEffectiveLevel(),
    )


class _RankServer:
    """The port of a rank. `steps` gets the one connection for them."""

    def __init__(self, config: WorkerConfig, secret: bytes) -> None:
        self._config, self._secret = config, secret
        host = own_address(config)
        self._listening = listening_socket(host)
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self.steps = queue.Queue[ObjectConnection]()
        self._lock, self._taken = threading.Lock(), False
        self._pool: PoolServer | None = None
        self._watchers = list[ObjectConnection]()
        self._greetings = threading.BoundedSemaphore(_MOST_GREETINGS)
        self._log = log_format.RateLimit(log)
        threading.Thread(target=self._accept, name="rank-port", daemon=True).start()

    def serve_pool(self, tensor: Tensor) -> None:
        """From now on the first process may open links over this pool."""
        pool = KvPool(tensor)
        copier.prepare(pool)
        self._pool = PoolServer(pool, transports.usable(pool, own_address(self._config)))

    def follow(self, starter: Connection) -> None:
        """Has the worker drain when the process that started this one says so, and ends with it."""
        with serving():
            while True:
                starter.recv()
                if not self._taken:
                    break
                for watcher in self._watchers:
                    watcher.send(DRAIN)
        os._exit(0)

    def _accept(self) -> None:
        while True:
            connected, _ = self._listening.accept()
            self._greetings.acquire()
            threading.Thread(target=self._greet, args=(connected,), daemon=True).start()

    def _greet(self, connected: socket.socket) -> None:
        """Finds out what a connection is for, and serves it if that is KV."""
        credentials = tls.current()
        context = credentials.context() if credentials.serves else None
        try:
            connection = object_connection.accepted(connected, self._secret, context)
            purpose = connection.recv() if connection.poll(_GREETING_S) else ""
            refusal = self._refusal(purpose)
            connection.send(refusal)
        except (OSError, EOFError) as error:
            self._log.warning("a connection to this rank was refused: %s", error)
            return
        finally:
            self._greetings.release()
        if refusal:
            connection.close()
        elif purpose == STEPS:
            self.steps.put(connection)
        elif purpose == DRAIN:
            self._watchers.append(connection)
        elif self._pool is not None:
            self._pool.serve(connection)

    def _refusal(self, purpose: str) -> str:
        if purpose == STEPS:
            with self._lock:
                taken, self._taken = self._taken, True
            return "another process has this rank, and has perhaps just ended" if taken else ""
        if purpose == KV and self._pool is None:
            return "this rank has no KV pool yet"
        return "" if purpose in (KV, DRAIN) else f"it has no use for {purpose!r}"


if __name__ == "__main__":
    main()
