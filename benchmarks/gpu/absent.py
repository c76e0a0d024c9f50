"""Stand-ins for two packages that a machine with a GPU may lack and no measurement here calls.

The engine's and the transports' modules name protobuf's messages and xxhash; kernels, steps and
copies between GPUs use neither. So that their modules can be imported without them, a name of an
absent one is a name and nothing else: whoever would call it fails.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType

_MESSAGES, _HASH = "baton.v1.common_pb2", "xxhash"


@dataclass(frozen=True)
class Name:
    """Something that is not here."""

    text: str


class Absent(ModuleType):
    """A module that has every name, and nothing behind it."""

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self.__name__}.{name}")


def stand_in() -> tuple[str, ...]:
    """Puts stand-ins where imports fail; which they are for. Before anything of Baton's."""
    return tuple(name for name in (_MESSAGES, _HASH) if not _is_there(name))


def _is_there(name: str) -> bool:
    try:
        return not isinstance(importlib.import_module(name), Absent)
    except Exception:  # protobuf refuses messages of a newer one with errors of its own
        sys.modules[name] = Absent(name)
        return False
