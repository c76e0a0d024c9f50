"""The processes ("ranks") of a tensor-parallel worker on one host's CPUs.

The worker's process is the first rank: it plans, samples, and moves KV. The others get each step's
batch (`rank.py`), compute their shard of it, and end with the worker. With `--tp-backend shm` all
map one KV pool, in which each writes its own heads; else each has a pool of its heads, which the
first maps too, to hand them over. A rank that ends or hangs fails the worker: its streams go on
elsewhere.
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.batch import StepBatch
from baton.engine.collectives import GlooCollectives
from baton.engine.kv_cache import Allocate, KvLayout
from baton.engine.models.config import ModelConfig
from baton.engine.runner import RunnerFailed
from baton.engine.shard import Shard
from baton.engine.weights.checkpoint import fingerprint
from baton.engine.weights.weights import random_seed
from baton.errors import ConfigError
from baton.shared_memory import SharedMemoryArea

log = logging.getLogger(__name__)

# These mirror `src/ranks.h`.
_EXCHANGE_BYTES, _HEADER_BYTES = 4 << 20, 64
_ABORTED, _TIMEOUT_MS, _TOOK_NS = 2, 3, slice(4, 6)  # words of the header
RANK_TIMEOUT_S = 10.0  # a rank that is so much later than another counts as hung
_LOAD_S = 600.0  # for the other ranks to load, once this one has
_STOP_S = 5.0

BATCH = ("token_ids", "context_lens", "query_lens", "block_tables", "logit_rows")
Exchange: TypeAlias = int | GlooCollectives  # the address of shared memory, or a group
MakeModel = Callable[[Shard, Exchange], Any]
"""The model of a shard, given what joins it to the others."""


@dataclass(frozen=True)
class RankWork:
    """What a rank is told first."""

    settings: EngineConfig
    path: Path
    config: ModelConfig
    dtype: torch.dtype
    shard: Shard
    exchange_fd: int
    timeout_s: float
    log_level: int

    def exchange(self, shared: Tensor | None) -> Exchange:
        """What joins this rank to the others; shared: the memory that they exchange through."""
        if shared is None:
            return GlooCollectives(self.shard, self.exchange_fd, self.timeout_s)
        return shared.data_ptr()

    @property
    def identity(self) -> str:
        """Which model this rank has a part of: all must have the same."""
        seed = random_seed(self.settings, torch.device("cpu"))
        return f"model {fingerprint(self.path, seed, self.settings.lora)}"


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

        Raises ConfigError for a model that cannot be cut, when a rank cannot load, and when it has
        loaded another checkpoint.
        """
        count = settings.tp
        Shard(0, count).check(config)
        self._config = config
        self._shared: SharedMemoryArea | None = None  # with one pool for all
        if settings.tp_backend == "shm":
            num_bytes = _HEADER_BYTES + 2 * count * _EXCHANGE_BYTES
            self._shared = SharedMemoryArea(num_bytes, "ranks")
            self._words = self._shared.tensor[:_HEADER_BYTES].view(torch.int32)
            self._words[_TIMEOUT_MS] = int(RANK_TIMEOUT_S * 1e3)
        self._exchange_fd = self._shared.fd if self._shared else os.memfd_create("baton-ranks")
        self._exchange: Exchange | None = None
        self._ranks = list[_Rank]()
        self._stopped = threading.Event()

        def work(shard: Shard) -> RankWork:
            return RankWork(
                shard.settings(settings), path, config, dtype, shard, self._exchange_fd,
                RANK_TIMEOUT_S, log.getEffectiveLevel(),
            )  # fmt: skip

        try:
            self._ranks += (_Rank(work(Shard(number, count))) for number in range(1, count))
            mine = work(Shard(0, count))
            torch.set_num_threads(mine.settings.threads)
            self._exchange = mine.exchange(self._shared.tensor if self._shared else None)
            self._model, identity = make(mine.shard, self._exchange), mine.identity
            for rank in self._ranks:
                rank.expect(identity, _LOAD_S)
                rank.connection.send("join")
            if isinstance(self._exchange, GlooCollectives):
                self._exchange.join()
        except RunnerFailed as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise
        self.expert_tokens = self._model.expert_tokens
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def pools(self, layout: KvLayout, allocate: Allocate) -> tuple[Tensor, ...]:
        """The KV pool that all ranks share, or that of each one's heads."""
        layouts = [layout]
        if self._shared is None:
            count = len(self._ranks) + 1
            held = (Shard(rank, count).kv_heads(self._config) for rank in range(count))
            layouts = [replace(layout, num_kv_heads=len(heads)) for heads in held]
        memories = [allocate(one.num_bytes) for one in layouts]
        areas = [area for area in memories if isinstance(area, SharedMemoryArea)]
        assert len(areas) == len(layouts), "ranks map the pool"
        for rank in self._ranks:
            at = rank.number % len(areas)
            rank.connection.send((layouts[at].shape, layouts[at].dtype))
            send_handle(rank.connection, areas[at].fd, rank.process.pid)
            rank.expect("attached", RANK_TIMEOUT_S)
        return tuple(
            area.tensor.view(one.dtype).view(one.shape)
            for area, one in zip(areas, layouts, strict=True)
        )

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

    @property
    def collective_s(self) -> float:
        """What this rank's sums and gathers took so far, in seconds."""
        if isinstance(self._exchange, GlooCollectives):
            return self._exchange.seconds
        return int(self._words[_TOOK_NS].view(torch.int64)) / 1e9

    def close(self) -> None:
        """Ends the other ranks; returns when they have ended."""
        self._stopped.set()
        for rank in self._ranks:
            rank.connection.close()
        if isinstance(self._exchange, GlooCollectives):
            self._exchange.close()
        for rank in self._ranks:
            try:
                rank.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self._shared is not None:
            self._shared.close()
        else:
            os.close(self._exchange_fd)

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
            if self._shared is not None:  # others see the end of its connections
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
            descriptors = (theirs.fileno(), work.exchange_fd)
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
            raise ConfigError(f"rank {self.number} cannot begin: {found}, not {answer}")
