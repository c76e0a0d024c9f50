"""What several modules' tests of engines share."""

import pytest

from baton.engine import tensor_parallel
from baton.engine.backends.gpu import backend
from tests.unit.engine.checkpoints import make_checkpoint
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def patient_ranks(monkeypatch):
    """Ranks that share busy cores are late, not hung."""
    for module in (tensor_parallel, backend):
        monkeypatch.setattr(module, "RANK_TIMEOUT_S", WAIT_S)


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A small Llama's."""
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path)
    return path
