"""Kernels are interpreted here, on the CPU: set before the first of them is imported."""

from __future__ import annotations

import tests.interpreted  # noqa: F401
