"""The processes ("ranks") of a tensor-parallel worker, on the CPUs or GPUs of one host or several.

The worker's process is the first rank: it plans, samples, and moves KV. The others are told what it
begins (`rank.py`), compute their shard of it, and end with the worker. With `--tp-backend shm` all
map one KV pool, in which each writes its own heads; else each has a pool of its heads, which the
first allocates, to hand them over, for those of its host. A rank that ends or hangs fails the
worker: its streams go on elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from baton.cuda import CudaArea, CudaDriver
from baton.engine.batch import Ints, StepBatch, on_device
from baton.engine.collectives import (
    SINGLE_RANK,
    Collectives,
    GlooCollectives,
    GroupCollectives,
    NcclCollectives,
)
from baton.engine.kv_cache import Allocate, KvLayout
from baton.engine.models.model_config import ModelConfig
from baton.engine.runner import RunnerFailed, zero_blocks
from baton.engine.shard import Shard
from baton.engine.weights.checkpoint import fingerprint
from baton.engine.weights.loader import random_seed
from baton.errors import ConfigError
from baton.net.object_connection import ObjectConnection
from baton.rendezvous import Place, Rendezvous, open_store
from baton.shared_memory import SharedMemoryArea

if TYPE_CHECKING:  # which start ranks
    from baton.engine.backends import Backend

log = logging.getLogger(__name__)

# These mirror `src/ranks.h`.
_EXCHANGE_BYTES, _HEADER_BYTES = 4 << 20, 64
_ABORTED, _TIMEOUT_MS, _TOOK_NS = 2, 3, slice(4, 6)  # words of the header
RANK_TIMEOUT_S = 10.0  # a rank that is so much later than another counts as hung
LOAD_S = 600.0  # for the other ranks to load, once this one has, and for a GPU's warm-up
_WATCH_S = 0.5  # how late a rank that hangs may be noticed
_STOP_S = 5.0

BATCH = ("token_ids", "context_lens", "query_lens", "block_tables", "logit_rows")
Exchange: TypeAlias = int | GroupCollectives  # the address of shared memory, or a group
# Of other hosts' ranks what is sent is JSON and arrays; commands' arguments are no more than that.
Channel: TypeAlias = Connection | ObjectConnection
HOSTS_OWN = frozenset(
    ("model", "random_weights", "lora", "device", "threads", "cpus", "nice", "gpu_memory")
)


@dataclass(frozen=True)
class Elsewhere:
    """Ranks on other hosts, which come behind this one's. host: this one's address for them."""

    host: str = "127.0.0.1"
    ranks: Sequence[ObjectConnection] = ()


@dataclass(frozen=True)
class RankWork:
    """What a rank is told first. backend, path, host: its own · exchange: a memfd, or the store of
    a group."""

    backend: Backend
    path: Path
    config: ModelConfig
    dtype: torch.dtype
    shard: Shard
    exchange: int | Place
    host: str
    timeout_s: float
    log_level: int

    def join(self, shared: Tensor | None) -> Exchange:
        """What joins this rank to the others; shared: the memory that they exchange through.

        Raises RuntimeError.
        """
        if shared is not None:
            return shared.data_ptr()
        assert isinstance(self.exchange, Place)
        kind = NcclCollectives if self.backend.device.type == "cuda" else GlooCollectives
        store = self.exchange.connect(self.timeout_s)
        return kind(self.shard, store, self.host, self.timeout_s)

    @property
    def elsewhere(self) -> dict[str, Any]:
        """What a rank on another host needs to know of it; the rest its host has."""
        assert isinstance(self.exchange, Place)
        settings = vars(self.backend.settings).items()
        return {
            "settings": {name: value for name, value in settings if name not in HOSTS_OWN},
            "max_context": self.config.max_context,
            "dtype": name_of(self.dtype),
            "shard": list(astuple(self.shard)),
            "store": [self.exchange.host, self.exchange.port, self.exchange.secret.hex()],
            "timeout_s": self.timeout_s,
        }

    def load(self, exchange: Exchange) -> Any:
        """This rank's part of the model. Raises ConfigError, CheckpointError."""
        return self.backend.shard_model(self.path, self.config, self.dtype, self.shard, exchange)

    @property
    def identity(self) -> str:
        """Which model this rank has a part of: all must have the same."""
        settings = self.backend.settings
        seed = random_seed(settings, torch.device("cpu"))
        return f"model {fingerprint(self.path, seed, settings.lora)}"


class Rank:
    """One of the others, in its own process: its methods are what the first has it do.

    allocated: is given the pool that this rank allocates on another host.
    """

    pool: Tensor
    allocated: Callable[[Tensor], None]

    def __init__(self, backend: Backend, model: Any, connection: Channel) -> None:
        self.device, self.model, self.connection = backend.device, model, connection

    def attach(self, shape: tuple[int, ...], dtype_name: str, size: int) -> None:
        """Maps the pool that this rank writes to, of that many bytes; its descriptor comes next."""
        assert isinstance(self.connection, Connection)
        dtype, fd = dtype_named(dtype_name), recv_handle(self.connection)
        if self.device.type == "cpu":
            memory = mapped(fd)
        else:
            driver, num_bytes = CudaDriver(), math.prod(shape) * dtype.itemsize
            memory = driver.view(driver.open(self.device, fd, size), num_bytes)
            os.close(fd)
        self.pool = memory.view(dtype).view(shape)
        self.connection.send("ready")

    def allocate(self, shape: tuple[int, ...], dtype_name: str) -> None:
        """Makes a pool of its own, on a host where the first rank cannot."""
        try:
            dtype = dtype_named(dtype_name)
            self.pool = torch.zeros(*shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            self.connection.send(f"no memory for its KV: {error}")
            return
        self.allocated(self.pool)
        self.connection.send("ready")

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks of the pool that it allocated."""
        zero_blocks(self.pool, blocks)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.connection.send("ready")

    def step(self, arrays: list[Ints], num_decodes: int) -> None:
        """Computes this rank's part of a `StepBatch`, whose `BATCH` these are."""
        tokens, contexts, queries, tables, logit_rows = (
            on_device(array, self.device) for array in arrays
        )
        batch = StepBatch(tokens, contexts, queries, tables, logit_rows, num_decodes)
        self.model.step(batch, self.pool)

    def close(self) -> None:
        """Does nothing any more."""


def name_of(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The way back."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def mapped(descriptor: int) -> Tensor:
    """All of a shared memory's bytes; closes its descriptor."""
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


class RankedModel:
    """A model whose steps all ranks compute together; this process is the first of them."""

    def __init__(
        self, backend: Backend, path: Path, config: ModelConfig, dtype: torch.dtype
    ) -> None:
        """Starts the other ranks and loads this one's part while they load theirs.

        Raises ConfigError for a model that cannot be cut, when a rank cannot load, and when it has
        loaded another checkpoint.
        """
        elsewhere = backend.elsewhere
        count, expert_parallel = backend.settings.tp, backend.settings.expert_parallel
        self._shards = [Shard(number, count, expert_parallel) for number in range(count)]
        self._shards[0].check(config)
        if elsewhere.ranks and backend.shares_pool:
            raise ConfigError("ranks on several hosts share no memory: add --tp-backend gloo")
        self._config = config
        self._shared: SharedMemoryArea | None = None  # with one pool for all
        self._store: Rendezvous | None = None  # with one for each
        at: int | Place
        if backend.shares_pool:
            num_bytes = _HEADER_BYTES + 2 * count * _EXCHANGE_BYTES
            self._shared = SharedMemoryArea(num_bytes, "ranks")
            self._words = self._shared.tensor[:_HEADER_BYTES].view(torch.int32)
            self._words[_TIMEOUT_MS] = int(RANK_TIMEOUT_S * 1e3)
            at = self._shared.fd
        else:
            self._store, at = open_store(elsewhere.host)
        self._exchange: Exchange | None = None
        self._ranks = list[_Other]()
        self._stopped = threading.Event()
        self._failure = ""  # why no further step can run
        self.on_failure: Callable[[], object] = lambda: None
        self._limit_s, self._due = RANK_TIMEOUT_S, math.inf

        here = count - len(elsewhere.ranks)
        others = [backend.of_rank(Shard(number, here)) for number in range(1, here)]
        self._backends = [backend, *others]  # of this host

        def work(number: int) -> RankWork:
            its_backend = self._backends[number if number < here else 0]
            return RankWork(
                its_backend, path, config, dtype, self._shards[number], at, elsewhere.host,
                RANK_TIMEOUT_S, log.getEffectiveLevel(),
            )  # fmt: skip

        if threads := Shard(0, here).settings(backend.settings).threads:
            torch.set_num_threads(threads)
        try:
            self._ranks += (_Other.started(work(number)) for number in range(1, here))
            self._ranks += (_Other(n, one) for n, one in enumerate(elsewhere.ranks, here))
            for rank in self._ranks[here - 1 :]:
                rank.connection.send(work(rank.number).elsewhere)
            self._load(work(0))
        except (RunnerFailed, OSError) as error:
            self.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            self.close()
            raise
        self.limit_steps(RANK_TIMEOUT_S)
        self.expert_tokens = self._model.expert_tokens
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _load(self, mine: RankWork) -> None:
        """Loads this rank's part; when it returns, all ranks have joined."""
        self._exchange = mine.join(self._shared.tensor if self._shared else None)
        self._model, identity = mine.load(self._exchange), mine.identity
        for rank in self._ranks:
            rank.expect(identity, LOAD_S)
            rank.connection.send("join")
        if isinstance(self._exchange, GroupCollectives):
            self._exchange.join(mine.backend.device)

    def limit_steps(self, limit_s: float) -> None:
        """How long a step, or a rank to take what it is told, may last before it counts as hung."""
        self._limit_s = limit_s
        for rank in self._ranks:
            rank.limit_sending(limit_s)

    def pools(self, layout: KvLayout, allocate: Allocate | None) -> tuple[Tensor, ...]:
        """The KV pool that all ranks share, or that of each one's heads, of this host.

        Raises ConfigError where there is no memory that processes can share, or none at all.
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
            kind = layouts[at].shape, name_of(layouts[at].dtype)
            if rank.process:
                assert isinstance(rank.connection, Connection)
                rank.connection.send(("attach", *kind, areas[at].nbytes))
                send_handle(rank.connection, areas[at].fd, rank.process.pid)
            else:
                rank.connection.send(("allocate", *kind))
            rank.expect("ready", RANK_TIMEOUT_S if rank.process else LOAD_S)
        return tuple(
            area.tensor.view(one.dtype).view(one.shape)
            for area, one in zip(areas, layouts, strict=False)
        )

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks of the pools on other hosts. Raises RunnerFailed."""
        elsewhere = [rank for rank in self._ranks if rank.process is None]
        try:
            for rank in elsewhere:
                rank.connection.send(("zero_blocks", blocks))
            for rank in elsewhere:
                rank.expect("ready", self._limit_s)
        except (OSError, ConfigError) as error:
            self._failure = self._failure or f"blocks on another host are not zeroed: {error}"
            raise RunnerFailed(self._failure) from error

    def step(self, batch: StepBatch, pool: Tensor) -> Tensor:
        """As `StepModel.step`. Raises RunnerFailed when a rank has ended or hangs."""
        arrays = [getattr(batch, name).cpu().numpy() for name in BATCH]
        with self.together("step", arrays, batch.num_decodes):
            logits: Tensor = self._model.step(batch, pool)
        self.hidden: Tensor | None = self._model.hidden
        return logits

    @property
    def own(self) -> Any:
        """This rank's part, for what all compute `together`."""
        return self._model

    @property
    def collectives(self) -> Collectives:
        """What joins the ranks, where each has a pool of its own."""
        return self._exchange if isinstance(self._exchange, GroupCollectives) else SINGLE_RANK

    def check(self) -> None:
        """Raises RunnerFailed once no further step can run."""
        if self._failure:
            raise RunnerFailed(self._failure)

    @contextlib.contextmanager
    def together(self, command: str, *arguments: Any) -> Iterator[None]:
        """Around what this rank begins: has the others do the same, see `Rank`.

        Raises RunnerFailed when it cannot be done by all: they would no longer be in step.
        """
        self.check()
        try:
            for rank in self._ranks:
                rank.connection.send((command, *arguments))
            yield
        except Exception as error:
            reason = f"the first rank of this worker failed in a step: {error}"
            if isinstance(error, RunnerFailed):
                reason = str(error)
            elif isinstance(error, OSError):
                reason = f"a rank of this worker has ended: {error}"
            self._failure = self._failure or reason
            raise RunnerFailed(self._failure) from error

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for this rank's GPU, which may wait for the others' for ever; also within
        another.

        Raises RunnerFailed when a rank has ended or hangs.
        """
        before, self._due = self._due, time.monotonic() + self._limit_s
        try:
            yield
        finally:
            self._due = before
            self.check()

    def tell(self, command: str, *arguments: Any) -> None:
        """Has the others do what this rank does not."""
        with self.together(command, *arguments):
            pass

    def answers(self) -> list[Any]:
        """What each of the others answers. Raises ConfigError when one has ended."""
        return [rank.answer(LOAD_S) for rank in self._ranks]

    @property
    def collective_s(self) -> float:
        """What this rank waited for in sums and gathers so far, in seconds; on a GPU nothing."""
        if isinstance(self._exchange, GroupCollectives):
            return self._exchange.seconds
        return int(self._words[_TOOK_NS].view(torch.int64)) / 1e9

    def close(self) -> None:
        """Ends the other ranks; returns when those of this host have ended."""
        self._stopped.set()
        for rank in self._ranks:
            rank.connection.close()
        if isinstance(self._exchange, GroupCollectives):
            self._exchange.close()
        for process in (rank.process for rank in self._ranks if rank.process):
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._shared is not None:
            self._shared.close()
        if self._store is not None:
            self._store.close()

    def _watch(self) -> None:
        """Lets no step wait for a rank that has ended, nor for ever for one that hangs."""
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
        if self._shared is not None:  # others see the end of its connections
            self._words[_ABORTED] = 1
        elif isinstance(self._exchange, NcclCollectives):
            self._exchange.close()
        self.on_failure()


def _shareable(layout: KvLayout, device: torch.device) -> SharedMemoryArea | CudaArea:
    if device.type == "cpu":
        return SharedMemoryArea(layout.num_bytes)
    return CudaArea(layout.num_bytes, device)


class _Other:
    """One of the other ranks, as the first one sees it. process: None on another host."""

    def __init__(
        self,
        number: int,
        connection: Channel,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.number, self.connection, self.process = number, connection, process

    @classmethod
    def started(cls, work: RankWork) -> _Other:
        """One on this host."""
        ours, theirs = Pipe()
        with theirs:
            inherited = [theirs.fileno()]
            if isinstance(work.exchange, int):
                inherited.append(work.exchange)
            command = [sys.executable, "-m", "baton.engine.rank", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=inherited)
        ours.send(work)
        return cls(work.shard.rank, ours, process)

    def limit_sending(self, limit_s: float) -> None:
        """What is sent must not wait for one that is stopped, whose buffer is full."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            timeout = struct.pack("ll", int(limit_s), 0)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def answer(self, timeout_s: float) -> Any:
        """What the rank says next. Raises ConfigError when it says nothing."""
        try:
            if self.connection.poll(timeout_s):
                return self.connection.recv()
            found = f"nothing came from it in {timeout_s:.0f} s"
        except (EOFError, OSError) as error:
            found = self._status() if self.process else str(error)
        raise ConfigError(f"rank {self.number} cannot begin: {found}")

    def _status(self) -> str:
        """Of a process whose connection has ended."""
        assert self.process is not None
        try:
            return f"it ended with status {self.process.wait(_STOP_S)}"
        except subprocess.TimeoutExpired:
            return "its connection ended, but it did not"

    def expect(self, answer: str, timeout_s: float) -> None:
        """Waits for it. Raises ConfigError with what the rank says instead."""
        if (found := self.answer(timeout_s)) != answer:
            raise ConfigError(f"rank {self.number} cannot begin: {found}, not {answer}")
