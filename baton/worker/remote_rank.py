"""A rank on a host that is not the first: `python -m baton.worker.remote_rank DESCRIPTOR`.

Started by `rank_hosts.py`. It listens for the worker's first process, which opens a connection for
commands (`rank_executor.py`), one for each end of a KV link, and one to hear of a drain. The
settings of its host come from the process that started it, all others from the first process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from dataclasses import replace

from torch import Tensor

from baton import log_format
from baton.config import WorkerConfig, model_path
from baton.engine import build, rank_executor
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.rank_process import rank_process
from baton.errors import BatonError
from baton.net import object_connection, tls
from baton.net.object_connection import ObjectConnection
from baton.rendezvous import Place, listening_socket
from baton.worker import rank_hosts
from kvtransfer import copier, transports
from kvtransfer.pool import KvPool
from kvtransfer.remote_pool import PoolServer

log = logging.getLogger(__name__)

_OPEN_S = 5.0
_MAX_UNPROVEN = 32  # connections at a time that have not proven the secret yet


def main() -> None:
    """Serves one first process; ends with it or with the process that started this one."""
    with rank_process(rank_hosts.CONTROL) as (starter, given):
        assert isinstance(given, rank_hosts.RemoteRankConfig)
        config = given.worker
        handler = logging.StreamHandler()
        handler.setFormatter(log_format.formatter(config.log_format))
        logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
        tls.use_config(config, config.insecure, "worker")
        port = _RankPort(config, given.secret)
        starter.send(rank_hosts.Listening(port.address))
        threading.Thread(target=port.follow, args=(starter,), daemon=True).start()
        connection = port.commands.get()
        command = connection.recv()
        try:
            work = rank_work(command, config, given.local_rank)
        except BatonError as error:
            connection.send(rank_executor.Failed(str(error)))
        else:
            rank_executor.serve(connection, work, port.serve_pool)
    os._exit(0)  # at once: threads may wait for the other ends of links


def rank_work(
    command: rank_executor.LoadShard, config: WorkerConfig, local_rank: int
) -> rank_executor.RankWork:
    """What the first process asks for, with this host's own settings.

    local_rank: number among the ranks of this host. Raises ConfigError, CheckpointError.
    """
    local_ranks, path = config.engine.tp // config.nnodes, model_path(config.engine.model)
    settings = replace(config.engine, **command.settings)
    host, port, secret = command.store
    return rank_executor.RankWork(
        backend=build.backend_of(settings, local_ranks).for_rank(Shard(local_rank, local_ranks)),
        path=path,
        config=replace(ModelConfig.load(path), max_context=command.max_context),
        dtype=rank_executor.dtype_named(command.dtype),
        shard=Shard(*command.shard),
        exchange=Place(host, port, bytes.fromhex(secret)),
        host=rank_hosts.advertised_host(config),
        timeout_s=command.timeout_s,
        log_level=log.getEffectiveLevel(),
    )


class _RankPort:
    """A rank's listening port. `commands` gets the one connection for commands."""

    def __init__(self, config: WorkerConfig, secret: bytes) -> None:
        self._secret, self._host = secret, rank_hosts.advertised_host(config)
        self._listening = listening_socket(self._host)
        self.address = f"{self._host}:{self._listening.getsockname()[1]}"
        self.commands = queue.Queue[ObjectConnection]()
        self._lock, self._in_use = threading.Lock(), False
        self._pool: PoolServer | None = None
        self._drain_watchers = list[ObjectConnection]()
        self._unproven = threading.BoundedSemaphore(_MAX_UNPROVEN)
        self._log = log_format.RateLimit(log)
        threading.Thread(target=self._accept, name="rank-port", daemon=True).start()

    def serve_pool(self, tensor: Tensor) -> None:
        """Lets the first process open links over this pool from now on."""
        pool = KvPool(tensor)
        copier.prepare(pool)
        self._pool = PoolServer(pool, transports.usable(pool, self._host))

    def follow(self, starter: ObjectConnection) -> None:
        """Passes a drain on to the worker, which ends this process; ends it with its starter."""
        with contextlib.suppress(EOFError, OSError):
            while starter.recv() == rank_hosts.Drain() and self._in_use:
                for watcher in self._drain_watchers:
                    watcher.send(rank_hosts.Drain())
        os._exit(0)

    def _accept(self) -> None:
        while True:
            connected, _ = self._listening.accept()
            self._unproven.acquire()
            threading.Thread(target=self._open, args=(connected,), daemon=True).start()

    def _open(self, connected: socket.socket) -> None:
        """Proves a connection, learns its purpose, and serves it if that is KV."""
        credentials = tls.current()
        context = credentials.context() if credentials.serves else None
        try:
            opening = object_connection.accepted(
                connected, self._secret, context, rank_hosts.CONTROL
            )
            asked = opening.recv() if opening.poll(_OPEN_S) else None
            purpose = asked.purpose if isinstance(asked, rank_hosts.Open) else ""
            reason = self._refusal(purpose)
            opening.send(rank_executor.Failed(reason) if reason else rank_executor.Ready())
        except (OSError, EOFError) as error:
            self._log.warning("a connection to this rank was refused: %s", error)
            return
        finally:
            self._unproven.release()
        if reason:
            opening.close()
            return
        connection = ObjectConnection(opening.socket, rank_hosts.TABLES[purpose])
        if purpose == rank_hosts.COMMANDS:
            self.commands.put(connection)
        elif purpose == rank_hosts.DRAIN:
            self._drain_watchers.append(connection)
        elif self._pool is not None:
            self._pool.serve(connection)

    def _refusal(self, purpose: str) -> str:
        if purpose == rank_hosts.COMMANDS:
            with self._lock:
                in_use, self._in_use = self._in_use, True
            return "another process has this rank, or has just ended" if in_use else ""
        if purpose == rank_hosts.KV and self._pool is None:
            return "this rank has no KV pool yet"
        return "" if purpose in rank_hosts.TABLES else f"connections have no purpose {purpose!r}"


if __name__ == "__main__":
    main()
