"""What a worker does before its event loop has other duties."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, WorkerConfig
from baton.engine import build
from baton.worker import process
from baton.worker.process import PoolMemory
from kvtransfer import copier
from kvtransfer.pool import KvPool


def test_kernels_of_transfers_are_compiled_while_loading_and_before_the_pool_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    def load(config: EngineConfig, allocate: Any) -> Any:
        pool = allocate(2 * 64).view(torch.float32).view(2, 1, 2, 1, 4, 2)
        return SimpleNamespace(runner=SimpleNamespace(pool=pool))

    def prepare(pool: KvPool) -> None:
        assert pool.area is memory.area
        told.append("prepare")

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(build, "warm_up", lambda loaded: told.append("warm up"))
    monkeypatch.setattr(copier, "prepare", prepare)
    memory = PoolMemory("auto")
    process._load(WorkerConfig("decode", EngineConfig(device="cpu")), memory)
    memory.close()
    assert told == ["prepare", "warm up"]


@pytest.mark.parametrize(("role", "decodes"), [("prefill", False), ("decode", True)])
def test_only_who_decodes_is_prepared_for_it(
    monkeypatch: pytest.MonkeyPatch, role: str, decodes: bool
) -> None:
    asked: list[EngineConfig] = []

    def load(config: EngineConfig, allocate: Any) -> Any:
        asked.append(config)
        pool = allocate(64).view(torch.float32).view(1, 1, 2, 1, 4, 2)
        return SimpleNamespace(runner=SimpleNamespace(pool=pool))

    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(build, "warm_up", lambda loaded: None)
    memory = PoolMemory("auto")
    process._load(WorkerConfig(role, EngineConfig(device="cpu")), memory)
    memory.close()
    assert [(one.graphs, one.overlap) for one in asked] == [(decodes, decodes)]
