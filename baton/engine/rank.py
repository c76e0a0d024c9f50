"""One of the other ranks of a tensor-parallel worker: `python -m baton.engine.rank DESCRIPTOR`.

Started by `ranks.py`, over whose connection it gets its work.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from baton.engine.backends.cpu import CpuBackend, pin_thread
from baton.engine.batch import StepBatch
from baton.engine.collectives import GlooCollectives
from baton.engine.ranks import RankWork
from baton.engine.runner import RunnerFailed
from baton.errors import BatonError

log = logging.getLogger(__name__)


def main() -> None:
    """Serves until the first rank ends, or says why it cannot begin."""
    connection = Connection(int(sys.argv[1]))
    # Signals to a whole group mean the first rank, which ends this one when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        work: RankWork = connection.recv()
        logging.basicConfig(level=work.log_level, format=f"rank {work.shard.rank}: %(message)s")
        serve(connection, work)
    except (EOFError, ConnectionError):
        log.debug("the first rank has ended")
    except RunnerFailed as error:
        log.error("%s", error)


def serve(connection: Connection, work: RankWork) -> None:
    """Computes a rank's part of every step until the connection ends. Raises EOFError then."""
    settings = work.settings
    pin_thread(settings.cpus, settings.nice)
    torch.set_num_threads(settings.threads)
    shared = _mapped(work.exchange_fd) if settings.tp_backend == "shm" else None
    exchange = work.exchange(shared)
    backend = CpuBackend(settings)
    try:
        model = backend.shard_model(work.path, work.config, work.dtype, work.shard, exchange)
        connection.send(work.identity)
    except (BatonError, OSError) as error:
        connection.send(str(error))
        return
    connection.recv()  # all have loaded
    if isinstance(exchange, GlooCollectives):
        exchange.join()
    shape, dtype = connection.recv()
    pool = _mapped(recv_handle(connection)).view(dtype).view(shape)
    connection.send("attached")
    while True:
        *arrays, num_decodes = connection.recv()
        tokens, contexts, queries, tables, logit_rows = map(torch.from_numpy, arrays)
        model.step(StepBatch(tokens, contexts, queries, tables, logit_rows, num_decodes), pool)


def _mapped(descriptor: int) -> torch.Tensor:
    """All of a shared memory's bytes; closes its descriptor."""
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


if __name__ == "__main__":
    main()
