"""Dynamo's frontend and mock workers, as something to compare a router's cost with.

An environment for them, without torch: `pip install --no-deps ai-dynamo ai-dynamo-runtime`, then
what they import: `aiohttp msgspec prometheus-client pydantic pyzmq transformers uvloop zstandard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from baton.config import model_path
from baton.local import ports
from baton.local.process import ChildProcess
from benchmarks.child import Failed

_START_S, _STOP_S, _POLL_S = 90.0, 5.0, 0.5
_MODEL = "demo"
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


@asynccontextmanager
async def dynamo(venv: Path) -> AsyncIterator[tuple[str, dict[str, int]]]:
    """host:port of its HTTP API and process ids, named as a cluster's. Raises Failed.

    The frontend routes by prefix caches and load (`--router-mode kv`), to a prefill and a decode
    worker that take no time and cache nothing.
    """
    address, python = f"127.0.0.1:{ports.free()}", str(venv / "bin" / "python")
    frontend = ("--http-host", "127.0.0.1", "--http-port", address.rpartition(":")[2])
    mocker = ("--model-path", str(model_path(_MODEL)), "--model-name", _MODEL)
    instant = (*mocker, "--speedup-ratio", "1e6", "--no-enable-prefix-caching")
    modes = {role: ("--disaggregation-mode", role) for role in ("prefill", "decode")}
    argv = {
        "router": ("frontend", *frontend, "--router-mode", "kv"),
        "prefill-0": (
            "mocker",
            *instant,
            *modes["prefill"],
            "--bootstrap-ports",
            str(ports.free()),
        ),
        "decode-0": ("mocker", *instant, *modes["decode"]),
    }
    with tempfile.TemporaryDirectory(prefix="dynamo-") as store:
        env = {"DYN_FILE_KV": store, "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
        processes = {
            name: ChildProcess(
                name, name, [python, "-m", f"dynamo.{module}", *options, *_PLANES], env
            )
            for name, (module, *options) in argv.items()
        }
        try:
            for process in processes.values():
                await process.start()
            while not await _is_complete(address):
                for process in processes.values():
                    if process.exit_status is not None or process.age_s > _START_S:
                        raise Failed(f"dynamo does not start: {process.log_tail(5)}")
                await asyncio.sleep(_POLL_S)
            yield address, {name: process.pid for name, process in processes.items()}
        finally:
            await asyncio.gather(*(p.stop(_STOP_S) for p in processes.values() if p.pid))


async def _is_complete(address: str) -> bool:
    """Whether the frontend sees both workers."""
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.request("GET", f"http://{address}/health") as response:
            return len((await response.json())["instances"]) == 2
    return False
