"""What a GPU computes, run on CPU tensors by Triton's interpreter."""

import pytest

import tests.interpreted  # noqa: F401  (before any test imports a kernel)
from baton.engine.backends.gpu import cuda_graphs


@pytest.fixture
def few_rows(monkeypatch):
    """Chunks of captured steps have 8 or 16 rows, of four sequences: the interpreter is slow."""
    monkeypatch.setattr(cuda_graphs, "MAX_CHUNKS", 4)
    monkeypatch.setattr(cuda_graphs, "CHUNK_SIZES", (8, 16))
