"""Starts a server on the cores of this process, says where it serves, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local import ports
from baton.local.cluster import LocalCluster
from benchmarks.candidates.llama_cpp_files import module_argv
from benchmarks.engine.candidates import PAGE, Rivals
from benchmarks.engine.conversation import Failed, Missing, ending
from benchmarks.machine import cores
from benchmarks.shapes import Shape

_READY_S, _END_S, _ASK_EVERY_S = 600.0, 20.0, 0.5
_MOST_CONTEXT = 4096
_SLOTS = 16
_EVERY_PROMPT = 1 << 20  # longer than any: decode computes all of them itself
_IDLE_BLOCKS = 64


@dataclass(frozen=True)
class Place:
    """What every server is started with."""

    shape: Shape
    directory: Path
    rivals: Rivals
    log: Path
    engine: EngineConfig  # Baton's


Start = Callable[[Place], AbstractAsyncContextManager[str]]  # gives the URL


def baton_1p1d(place: Place) -> AbstractAsyncContextManager[str]:
    """Baton as `baton up` starts it: a prefill and a decode worker that share the cores."""
    return _cluster(ClusterConfig(engine=place.engine, port=0, trace_sample=0.0), {})


def baton_aggregated(place: Place) -> AbstractAsyncContextManager[str]:
    """Baton with one engine on all cores: its decode worker computes prompts in chunks itself.

    The router pairs workers, so there is a prefill worker too, with a small cache: it gets nothing
    to do, and takes memory only.
    """
    cpus = cores()
    limits = RouterLimits(local_prefill_max_tokens=_EVERY_PROMPT)
    config = ClusterConfig(engine=place.engine, limits=limits, port=0, trace_sample=0.0)
    pinned = ("--cpus", ",".join(map(str, cpus)))
    extra = {
        "decode": ("--threads", str(len(cpus)), *pinned),
        "prefill": ("--threads", "1", "--kv-blocks", str(_IDLE_BLOCKS), *pinned),
    }
    return _cluster(config, extra)


@asynccontextmanager
async def vllm(place: Place) -> AsyncIterator[str]:
    """vLLM's OpenAI server, its defaults where nothing is said here."""
    (port,) = ports.consecutive("127.0.0.1", 0, 1)
    python = place.rivals.python
    _need(python, "vllm")
    argv = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(place.directory), "--dtype", "bfloat16"),
        *("--max-model-len", str(_MOST_CONTEXT)),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LD_PRELOAD": ":".join(place.rivals.preload),
    }
    async with _program(argv, env, port, place.log) as url:
        yield url


@asynccontextmanager
async def llama_server(place: Place) -> AsyncIterator[str]:
    """llama.cpp's server with bf16 weights and a slot for each request in flight."""
    folder, python = place.rivals.llama_cpp, place.rivals.python
    if folder is None or not (folder / "llama-server").is_file():
        raise Missing("no llama-server in the directory that --llama-cpp names")
    file = place.directory / "bf16.gguf"
    if not file.exists():
        _need(python, "gguf")
        argv = module_argv(python, place.directory, place.shape.name, "bf16", file)
        await asyncio.to_thread(subprocess.run, argv, check=True)
    (port,) = ports.consecutive("127.0.0.1", 0, 1)
    threads = str(len(cores()))
    argv = [
        str(folder / "llama-server"),
        *("--model", str(file), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads),
        *("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _MOST_CONTEXT)),
    ]
    async with _program(argv, {}, port, place.log) as url:
        yield url


SERVERS: Mapping[str, Start] = {
    "baton-1p1d": baton_1p1d,
    "baton-aggregated": baton_aggregated,
    "vllm": vllm,
    "llama-server": llama_server,
}
# They close connections after a streamed answer without saying so in its head.
CLOSING = frozenset({"llama-server"})


@asynccontextmanager
async def _cluster(config: ClusterConfig, extra: Mapping[str, Sequence[str]]) -> AsyncIterator[str]:
    (port,) = ports.consecutive("127.0.0.1", 0, 1)
    config = ClusterConfig(**{**config.__dict__, "http_port": port})
    async with LocalCluster(config, extra_args=extra, start_timeout_s=_READY_S) as cluster:
        yield f"http://{cluster.http_addresses[0]}"


@asynccontextmanager
async def _program(
    argv: Sequence[str], env: Mapping[str, str], port: int, log: Path
) -> AsyncIterator[str]:
    """Runs a server and waits until it names its models."""
    url = f"http://127.0.0.1:{port}"
    process = _spawned(argv, env, log)
    try:
        await _until_ready(process, url, log)
        yield url
    finally:
        await asyncio.to_thread(_end, process)


def _spawned(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The leader of a session, so that whatever it starts can be ended with it."""
    with log.open("wb") as out:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


async def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _READY_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise Failed(ending(process.returncode, log))
            # llama-server names models before it has loaded one: it says so on /health.
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_ASK_EVERY_S)
    raise Failed(f"not ready after {_READY_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and whatever it started: they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _need(python: str, module: str) -> None:
    """Raises Missing where an interpreter does not have a module."""
    ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", ask], check=False).returncode:
        which = "" if python != sys.executable else " (--rivals names no environment)"
        raise Missing(f"no module {module}{which}; {PAGE} tells how to install it")
