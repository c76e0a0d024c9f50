"""Baton serves large language models with prefill and decode on different workers.

    import baton

    with baton.Client("127.0.0.1:7700") as client:
        print(client.generate("def f(", max_tokens=32).text)

The SDK is loaded when it is first named, so that a process which needs another package
(`baton.errors`, `baton.engine`) does not pay for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from baton import errors

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client, Completion

__all__ = ["AsyncClient", "Client", "Completion", "errors"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("baton.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
