"""What several modules' tests of engines share."""

import pytest

from tests.unit.engine.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A small Llama's."""
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path)
    return path
