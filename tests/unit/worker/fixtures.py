"""What every worker test needs: a tiny checkpoint, and an empty registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.registry.memory import MemoryStore
from tests.unit.engine.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "LlamaForCausalLM", tokenizer=True)
    return path


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
