"""The processes ("ranks") of a tensor-parallel worker on one host's CPUs.

The worker's process is the first rank: it plans, samples, and moves KV. The others get each step's
batch (`rank.py`), compute their shard of it, and end with the worker. All map one KV pool, in which
each writes its own heads, so that a handoff finds whole blocks whatever the number of ranks. A rank
that ends or hangs fails the worker: its streams go on elsewhere.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.batch import StepBatch
from baton.engine.kv_cache import KvLayout
from baton.engine.models.config import ModelConfig
from baton.engine.runner import RunnerFailed
from baton.engine.shard import Shard
from baton.errors import ConfigError
from baton.shared_memory import SharedMemoryArea

log = logging.getLogger(__name__)

# These mirror `src/ranks.h`.
_EXCHANGE_BYTES, _HEADER_BYTES = 4 << 20, 64
_ABORTED, _TIMEOUT_MS = 2, 3  # words of the header
RANK_TIMEOUT_S = 10.0  # a rank that is so much later than another counts as hung
_LOAD_S = 600.0  # for the other ranks to load, once this one has
_STOP_S = 5.0

BATCH = ("token_ids", "context_lens", "query_lens", "block_tables", "logit_rows")
MakeModel = Callable[[Shard, int], Any]
"""The model of a shard, given the address of what ranks exchange."""


@dataclass(frozen=True)
class RankWork:
    """What a rank is told first."""

    settings: EngineConfig
    path: Path
    config: ModelConfig
    dtype: torch.dtype
    shard: Shard
    exchange: int  # file descriptors
    log_level: int


class RankedModel:
    """A model whose steps all ranks compute together; this process is the first of them."""

    def __init__(
        self,
        settings: EngineConfig,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        make: MakeModel,
    ) -> None:
        """Starts the other ranks and loads this one's part while they load theirs.

        Raises ConfigError for a model that cannot be cut, and when a rank cannot load.
        """
        count = settings.tp
        Shard(0, count).check(config)
        self._exchange = SharedMemoryArea(_HEADER_BYTES + 2 * count * _EXCHANGE_BYTES)
        self._words = self._exchange.tensor[:_HEADER_BYTES].view(torch.int32)
        self._words[_TIMEOUT_MS] = int(RANK_TIMEOUT_S * 1e3)
        self._ranks = list[_Rank]()
        self._stopped = threading.Event()
        try:
            for number in range(1, count):
                shard, level = Shard(number, count), log.getEffectiveLevel()
                own = shard.settings(settings)
                work = RankWork(own, path, config, dtype, shard, self._exchange.fd, level)
                self._ranks.append(_Rank(work))
            torch.set_num_threads(Shard(0, count).settings(settings).threads)
            self._model = make(Shard(0, count), self._exchange.tensor.data_ptr())
            for rank in self._ranks:
                rank.expect("ready", _LOAD_S)
        except BaseException:
            self.close()
            raise
        self.expert_tokens = self._model.expert_tokens
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def attach(self, area: SharedMemoryArea, layout: KvLayout) -> None:
        """Lets all ranks map the KV pool."""
        for rank in self._ranks:
            rank.connection.send((layout.shape, layout.dtype))
            send_handle(rank.connection, area.fd, rank.process.pid)
            rank.expect("attached", RANK_TIMEOUT_S)

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """As `StepModel.step`. Raises RunnerFailed when a rank has ended or hangs."""
        arrays = [getattr(batch, name).numpy() for name in BATCH]
        try:
            for rank in self._ranks:
                rank.connection.send((*arrays, batch.num_decodes))
        except OSError as error:
            raise RunnerFailed(f"a rank of this worker has ended: {error}") from error
        logits: Tensor = self._model.step(batch, pool)
        self.hidden: Tensor | None = self._model.hidden
        return logits

    def close(self) -> None:
        """Ends the other ranks; returns when they have ended."""
        self._stopped.set()
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            try:
                rank.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._exchange.close()

    def _watch(self) -> None:
        """Lets no step wait for a rank that has ended."""
        ends = select.poll()
        descriptors = {os.pidfd_open(rank.process.pid): rank for rank in self._ranks}
        for descriptor in descriptors:
            ends.register(descriptor, select.POLLIN)
        (descriptor, _), *_ = ends.poll()
        rank = descriptors[descriptor]
        for one in descriptors:
            os.close(one)
        if not self._stopped.is_set():
            log.critical("rank %d has ended: so does this worker", rank.number)
            self._words[_ABORTED] = 1


class _Rank:
    """One of the other ranks, as the first one sees it."""

    def __init__(self, work: RankWork) -> None:
        self.number = work.shard.rank
        self.connection, theirs = Pipe()
        # One that is stopped takes nothing: a batch larger than the buffer must not wait for it.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            timeout = struct.pack("ll", int(RANK_TIMEOUT_S), 0)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        command = [sys.executable, "-m", "baton.engine.rank", str(theirs.fileno())]
        with theirs:
            descriptors = (theirs.fileno(), work.exchange)
            self.process = subprocess.Popen(command, pass_fds=descriptors)
        self.connection.send(work)

    def expect(self, answer: str, timeout_s: float) -> None:
        """Waits for it. Raises ConfigError with what the rank says instead."""
        try:
            found = f"nothing came from it in {timeout_s:.0f} s"
            if self.connection.poll(timeout_s):
                found = self.connection.recv()
        except (EOFError, OSError):
            found = f"it ended with status {self.process.wait()}"
        if found != answer:
            raise ConfigError(f"rank {self.number} cannot begin: {found}")
