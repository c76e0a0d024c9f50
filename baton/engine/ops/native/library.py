"""Compiles the C++ of `src/` on first use and loads it.

There is one library for each kind of CPU in `TARGETS`. It lies in the user's cache folder under a
key made of the sources and the compiler's options; an installation may bring libraries built
before, in `built/` (`python -m baton.engine.ops.native` makes them), and then needs no compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The library's OpenMP threads are to be torch's own: its libgomp has to be there first.
import torch  # noqa: F401

from baton.engine.ops.native.structures import declare
from baton.errors import ConfigError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
BUILT = Path(__file__).parent / "built"
COMPILER = "g++"
FLAGS = (
    *("-std=gnu++20", "-O3", "-ffp-contract=fast", "-fopenmp", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
BUILD_TIMEOUT_S = 300.0
TURN_TIMEOUT_S = 120.0  # to wait for another process that builds the same
PROGRESS_S = 2.0  # between two progress lines


@dataclass(frozen=True)
class Target:
    """A kind of CPU: what /proc/cpuinfo says of it, and what the compiler is told."""

    name: str
    cpu: frozenset[str]
    flags: tuple[str, ...]


_V3 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
TARGETS = (  # the best first
    Target(
        "avx512_bf16",
        _V4 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    ),
    Target("avx512", _V4, ("-march=x86-64-v4", "-mprefer-vector-width=512")),
    Target("avx2", _V3, ("-march=x86-64-v3",)),
)


class BuildFailed(Exception):
    """There is no native library here; the message says why."""


def load() -> ctypes.CDLL | None:
    """The library, or None where it cannot be had, which is told once."""
    try:
        return _loaded()
    except BuildFailed as error:
        _say_once(str(error))
        return None


def require() -> ctypes.CDLL:
    """The library. Raises ConfigError saying why it cannot be had."""
    try:
        return _loaded()
    except BuildFailed as error:
        raise ConfigError(
            f"--kernels native: {error}; install g++, or leave --kernels native out to compute "
            "with torch"
        ) from error


@functools.cache
def _say_once(reason: str) -> None:
    log.warning("computing with torch, which is several times slower: %s", reason)


def best_target() -> Target:
    """The first kind of CPU that this one is. Raises BuildFailed when it is none of them."""
    have = _cpu_flags()
    for target in TARGETS:
        if target.cpu <= have:
            return target
    raise BuildFailed("native kernels need an x86-64 CPU with AVX2 and FMA")


def load_target(target: Target) -> ctypes.CDLL:
    """The library for a kind of CPU, built if need be. Raises BuildFailed."""
    path = _built(target)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"{path} cannot be loaded: {error}") from error
    declare(library)
    return library


def build_all() -> list[Path]:
    """Builds for every kind of CPU into `built/`, for an installation that has no compiler."""
    BUILT.mkdir(exist_ok=True)
    paths = [BUILT / _file_name(target) for target in TARGETS]
    for target, path in zip(TARGETS, paths, strict=True):
        _compile(target, path)
    return paths


@functools.cache
def _loaded() -> ctypes.CDLL:
    return load_target(best_target())


def _built(target: Target) -> Path:
    name = _file_name(target)
    if (BUILT / name).exists():
        return BUILT / name
    folder = _cache_folder()
    path = folder / name
    if path.exists():
        return path
    with _turn(folder, TURN_TIMEOUT_S):
        if not path.exists():
            _compile(target, path)
    return path


def _compile(target: Target, path: Path) -> None:
    """Compiles the sources side by side and links them."""
    started = time.monotonic()
    # A warning, so that whoever waits for a first start sees what for.
    log.warning("compiling native kernels for %s, once: this takes some seconds", target.name)
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise BuildFailed(f"{COMPILER} is not installed")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in _sources()]
        _run_all(
            [
                [compiler, *FLAGS, *target.flags, "-c", str(source), "-o", str(result)]
                for source, result in zip(_sources(), objects, strict=True)
            ]
        )
        built = Path(folder) / path.name
        _run([compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(built)])
        built.rename(path)
    log.warning("compiled native kernels in %.1f s", time.monotonic() - started)


def _run_all(commands: Sequence[list[str]]) -> None:
    """Runs the commands side by side, and logs every few seconds how many have ended."""
    started = time.monotonic()
    with ThreadPoolExecutor(len(commands)) as pool:
        left = {pool.submit(_run, command) for command in commands}
        while left:
            done, left = wait(left, PROGRESS_S, FIRST_EXCEPTION)
            for ended in done:
                ended.result()
            if left:
                log.warning(
                    "compiling native kernels: %d of %d files after %.0f s",
                    len(commands) - len(left), len(commands), time.monotonic() - started,
                )  # fmt: skip


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise BuildFailed(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not finish: {error}") from error


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _file_name(target: Target) -> str:
    """Changes with everything that the library's code depends on."""
    digest = hashlib.sha256(" ".join((COMPILER, *FLAGS, *target.flags)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{target.name}-{digest.hexdigest()[:16]}.so"


def _cpu_flags() -> set[str]:
    """What this CPU can do, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return set(next(flags, "").split())


def _cache_folder() -> Path:
    """The user's cache, or a folder of this user's own where there is none to write to."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for folder in (
        Path(root) / "baton" / "native",
        Path(tempfile.gettempdir()) / f"baton-native-{os.getuid()}",
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    raise BuildFailed("no folder to build in: set XDG_CACHE_HOME to one that can be written")


@contextmanager
def _turn(folder: Path, timeout_s: float) -> Iterator[None]:
    """One process at a time, so that workers which start together build once.

    Nobody waits longer for one that was stopped: to build twice costs time and nothing else.
    """
    with (folder / "lock").open("w") as file:
        held = threading.Event()

        def wait() -> None:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go as soon as the file is closed
            held.set()

        threading.Thread(target=wait, name="build-turn", daemon=True).start()
        if not held.wait(timeout_s):
            log.warning("another process has been compiling for %.0f s: doing it, too", timeout_s)
        yield
