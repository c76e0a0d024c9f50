"""Looks at the machine that it runs on: what a cluster, or a worker, would have here.

Imports no torch: it must tell what is missing where torch is what is missing.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from baton import config
from baton.errors import ConfigError
from baton.local import etcd, ports
from baton.local.doctor.finding import Finding, fail, ok, warn

LEAST_PYTHON = (3, 11)
BUILT_KERNELS = Path(config.__file__).parent / "engine" / "ops" / "native" / "built"
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
LEAST_MEMORY_BYTES = 2 << 30  # torch, a small model and the default KV cache
_COMPILER_S = 5.0
_PORTS = ((config.RouterConfig.port, "--port"), (config.HTTP_PORT, "--http-port"))


def examine(router_here: bool) -> Iterator[Finding]:
    """Everything but GPUs; `router_here`: one answers on this machine, and has ports of its own."""
    yield python()
    yield torch()
    yield compiler()
    yield cores()
    yield memory()
    yield etcd_program()
    for port, option in _PORTS:
        yield free_port(port, option, router_here)


def python() -> Finding:
    """Is the interpreter new enough?"""
    version = platform.python_version()
    if sys.version_info < LEAST_PYTHON:
        return fail("python", version, "Python 3.11 or later is needed")
    return ok("python", f"{version}, baton {version_of('baton-serving') or 'from a source tree'}")


def torch() -> Finding:
    """Is torch there? Only workers need it."""
    version = version_of("torch")
    if version is None:
        return warn(
            "torch",
            "not installed: routers and clients need none, workers do",
            "pip install 'baton-serving[worker]'",
        )
    return ok("torch", version)


def compiler() -> Finding:
    """Can native CPU kernels be had, ready-made or built?"""
    if any(BUILT_KERNELS.glob("*.so")):
        return ok("CPU kernels", "built before: no compiler is needed")
    found = shutil.which("g++")
    if found is None:
        return warn(
            "CPU kernels",
            "no g++: on CPUs torch computes instead, several times slower",
            "install g++ (Debian: apt-get install g++)",
        )
    asked = [found, "-dumpfullversion", "-dumpversion"]
    try:
        said = subprocess.run(
            asked, capture_output=True, text=True, timeout=_COMPILER_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return warn("CPU kernels", f"g++ does not run: {error}", "install a working g++")
    return ok("CPU kernels", f"built on first use by g++ {said.stdout.strip()}")


def cores() -> Finding:
    """How many cores are ours."""
    count = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    if quota is not None and quota < count:
        return warn(
            "cores",
            f"{count} to be seen, but this container gets {quota:g} of them",
            f"give each worker its --threads, {max(int(quota), 1)} in all: more are throttled",
        )
    if count < 2:
        return warn("cores", "1: prefill and decode take turns on it", "")
    return ok("cores", str(count))


def memory() -> Finding:
    """How much there is, and how much of it is free."""
    total, available = _meminfo()
    limit = _memory_limit()
    if limit is not None and limit < total:
        total, available = limit, min(available, max(limit - _memory_held(), 0))
    text = f"{total / 2**30:.1f} GiB, {available / 2**30:.1f} GiB of it free"
    if available < LEAST_MEMORY_BYTES:
        return warn("memory", text, "end what uses it, or start workers with a smaller --kv-cache")
    return ok("memory", text)


def etcd_program() -> Finding:
    """Could `baton up` start an etcd?"""
    try:
        return ok("etcd", str(etcd.etcd_binary()))
    except ConfigError as error:
        what, _, mend = str(error).partition(": ")
        return warn("etcd", what, mend)


def free_port(port: int, option: str, router_here: bool) -> Finding:
    """Could a router listen there?"""
    try:
        ports.check_free("127.0.0.1", port, option)
    except ConfigError:
        if router_here:
            return ok(f"port {port}", "in use; a router runs")
        mend = f"stop what uses it, or choose another with {option}"
        return warn(f"port {port}", "in use", mend)
    return ok(f"port {port}", "free")


def version_of(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _meminfo() -> tuple[int, int]:
    """(all memory, what programs can still get), bytes."""
    lines = MEMINFO.read_text().splitlines()
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    return kibibytes["MemTotal"] << 10, kibibytes["MemAvailable"] << 10


def _memory_limit() -> int | None:
    """Of this control group, bytes; None where there is none."""
    text = _cgroup("memory.max")
    return int(text) if text.isdigit() else None


def _memory_held() -> int:
    """Bytes that count against the limit and are not given back when somebody wants them."""
    current = _cgroup("memory.current")
    stat = dict(line.split(" ", 1) for line in _cgroup("memory.stat").splitlines())
    return int(current or 0) - int(stat.get("inactive_file", 0))


def _cpu_quota() -> float | None:
    """Cores' worth of time that this control group gets; None where it is not limited."""
    quota, _, period = _cgroup("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _cgroup(name: str) -> str:
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return ""
