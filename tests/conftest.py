"""For every test: kernels are interpreted, whichever module imports triton first."""

from __future__ import annotations

import tests.interpreted  # noqa: F401
