"""For every test: kernels are interpreted, whichever module imports triton first."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores: one thread each
    os.environ["OMP_NUM_THREADS"] = "1"

import tests.interpreted  # noqa: F401
