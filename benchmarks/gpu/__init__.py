"""What the GPU path computes, and how fast: kernels, engine and cluster on this machine's GPU.

Only the cluster needs more than Python, torch, triton, numpy and safetensors. The engine's and the
transports' modules name protobuf's messages, grammars of structured output and xxhash, which
kernels, steps and copies between GPUs do not use: where those cannot be imported, a module whose
names are only names takes their place.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn


class _Absent(ModuleType):
    def __init__(self, name: str, reason: Exception) -> None:
        super().__init__(name)
        self._reason = reason

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: object, **__: object) -> NoReturn:
            raise ImportError(f"no {self.__name__}.{name}: {self._reason}") from self._reason

        return absent


def stand_in(name: str) -> None:
    """Puts a module of names where an import fails."""
    try:
        importlib.import_module(name)
    except Exception as error:  # protobuf refuses messages of a newer one with errors of its own
        sys.modules[name] = _Absent(name, error)


for _name in ("baton.v1.common_pb2", "baton.generation.structured_output", "xxhash"):
    stand_in(_name)
