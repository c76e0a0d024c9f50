"""One of the other ranks of a tensor-parallel worker: `python -m baton.engine.rank DESCRIPTOR`.

Started by `ranks.py`, over whose connection it gets its work.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from baton.engine.backends.cpu.backend import pin_thread
from baton.engine.collectives import GroupCollectives
from baton.engine.ranks import Channel, RankWork, mapped
from baton.engine.runner import RunnerFailed
from baton.errors import BatonError

log = logging.getLogger(__name__)


def main() -> None:
    """Serves until the first rank ends, or says why it cannot begin."""
    connection = Connection(int(sys.argv[1]))
    ignore_signals()
    with serving():
        work: RankWork = connection.recv()
        logging.basicConfig(level=work.log_level, format=f"rank {work.shard.rank}: %(message)s")
        serve(connection, work)


def ignore_signals() -> None:
    """Signals to a whole group mean the first rank, which ends this one when it has drained."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Around all that a rank does: ends when the first one has ended, or fails."""
    try:
        yield
    except (EOFError, OSError):
        log.debug("the first rank has ended")
    except RunnerFailed as error:
        log.error("%s", error)


def serve(
    connection: Channel,
    work: RankWork,
    allocated: Callable[[Tensor], None] = lambda pool: None,
) -> None:
    """Computes a rank's part of every step until the connection ends. Raises EOFError then.

    allocated: is given the KV pool, where this rank's process allocates it.
    """
    backend, settings = work.backend, work.backend.settings
    pin_thread(settings.cpus, settings.nice)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    shared = mapped(work.exchange) if isinstance(work.exchange, int) else None
    try:
        exchange = work.join(shared)
        model = work.load(exchange)
        connection.send(work.identity)
    except (BatonError, OSError, RuntimeError) as error:
        connection.send(str(error))
        return
    connection.recv()  # all have loaded
    rank = backend.rank(model, connection)
    rank.allocated = allocated
    try:
        if isinstance(exchange, GroupCollectives):
            exchange.join(backend.device)
        while True:
            command, *arguments = connection.recv()
            getattr(rank, command)(*arguments)
    finally:
        rank.close()
        if isinstance(exchange, GroupCollectives):
            exchange.close()  # kernels on a GPU may wait for others


if __name__ == "__main__":
    main()
