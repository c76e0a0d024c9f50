"""What a GPU computes, run on CPU tensors by Triton's interpreter."""

import pytest

import tests.interpreted  # noqa: F401  (before any test imports a kernel)
from baton.engine.backends.gpu import cuda_graphs
from tests.unit.engine.gpu.fake_gpu import FEW_ROWS


@pytest.fixture
def few_rows(monkeypatch):
    """Chunks of captured steps have 8 or 16 rows, of four sequences: the interpreter is slow."""
    for name, value in zip(("MAX_CHUNKS", "CHUNK_SIZES"), FEW_ROWS, strict=True):
        monkeypatch.setattr(cuda_graphs, name, value)
