"""Compiles the C++ of `src/` on first use and loads it.

There is one library for each CPU in `TARGETS` and each type of activations in `DEFINES`, so that a
first start compiles only what it runs. Libraries are kept in the user's cache folder, by a hash of
sources and compiler options. An installation may have them in `built/`
(`python -m baton.engine.kernels.native.library` builds them), and then needs no compiler.

The variable BATON_CPU overrides the choice of the target, to time or test that of an older CPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Loads torch's libgomp, which the library must use, first.
import torch

from baton.engine.kernels.native.interface import declare
from baton.errors import ConfigError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
BUILT = Path(__file__).parent / "built"
COMPILER = "g++"
FLAGS = (
    *("-std=gnu++20", "-O3", "-ffp-contract=fast", "-fopenmp", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
DEFINES = {torch.float32: (), torch.bfloat16: ("-DBATON_BF16",)}  # by the type of activations
BUILD_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 120.0  # of waiting for another process that builds the same library


@dataclass(frozen=True)
class Target:
    """A kind of CPU. cpu: flags in /proc/cpuinfo · flags: compiler options."""

    name: str
    cpu: frozenset[str]
    flags: tuple[str, ...]
    machine: str = "x86_64"


_V3 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEON = frozenset({"asimd"})
TARGETS = (  # the best first
    Target(
        "avx512_bf16",
        _V4 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    ),
    Target("avx512", _V4, ("-march=x86-64-v4", "-mprefer-vector-width=512")),
    Target("avx2", _V3, ("-march=x86-64-v3",)),
    Target("neon_bf16", _NEON | {"bf16", "i8mm"}, ("-march=armv8.2-a+bf16+i8mm",), "aarch64"),
    Target("neon", _NEON, ("-march=armv8-a",), "aarch64"),
)


CPU_VARIABLE = "BATON_CPU"


class BuildFailed(Exception):
    """No native library can be loaded or built; the message gives the reason."""


@functools.cache
def load(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The library for activations of `dtype`; None, with one warning, if there is none.

    Raises ConfigError for a BATON_CPU that this machine cannot run.
    """
    try:
        return load_target(best_target(), dtype)
    except BuildFailed as error:
        log.warning("computing with torch, which is several times slower: %s", error)
        return None


def require(dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """The library for activations of `dtype`. Raises ConfigError if there is none."""
    try:
        return load_target(best_target(), dtype)
    except BuildFailed as error:
        raise ConfigError(
            f"--kernels native: {error}; install g++, or leave --kernels native out to compute "
            "with torch"
        ) from error


def best_target() -> Target:
    """The target that BATON_CPU names, else the first that this CPU can run.

    Raises BuildFailed if it can run none, and ConfigError if it cannot run the named one.
    """
    have = _cpu_flags()
    usable = {target.name: target for target in TARGETS if target.cpu <= have}
    asked = os.environ.get(CPU_VARIABLE)
    if asked and asked not in usable:
        raise ConfigError(
            f"{CPU_VARIABLE}={asked}: this machine can use {', '.join(usable) or 'none'}; name one "
            "of them, or leave the variable out for the best"
        )
    if not usable:
        raise BuildFailed(
            "native kernels need an x86-64 CPU with AVX2 and FMA, or a 64-bit ARM CPU"
        )
    return usable[asked] if asked else next(iter(usable.values()))


@functools.cache
def load_target(target: Target, dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """The library for a target, built if necessary. Raises BuildFailed."""
    path = _built(target, dtype)
    try:
        return declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise BuildFailed(f"{path} cannot be loaded: {error}") from error


def build_all() -> list[Path]:
    """Builds all targets of this machine's architecture into `built/`."""
    BUILT.mkdir(exist_ok=True)
    paths = []
    here = [target for target in TARGETS if target.machine == platform.machine()]
    for target, dtype in itertools.product(here, DEFINES):
        paths.append(BUILT / _file_name(target, dtype))
        _compile(target, dtype, paths[-1])
    return paths


def _built(target: Target, dtype: torch.dtype) -> Path:
    name = _file_name(target, dtype)
    if (BUILT / name).exists():
        return BUILT / name
    folder = _cache_folder()
    path = folder / name
    if path.exists():
        return path
    with _lock(folder):
        if not path.exists():
            _compile(target, dtype, path)
    return path


def _compile(target: Target, dtype: torch.dtype, path: Path) -> None:
    """Compiles the sources in parallel, and links them."""
    started = time.monotonic()
    # Warnings, because processes of a local cluster show no info messages.
    log.warning("compiling native CPU kernels (%s): this happens once, takes seconds", path.stem)
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise BuildFailed(f"{COMPILER} is not installed")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        flags = (*FLAGS, *target.flags, *DEFINES[dtype])
        jobs = [
            pool.submit(_run, compiler, *flags, "-c", str(source), "-o", made)
            for source, made in zip(sources, objects, strict=True)
        ]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            log.warning(
                "compiling native CPU kernels: %d of %d files after %.0f s",
                done, len(jobs), time.monotonic() - started,
            )  # fmt: skip
        linked = Path(folder) / path.name
        _run(compiler, "-shared", "-fopenmp", *objects, "-o", str(linked))
        linked.rename(path)
    log.warning(
        "compiled native CPU kernels in %.1f s, kept as %s", time.monotonic() - started, path
    )


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise BuildFailed(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not finish: {error}") from error


def _file_name(target: Target, dtype: torch.dtype) -> str:
    """The library's file name, with a hash of all that its code depends on."""
    options = (COMPILER, *FLAGS, *target.flags, *DEFINES[dtype])
    digest = hashlib.sha256(" ".join(options).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    activations = str(dtype).removeprefix("torch.")
    return f"{target.name}-{activations}-{digest.hexdigest()[:16]}.so"


def _cpu_flags() -> set[str]:
    """This CPU's flags in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise BuildFailed(f"this CPU is unknown: {error}") from error
    names = ("flags", "Features")  # on x86, on ARM
    flags = (line.partition(":")[2] for line in lines if line.startswith(names))
    return set(next(flags, "").split())


def _cache_folder() -> Path:
    """The user's cache folder, or a private temporary folder if that cannot be written to."""
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
def _lock(folder: Path) -> Iterator[None]:
    """Lets one process build at a time, so that workers that start together build once.

    After LOCK_TIMEOUT_S it builds anyway: the other may hang, and building twice is harmless.
    """
    with (folder / "lock").open("w") as file:
        held = threading.Event()

        def wait() -> None:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            held.set()

        threading.Thread(target=wait, name="build-lock", daemon=True).start()
        if not held.wait(LOCK_TIMEOUT_S):
            log.warning(
                "another process has been compiling for %.0f s: compiling here, too", LOCK_TIMEOUT_S
            )
        yield


if __name__ == "__main__":  # for all targets, as image builds do
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_all()
