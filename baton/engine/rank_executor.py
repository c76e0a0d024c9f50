"""What a rank of a tensor-parallel worker other than the first does: its commands, carried out.

The first rank (`tensor_parallel.py`) sends a command for whatever it begins itself; every other
rank carries them out in order over its shard of the model. All messages are in `MESSAGES`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.cuda import CudaDriver
from baton.engine.adapters import LoraAdapter, Update
from baton.engine.batch import Ints, StepBatch, on_device
from baton.engine.checkpoint.tensor_headers import fingerprint
from baton.engine.collectives import (
    JOIN_TIMEOUT_S,
    GlooCollectives,
    GroupCollectives,
    NcclCollectives,
)
from baton.engine.cpu_affinity import pin_thread
from baton.engine.models.lora import empty_update
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.shard import Shard
from baton.engine.models.weight_loader import random_seed
from baton.engine.runner import zero_blocks
from baton.errors import BatonError
from baton.net.object_connection import ObjectConnection
from baton.rendezvous import Place

Exchange: TypeAlias = int | GroupCollectives
"""What joins ranks: the address of memory that they share, or a process group."""

# Settings that a rank takes from its own host; all others come from the first rank.
HOST_SETTINGS = frozenset(
    ("model", "random_weights", "device", "threads", "cpus", "nice", "gpu_memory")
)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
}


def name_of(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """torch.float32 for "float32"."""
    return _DTYPES[name]


@dataclass(frozen=True)
class LoadShard:
    """To a rank on another host: load this shard of the host's copy of the model.

    settings: fields of `EngineConfig` that all hosts have in common · max_context: tokens ·
    shard: fields of a `Shard` · store: host, port and secret (hex) of the group's store ·
    timeout_s: limit for a collective.
    """

    settings: dict[str, Any]
    max_context: int
    dtype: str
    shard: Sequence[Any]
    store: Sequence[Any]
    timeout_s: float


@dataclass(frozen=True)
class JoinGroup:
    """Every rank has loaded: build the process group, if ranks have one."""


@dataclass(frozen=True)
class AttachPool:
    """Map this rank's KV pool; a descriptor of its `num_bytes` follows on the connection."""

    shape: Sequence[int]
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class AllocatePool:
    """Allocate this rank's KV pool, on a host where the first rank cannot."""

    shape: Sequence[int]
    dtype: str


@dataclass(frozen=True)
class ZeroBlocks:
    """Zero blocks of a pool that this rank allocated."""

    blocks: list[int]


@dataclass(frozen=True)
class RunStep:
    """Compute a step. tensors: the batch's, by the name of `StepBatch`'s field."""

    tensors: dict[str, Ints]
    num_decodes: int

    @classmethod
    def from_batch(cls, batch: StepBatch) -> RunStep:
        """The command for a batch that the first rank is about to compute."""
        tensors = {
            name: value.cpu().numpy()
            for name, value in vars(batch).items()
            if isinstance(value, Tensor)
        }
        return cls(tensors, batch.num_decodes)

    def batch(self, device: torch.device) -> StepBatch:
        """The batch, on the device of a rank."""
        fields: dict[str, Any] = {
            name: on_device(array, device) for name, array in self.tensors.items()
        }
        return StepBatch(**fields, num_decodes=self.num_decodes)


@dataclass(frozen=True)
class WriteLora:
    """Write an adapter of the unsharded model to a slot.

    places: layer and field of each update · updates: A and B of each, float32 as int32, flat.
    """

    slot: int
    rank: int
    places: Sequence[Sequence[Any]]
    updates: Sequence[Ints]

    @classmethod
    def from_adapter(cls, slot: int, adapter: LoraAdapter) -> WriteLora:
        """The command for an adapter that the first rank is about to write."""
        flat = [
            part.contiguous().view(torch.int32).flatten().numpy()
            for update in adapter.updates.values()
            for part in update
        ]
        return cls(slot, adapter.rank, list(adapter.updates), flat)

    def adapter(self, config: ModelConfig) -> LoraAdapter:
        """The adapter, of the unsharded model's shapes."""
        parts = (torch.from_numpy(array.copy()).view(torch.float32) for array in self.updates)
        updates = dict[tuple[int, str], Update]()
        for layer, field in self.places:
            a, b = empty_update(config, layer, field, self.rank)
            updates[layer, field] = next(parts).view(a.shape), next(parts).view(b.shape)
        return LoraAdapter("", self.rank, updates)


@dataclass(frozen=True)
class MeasureMemory:
    """GPU: start a profile run over a pool of this shape and type."""

    shape: Sequence[int]
    dtype: str


@dataclass(frozen=True)
class ReportMemory:
    """GPU: answer with `MemoryReport`. graph_bytes: reserved for CUDA graphs."""

    graph_bytes: int


@dataclass(frozen=True)
class PrepareGraphs:
    """GPU: prepare padded steps over the pool, of sequences up to `max_context` tokens."""

    max_context: int


@dataclass(frozen=True)
class CaptureGraphs:
    """GPU: capture all CUDA graphs."""


@dataclass(frozen=True)
class ReplayStep:
    """GPU: run a padded step of this `StepShape`; its inputs are broadcast by the first rank."""

    shape: Sequence[int]


@dataclass(frozen=True)
class Loaded:
    """Answer once a shard is loaded. identity: of the checkpoint, equal on all ranks."""

    identity: str


@dataclass(frozen=True)
class Ready:
    """Answer to a command that has been carried out."""


@dataclass(frozen=True)
class MemoryReport:
    """Answer to `ReportMemory`: the GPU's name, and the fields of a `memory.MemoryProfile`."""

    gpu: str
    usage: Sequence[int]


@dataclass(frozen=True)
class Failed:
    """Answer to what could not be done."""

    reason: str


MESSAGES = (
    LoadShard, JoinGroup, AttachPool, AllocatePool, ZeroBlocks, RunStep, WriteLora, MeasureMemory,
    ReportMemory, PrepareGraphs, CaptureGraphs, ReplayStep, Loaded, Ready, MemoryReport, Failed,
)  # fmt: skip


@dataclass(frozen=True)
class RemoteRanks:
    """Connections to the ranks on other hosts, whose numbers follow those of this host.

    host: this host's address, for them.
    """

    host: str = "127.0.0.1"
    connections: Sequence[ObjectConnection] = ()


class RankBackend(Protocol):
    """What ranks need of `backends.Backend`, which imports this module."""

    settings: EngineConfig
    device: torch.device
    shares_pool: bool
    remote_ranks: RemoteRanks

    def shard_model(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, shard: Shard, exchange: Exchange
    ) -> Any: ...

    def executor(self, model: Any, connection: ObjectConnection) -> RankExecutor: ...

    def for_rank(self, place: Shard) -> RankBackend: ...


@dataclass(frozen=True)
class RankWork:
    """What a rank starts with.

    backend, path, host: of the rank's own host · exchange: descriptor of memory that ranks share,
    or the store of their process group · timeout_s: limit for a collective.
    """

    backend: RankBackend
    path: Path
    config: ModelConfig
    dtype: torch.dtype
    shard: Shard
    exchange: int | Place
    host: str
    timeout_s: float
    log_level: int

    def connect(self, shared: Tensor | None) -> Exchange:
        """What joins this rank to the others. shared: the memory that they share, mapped.

        Raises RuntimeError.
        """
        if shared is not None:
            return shared.data_ptr()
        assert isinstance(self.exchange, Place)
        kind = NcclCollectives if self.backend.device.type == "cuda" else GlooCollectives
        store = self.exchange.connect(JOIN_TIMEOUT_S)
        return kind(self.shard, store, self.host, self.timeout_s)

    def load(self, exchange: Exchange) -> Any:
        """This rank's shard of the model. Raises ConfigError, CheckpointError."""
        return self.backend.shard_model(self.path, self.config, self.dtype, self.shard, exchange)

    def on_another_host(self, shard: Shard) -> LoadShard:
        """The command by which a rank there makes its own `RankWork`."""
        assert isinstance(self.exchange, Place)
        settings = vars(self.backend.settings).items()
        return LoadShard(
            settings={name: value for name, value in settings if name not in HOST_SETTINGS},
            max_context=self.config.max_context,
            dtype=name_of(self.dtype),
            shard=astuple(shard),
            store=(self.exchange.host, self.exchange.port, self.exchange.secret.hex()),
            timeout_s=self.timeout_s,
        )

    @property
    def identity(self) -> str:
        """Identifies the checkpoint, which must be the same on all ranks."""
        settings = self.backend.settings
        seed = random_seed(settings, torch.device("cpu"))
        return f"model {fingerprint(self.path, seed)}"


class RankExecutor:
    """Carries out commands over one rank's shard and KV pool."""

    pool: Tensor
    on_pool_allocated: Callable[[Tensor], None]

    def __init__(self, device: torch.device, model: Any, connection: ObjectConnection) -> None:
        self.device, self.model, self.connection = device, model, connection

    def execute(self, command: Any) -> None:
        """Raises OSError when the connection ends, RunnerFailed when a step fails."""
        match command:
            case RunStep():
                self.run_step(command)
            case AttachPool():
                self._attach(command)
            case AllocatePool():
                self._allocate(command)
            case WriteLora():
                self.write_lora(command)
            case ZeroBlocks(blocks):
                self.zero_blocks(blocks)
            case _:
                raise ConnectionError(f"a rank on {self.device} does not do {command}")

    def run_step(self, command: RunStep) -> None:
        """Computes this rank's shard of a step."""
        self.model.step(command.batch(self.device), self.pool)

    def write_lora(self, command: WriteLora) -> None:
        """Writes this rank's part of an adapter."""
        self.model.write_lora(command.slot, command.adapter(self.model.lora.config))

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zeroes blocks and answers when that is done."""
        zero_blocks(self.pool, blocks)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.connection.send(Ready())

    def close(self) -> None:
        """Frees what the executor keeps; no command follows."""

    def _attach(self, command: AttachPool) -> None:
        dtype, descriptor = dtype_named(command.dtype), self.connection.recv_descriptor()
        shape = torch.Size(command.shape)
        if self.device.type == "cpu":
            memory = mapped(descriptor)
        else:
            driver = CudaDriver()
            address = driver.open(self.device, descriptor, command.num_bytes)
            memory = driver.view(address, shape.numel() * dtype.itemsize)
            os.close(descriptor)
        self.pool = memory.view(dtype).view(shape)
        self.connection.send(Ready())

    def _allocate(self, command: AllocatePool) -> None:
        try:
            dtype = dtype_named(command.dtype)
            self.pool = torch.zeros(*command.shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            self.connection.send(Failed(f"no memory for its KV: {error}"))
            return
        self.on_pool_allocated(self.pool)
        self.connection.send(Ready())


def serve(
    connection: ObjectConnection,
    work: RankWork,
    on_pool_allocated: Callable[[Tensor], None] = lambda pool: None,
) -> None:
    """Loads a rank's shard and carries out commands until the connection ends, by EOFError.

    on_pool_allocated: called with the KV pool that this process allocates.
    """
    backend, settings = work.backend, work.backend.settings
    pin_thread(settings.cpus, settings.nice)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    shared = mapped(work.exchange) if isinstance(work.exchange, int) else None
    try:
        exchange = work.connect(shared)
        model = work.load(exchange)
        connection.send(Loaded(work.identity))
    except (BatonError, OSError, RuntimeError) as error:
        connection.send(Failed(str(error)))
        return
    group = exchange if isinstance(exchange, GroupCollectives) else None
    executor = backend.executor(model, connection)
    executor.on_pool_allocated = on_pool_allocated
    try:
        connection.recv()  # JoinGroup: all have loaded
        if group is not None:
            group.join(backend.device)
        while True:
            executor.execute(connection.recv())
    finally:
        executor.close()
        if group is not None:
            group.close()  # kernels on a GPU may wait for other ranks


def mapped(descriptor: int) -> Tensor:
    """All bytes of shared memory; closes its descriptor."""
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
