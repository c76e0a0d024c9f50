"""What the GPU path computes, and how fast: kernels, engine and cluster on this machine's GPU.

Only the cluster needs more than Python, torch, triton, numpy and safetensors. The engine's and the
transports' modules name protobuf's messages and xxhash, which kernels, steps and copies between
GPUs do not use: where those cannot be imported, stand-ins take their place. A name of a stand-in is
a name and nothing else; what calls it fails.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType

OPTIONAL = ("baton.v1.common_pb2", "xxhash")


@dataclass(frozen=True)
class Name:
    """Something that is not installed."""

    text: str


class Absent(ModuleType):
    """A module that has every name, and nothing behind it."""

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self.__name__}.{name}")


def stand_in(name: str) -> None:
    """Puts a stand-in where an import fails."""
    try:
        importlib.import_module(name)
    except Exception:  # protobuf refuses messages of a newer one with errors of its own
        sys.modules[name] = Absent(name)


for _name in OPTIONAL:
    stand_in(_name)
