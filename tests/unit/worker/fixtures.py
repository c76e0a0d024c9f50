"""What every worker test needs: a tiny checkpoint, an empty registry, a decode worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.registry.memory import MemoryStore
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.worker.running import Router, Worker


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "LlamaForCausalLM", tokenizer=True)
    return path


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def decode(directory: Path, store: MemoryStore) -> AsyncIterator[Worker]:
    async with Worker("decode", directory, store) as worker:
        yield worker


@pytest.fixture
async def router(decode: Worker) -> AsyncIterator[Router]:
    """A router's stream; after the test the decode worker holds nothing."""
    async with Router(decode) as router:
        yield router
        assert await decode.clean()
