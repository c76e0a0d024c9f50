"""Before a worker serves: what is loaded and compiled, and where its KV pool lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, WorkerConfig
from baton.engine import build
from baton.errors import ConfigError
from baton.worker import process
from baton.worker.process import PoolMemory
from kvtransfer import copier
from kvtransfer.pool import KvPool
from kvtransfer.transports.shm import SharedMemoryArea

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(("role", "decodes"), [("prefill", False), ("decode", True)])
def test_loading_compiles_transfers_before_the_pool_is_used_and_decoding_only_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, role: str, decodes: bool
) -> None:
    calls: list[str] = []
    loaded: list[EngineConfig] = []

    def load(config: EngineConfig, allocate: Any) -> Any:
        loaded.append(config)
        pool = allocate(2 * 64).view(torch.float32).view(2, 1, 2, 1, 4, 2)
        return SimpleNamespace(runner=SimpleNamespace(pool=pool))

    def prepare(pool: KvPool) -> None:
        assert pool.area is memory.area
        calls.append("prepare")

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(build, "warm_up", lambda loaded: calls.append("warm up"))
    monkeypatch.setattr(copier, "prepare", prepare)
    memory = PoolMemory("auto")
    process._load(WorkerConfig(role, EngineConfig(device="cpu")), memory)
    memory.close()
    assert calls == ["prepare", "warm up"]
    assert [(one.graphs, one.overlap) for one in loaded] == [(decodes, decodes)]


class Area:
    """Memory of a GPU as others can open it, on a CPU."""

    made: list[tuple[int, torch.device]]

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        type(self).made.append((num_bytes, device))
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Area.made = []
    original = torch.zeros

    def zeros(*args: Any, device: torch.device = CPU, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs)

    monkeypatch.setattr(process, "CudaArea", Area)
    monkeypatch.setattr(torch, "zeros", zeros)


def refused(num_bytes: int, device: torch.device) -> Area:
    raise OSError("no driver")


def test_a_cpus_memory_is_shared_and_given_up() -> None:
    memory = PoolMemory("auto")
    tensor = memory.on(CPU)(4096)
    assert tensor.dtype == torch.uint8 and len(tensor) == 4096
    memory.touch()
    assert isinstance(memory.area, SharedMemoryArea)
    assert memory.area.touched
    assert tensor.data_ptr() == memory.area.tensor.data_ptr()
    memory.close()
    assert memory.area.fd < 0


@pytest.mark.parametrize("transport", ["auto", "cuda_ipc"])
def test_a_gpus_memory_is_shared_where_that_is_wanted(no_gpu: None, transport: str) -> None:
    memory = PoolMemory(transport)
    tensor = memory.on(GPU)(4096)
    assert Area.made == [(4096, GPU)]
    assert memory.area is not None
    assert tensor is memory.area.tensor
    memory.touch()
    memory.close()


@pytest.mark.parametrize("transport", ["nccl", "gloo", "shm"])
def test_otherwise_it_is_torchs(no_gpu: None, transport: str) -> None:
    memory = PoolMemory(transport)
    assert memory.on(GPU)(4096).tolist() == [0] * 4096
    assert memory.area is None
    assert Area.made == []


def test_a_gpu_that_cannot_share_serves_unless_it_must(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "CudaArea", refused)
    memory = PoolMemory("auto")
    assert len(memory.on(GPU)(64)) == 64
    assert memory.area is None
    assert "cannot write into this GPU's KV: no driver" in caplog.text
    with pytest.raises(ConfigError, match="--transport cuda_ipc: no driver"):
        PoolMemory("cuda_ipc").on(GPU)(64)
