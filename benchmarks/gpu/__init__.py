"""`make gpu`: correctness and speed of kernels, engine and cluster on this machine's GPU.

Only the cluster needs more than Python, torch, triton, numpy and safetensors. Modules of the engine
and the transports import protobuf messages, grammars and xxhash, which the other parts do not use:
if one cannot be imported, a stand-in module takes its place, whose functions raise ImportError.
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
    """Replaces a module that cannot be imported by a stand-in."""
    try:
        importlib.import_module(name)
    except Exception as error:  # protobuf raises an error of its own for newer generated code
        sys.modules[name] = _Absent(name, error)


for _name in ("baton.v1.common_pb2", "baton.generation.structured_output", "xxhash"):
    stand_in(_name)
