"""Native kernels of every kind of CPU that this one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.engine.kernels.native import library
from tests.unit.engine.small_models import require


@pytest.fixture(
    scope="module",
    params=[target.name for target in library.TARGETS if target.cpu <= library._cpu_flags()],
)
def every_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests with each target's library."""
    require("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.CPU_VARIABLE, request.param)
        library.load.cache_clear()
        yield
    library.load.cache_clear()
