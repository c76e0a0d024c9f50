"""Tensor parallelism: one model whose steps several processes ("ranks") compute together.

The worker's process is the first rank: it schedules, samples and moves KV. It sends the others a
command for each step that it begins (`rank_executor.py`); they compute their shards, on the CPUs or
GPUs of one host or several, add them up (`collectives.py`), and end with the worker. With
`--tp-backend shm` all ranks map one KV pool, and each writes its own heads; otherwise each has a
pool of its heads, which the first rank allocates for those of its host, so that it can hand blocks
over. A rank that ends or hangs fails the worker, whose streams continue elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.cuda import CudaArea
from baton.engine import rank_executor
from baton.engine.adapters import LoraAdapter
from baton.engine.batch import StepBatch
from baton.engine.collectives import SINGLE_RANK, Collectives, GroupCollectives, NcclCollectives
from baton.engine.kv_cache import Allocate, KvLayout
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.rank_process import RankProcess
from baton.engine.runner import RunnerFailed
from baton.errors import ConfigError
from baton.net.object_connection import broadcast
from baton.rendezvous import Place, Rendezvous, open_store
from baton.shared_memory import SharedMemoryArea

log = logging.getLogger(__name__)

# These mirror `src/ranks.h`.
_EXCHANGE_BYTES, _HEADER_BYTES = 4 << 20, 64
_ABORTED, _TIMEOUT_MS, _COLLECTIVES_NS = 2, 3, slice(4, 6)  # 32-bit words of the header
RANK_TIMEOUT_S = 10.0  # a rank that is this much later than another counts as hung
LOAD_S = 600.0  # for the other ranks to load once this one has, and for a GPU's warm-up
_WATCH_S = 0.5  # how late a hang may be noticed


class TensorParallelModel:
    """A model whose steps all ranks compute together; this process is the first of them."""

    def __init__(
        self,
        backend: rank_executor.RankBackend,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
    ) -> None:
        """Starts the other ranks and loads this one's shard while they load theirs.

        Raises ConfigError for a model that cannot be sharded, a rank that cannot load, and one that
        has loaded another checkpoint.
        """
        settings, remote = backend.settings, backend.remote_ranks
        self._config, self.num_groups = config, len(config.layer_groups.windows)
        self._shards = [
            Shard(number, settings.tp, settings.expert_parallel) for number in range(settings.tp)
        ]
        config.check_ranks(settings)
        if remote.connections and backend.shares_pool:
            raise ConfigError("ranks on several hosts share no memory: add --tp-backend gloo")
        self._shared: SharedMemoryArea | None = None  # where all ranks share one pool
        self._store: Rendezvous | None = None  # where each rank has a pool
        self._exchange: rank_executor.Exchange | None = None
        self._ranks = list[RankProcess]()  # the others, by number
        self._remote = remote.connections
        self._stopped = threading.Event()
        self._failure = ""  # why no further step can run
        self.on_failure: Callable[[], object] = lambda: None
        self._limit_s, self._due = RANK_TIMEOUT_S, math.inf

        here = settings.tp - len(remote.connections)
        place = self._open_exchange(settings, backend.shares_pool, remote.host)
        others = [backend.for_rank(Shard(number, here)) for number in range(1, here)]
        self._backends = [backend, *others]  # of this host
        works = [
            rank_executor.RankWork(
                one, path, config, dtype, shard, place, remote.host, RANK_TIMEOUT_S,
                log.getEffectiveLevel(),
            )
            for one, shard in zip(self._backends, self._shards, strict=False)
        ]  # fmt: skip
        if threads := Shard(0, here).settings(settings).threads:
            torch.set_num_threads(threads)
        try:
            self._start(works[1:], [works[0].on_another_host(one) for one in self._shards[here:]])
            self._load(works[0])
        except (RunnerFailed, OSError) as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise
        self.limit_steps(RANK_TIMEOUT_S)
        self.expert_tokens = self._model.expert_tokens
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _open_exchange(self, settings: EngineConfig, shares_pool: bool, host: str) -> int | Place:
        """Opens what ranks exchange through, as `RankWork.exchange`."""
        if not shares_pool:
            self._store, place = open_store(host)
            return place
        self._shared = SharedMemoryArea(_HEADER_BYTES + 2 * settings.tp * _EXCHANGE_BYTES, "ranks")
        self._words = self._shared.tensor[:_HEADER_BYTES].view(torch.int32)
        self._words[_TIMEOUT_MS] = int(RANK_TIMEOUT_S * 1e3)
        return self._shared.fd

    def _start(
        self, works: list[rank_executor.RankWork], load_remote: list[rank_executor.LoadShard]
    ) -> None:
        """Has the other ranks load: those of this host, then those of others."""
        for work in works:
            inherited = [work.exchange] if isinstance(work.exchange, int) else []
            module, number = "baton.engine.rank_process", work.shard.rank
            self._ranks.append(
                RankProcess.start(module, number, work, rank_executor.MESSAGES, inherited)
            )
        self._ranks += (RankProcess(*one) for one in enumerate(self._remote, len(works) + 1))
        for connection, command in zip(self._remote, load_remote, strict=True):
            connection.send(command)

    def _load(self, work: rank_executor.RankWork) -> None:
        """Loads this rank's shard; returns when all ranks have loaded and joined."""
        self._exchange = work.connect(self._shared.tensor if self._shared else None)
        self._model, identity = work.load(self._exchange), work.identity
        for rank in self._ranks:
            if (found := rank.answer(LOAD_S)) != rank_executor.Loaded(identity):
                raise ConfigError(
                    f"rank {rank.number} has loaded another checkpoint: {found.identity}, not "
                    f"{identity}"
                )
            rank.connection.send(rank_executor.JoinGroup())
        if isinstance(self._exchange, GroupCollectives):
            self._exchange.join(work.backend.device)

    def limit_steps(self, limit_s: float) -> None:
        """Limits how long a step, or sending a command, may last before a rank counts as hung."""
        self._limit_s = limit_s
        for rank in self._ranks:
            rank.connection.limit_sending(limit_s)

    def pools(self, layout: KvLayout, allocate: Allocate | None) -> tuple[Tensor, ...]:
        """The KV pools of this host: one for all ranks, or one of each rank's heads.

        Raises ConfigError where there is no memory that processes can share, or too little.
        """
        layouts = [layout]
        if self._shared is None:
            heads = (len(shard.kv_heads(self._config)) for shard in self._shards)
            layouts = [replace(layout, num_kv_heads=one) for one in heads]
        areas = list[Any]()
        for backend, one in zip(self._backends, layouts, strict=False):
            device = backend.device
            area = allocate(one.num_bytes, device) if allocate else _shareable(one, device)
            if area is None:
                raise ConfigError(
                    f"--tp needs memory of {device} that processes can share, and none was found"
                )
            areas.append(area)
        for rank in self._ranks:
            at = rank.number % len(layouts)
            shape, dtype = layouts[at].shape, rank_executor.name_of(layouts[at].dtype)
            if rank.process:
                rank.connection.send(rank_executor.AttachPool(shape, dtype, areas[at].nbytes))
                rank.connection.send_descriptor(areas[at].fd)
            else:
                rank.connection.send(rank_executor.AllocatePool(shape, dtype))
            rank.expect(rank_executor.Ready(), RANK_TIMEOUT_S if rank.process else LOAD_S)
        return tuple(
            area.tensor.view(one.dtype).view(one.shape)
            for area, one in zip(areas, layouts, strict=False)
        )

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks of the pools on other hosts. Raises RunnerFailed."""
        remote = [rank for rank in self._ranks if rank.process is None]
        try:
            broadcast(self._remote, rank_executor.ZeroBlocks(blocks))
            for rank in remote:
                rank.expect(rank_executor.Ready(), self._limit_s)
        except (OSError, ConfigError) as error:
            self._failure = self._failure or f"blocks on another host are not zeroed: {error}"
            raise RunnerFailed(self._failure) from error

    def state_blocks(self, pool: Tensor) -> int:
        """Implements `StepModel.state_blocks`."""
        count: int = self._model.state_blocks(pool)
        return count

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """Implements `StepModel.step`. Raises RunnerFailed when a rank has ended or hangs."""
        with self.on_all_ranks(rank_executor.RunStep.from_batch(batch)):
            logits: Tensor = self._model.step(batch, pool)
        self.hidden: Tensor | None = self._model.hidden
        return logits

    def write_lora(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes an adapter to a slot on all ranks. Raises RunnerFailed when a rank has ended."""
        with self.on_all_ranks(rank_executor.WriteLora.from_adapter(slot, adapter)):
            self._model.write_lora(slot, adapter)

    @property
    def local_shard(self) -> Any:
        """This rank's shard of the model, for what is done `on_all_ranks`."""
        return self._model

    @property
    def collectives(self) -> Collectives:
        """The collectives between ranks that have a pool each."""
        return self._exchange if isinstance(self._exchange, GroupCollectives) else SINGLE_RANK

    def check(self) -> None:
        """Raises RunnerFailed once no further step can run."""
        if self._failure:
            raise RunnerFailed(self._failure)

    @contextlib.contextmanager
    def on_all_ranks(self, command: Any) -> Iterator[None]:
        """Sends a command to the other ranks; within, this rank does the same.

        Raises RunnerFailed when a rank cannot: ranks would no longer be in step.
        """
        self.check()
        try:
            broadcast((rank.connection for rank in self._ranks), command)
            yield
        except Exception as error:
            reason = f"the first rank of this worker failed in a step: {error}"
            if isinstance(error, RunnerFailed):
                reason = str(error)
            elif isinstance(error, OSError):
                reason = f"a rank of this worker has ended: {error}"
            self._failure = self._failure or reason
            raise RunnerFailed(self._failure) from error

    def on_other_ranks(self, command: Any) -> None:
        """Sends a command for what this rank does not do. Raises RunnerFailed."""
        with self.on_all_ranks(command):
            pass

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Bounds a wait for this rank's GPU, which may wait for another rank; can be nested.

        Raises RunnerFailed when a rank has ended or hangs.
        """
        before, self._due = self._due, time.monotonic() + self._limit_s
        try:
            yield
        finally:
            self._due = before
            self.check()

    def answers(self) -> list[Any]:
        """The next message of each other rank. Raises ConfigError when one has ended."""
        return [rank.answer(LOAD_S) for rank in self._ranks]

    @property
    def collective_s(self) -> float:
        """Seconds that this rank has waited in collectives so far; 0 on a GPU."""
        if isinstance(self._exchange, GroupCollectives):
            return self._exchange.seconds
        return int(self._words[_COLLECTIVES_NS].view(torch.int64)) / 1e9

    def close(self) -> None:
        """Ends the other ranks; returns when those of this host have ended."""
        self._stopped.set()
        for rank in self._ranks:
            rank.connection.close()
        if isinstance(self._exchange, GroupCollectives):
            self._exchange.close()
        for rank in self._ranks:
            rank.end()
        if self._shared is not None:
            self._shared.close()
        if self._store is not None:
            self._store.close()

    def _watch(self) -> None:
        """Fails the step that waits for a rank that has ended or hangs."""
        ends = select.poll()
        descriptors = {rank.connection.fileno(): rank for rank in self._ranks}
        for descriptor in descriptors:
            ends.register(descriptor, select.POLLRDHUP)
        ended: list[tuple[int, int]] = []
        while not (ended or self._stopped.is_set()) and time.monotonic() < self._due:
            ended = ends.poll(_WATCH_S * 1e3)
        if self._stopped.is_set():
            return
        reason = f"a rank of this worker hangs: a step took more than {self._limit_s:.0f} s"
        if ended:
            number = descriptors[ended[0][0]].number
            reason = f"a rank of this worker has ended, number {number}"
        log.critical("%s: so does this worker", reason)
        self._failure = self._failure or reason
        if self._shared is not None:  # ranks of a group see the end of its connections
            self._words[_ABORTED] = 1
        elif isinstance(self._exchange, NcclCollectives):
            self._exchange.close()
        self.on_failure()


def _shareable(layout: KvLayout, device: torch.device) -> SharedMemoryArea | CudaArea:
    if device.type == "cpu":
        return SharedMemoryArea(layout.num_bytes)
    return CudaArea(layout.num_bytes, device)
