"""The checks of `baton doctor` on this machine: libraries, cores, memory, ports, GPUs.

torch is imported only if the driver reports a GPU: the report must work without torch.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from baton import config
from baton.errors import ConfigError
from baton.local import etcd_process, ports
from baton.v1 import common_pb2
from baton.worker import nvidia_smi
from kvtransfer import pairing

MIN_MEMORY_BYTES = 2 << 30  # torch, a small model and the default KV cache
MIN_CAPABILITY = (8, 0)
MIN_SHM_BYTES = 1 << 30
BUILT_KERNELS = Path(__file__).parents[1] / "engine/kernels/native/built"
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
SHM = config.SHARED_FOLDER
INFINIBAND = Path("/sys/class/infiniband")
_TIMEOUT_S = 5.0  # for external programs
_PORTS = ((config.RouterConfig.port, "--port"), (config.HTTP_PORT, "--http-port"))
# NCCL's documentation, "Environment Variables".
_DISABLING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
_GPU_EXTRA = "pip install '.[gpu]' in Baton's source tree"


@dataclass(frozen=True)
class Finding:
    """The result of a check: its subject, a text, and the fix (empty if none is needed).

    `level`: "ok"; "warn": it works, but slower or not everywhere; "fail": it does not work, and the
    command's exit status is 1.
    """

    level: str
    subject: str
    text: str
    fix: str = ""


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
fail = partial(Finding, "fail")


def check_machine(router_here: bool) -> Iterator[Finding]:
    """All checks but those of GPUs; `router_here`: a router uses ports of this machine."""
    ours = version_of("baton-serving") or "from a source tree"
    yield ok("python", f"{platform.python_version()}, baton {ours}")
    if version := version_of("torch"):
        yield ok("torch", version)
    else:
        text = "not installed: routers and clients need none, workers do"
        yield warn("torch", text, "pip install '.[worker]' in Baton's source tree")
    yield compiler()
    yield cores()
    yield memory()
    try:
        yield ok("etcd", str(etcd_process.etcd_binary()))  # that `baton up` would start
    except ConfigError as error:
        what, _, fix = str(error).partition(": ")
        yield warn("etcd", what, fix)
    for port, option in _PORTS:
        yield free_port(port, option, router_here)


def compiler() -> Finding:
    """Checks that native CPU kernels are built or can be built."""
    if any(BUILT_KERNELS.glob("*.so")):
        return ok("CPU kernels", "already built: no compiler is needed")
    if (found := shutil.which("g++")) is None:
        text = "no g++: torch's kernels will be used on CPUs, several times slower"
        return warn("CPU kernels", text, "install g++ (Debian: apt-get install g++)")
    command = [found, "-dumpfullversion", "-dumpversion"]
    try:
        version = subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return warn("CPU kernels", f"g++ does not run: {error}", "install a working g++")
    return ok("CPU kernels", f"built on first use by g++ {version.strip()}")


def cores() -> Finding:
    """Checks the number of cores this process may use, and its CPU quota."""
    count = len(os.sched_getaffinity(0))
    quota, _, period = _cgroup("cpu.max").partition(" ")
    share = int(quota) / int(period) if quota.isdigit() and period.isdigit() else count
    if share < count:
        fix = f"set --threads of the workers to {max(int(share), 1)} in total: more are throttled"
        return warn("cores", f"{count} visible, but this container's CPU quota is {share:g}", fix)
    if count < 2:
        return warn("cores", "1: prefill and decode share it")
    return ok("cores", str(count))


def memory() -> Finding:
    """Checks total and free memory."""
    total, available = host_memory()
    text = f"{total / 2**30:.1f} GiB, {available / 2**30:.1f} GiB of it free"
    if available < MIN_MEMORY_BYTES:
        return warn("memory", text, "stop other programs, or lower --kv-cache of the workers")
    return ok("memory", text)


def host_memory() -> tuple[int, int]:
    """Memory limit and free memory of this control group, in bytes."""
    lines = MEMINFO.read_text().splitlines()
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    total, available = kibibytes["MemTotal"] << 10, kibibytes["MemAvailable"] << 10
    limit = _cgroup("memory.max")
    if limit.isdigit() and int(limit) < total:
        stat = dict(line.split(" ", 1) for line in _cgroup("memory.stat").splitlines())
        # Memory that counts against the limit and cannot be reclaimed.
        held = int(_cgroup("memory.current") or 0) - int(stat.get("inactive_file", 0))
        total = int(limit)
        available = min(available, max(total - held, 0))
    return total, available


def free_port(port: int, option: str, router_here: bool) -> Finding:
    """Checks that a router could listen on a port."""
    try:
        ports.check_free("127.0.0.1", port, option)
    except ConfigError:
        if router_here:
            return ok(f"port {port}", "in use by a running router")
        fix = f"stop the program that uses it, or choose another port with {option}"
        return warn(f"port {port}", "in use", fix)
    return ok(f"port {port}", "free")


def version_of(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cgroup(name: str) -> str:
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return ""


def check_gpus() -> Iterator[Finding]:
    """Checks GPUs as the driver and torch report them, and their interconnects."""
    gpus = nvidia_smi.cards(_TIMEOUT_S)
    driver = nvidia_smi.driver_version()
    yield triton(bool(gpus))
    yield rdma(bool(gpus))
    if not gpus:
        if driver:
            text = f"driver {driver} is loaded, but nvidia-smi shows no GPU"
            toolkit = "the NVIDIA container toolkit, and the capability `utility`"
            yield warn("GPU", text, f"run nvidia-smi by hand; in containers: {toolkit}")
        else:
            yield ok("GPU", "none: workers compute on the CPU")
        return
    for found in gpus:
        text = f"{found.name}, {found.memory_bytes / 2**30:.0f} GiB, {found.uuid}"
        if found.capability:
            text += f", compute capability {found.capability}"
        if found.capability and tuple(map(int, found.capability.split("."))) < MIN_CAPABILITY:
            fix = "the kernels need 8.0 (Ampere) or later"
            yield warn(f"GPU {found.index}", text, fix)
        else:
            yield ok(f"GPU {found.index}", text)
    yield shared_memory()
    for name in _DISABLING:
        if os.environ.get(name, "0") not in ("", "0"):
            yield warn(name, f"is {os.environ[name]}, which disables a KV transport", "unset it")
    if version_of("torch") is None:
        return  # reported above
    seen = seen_by_torch()
    yield cuda(len(gpus), seen, driver)
    if seen:
        yield nccl(seen[0].nccl_version)
        yield from (neighbours(number, one) for number, one in enumerate(seen))


def triton(needed: bool) -> Finding:
    """Checks Triton, and the C compiler and Python headers that it needs at run time."""
    version = version_of("triton")
    if not needed:
        return ok("triton", version or "not installed; only needed for GPUs")
    if version is None:
        return warn("triton", "not installed, but needed for GPU kernels", _GPU_EXTRA)
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
        text = f"{version}, but no C compiler, which it needs when a worker starts"
        return warn("triton", text, "install gcc, or set CC to a compiler")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return warn("triton", f"{version}, but no {headers}/Python.h", "install python3-dev")
    return ok("triton", version)


def rdma(needed: bool) -> Finding:
    """Checks for RDMA devices and the limit on locked memory."""
    devices = sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if not devices:
        return ok("RDMA", "no devices: NCCL uses TCP sockets between machines")
    text = ", ".join(devices)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if needed and locked != resource.RLIM_INFINITY:
        text += f"; the limit on locked memory is only {locked >> 10} KiB"
        return warn("RDMA", text, "ulimit -l unlimited; in compose: ulimits: {memlock: -1}")
    return ok("RDMA", text)


def shared_memory() -> Finding:
    """Checks /dev/shm, where workers share KV pools, and which NCCL uses between GPUs that are no
    peers."""
    try:
        space = os.statvfs(SHM)
    except OSError as error:
        return warn(str(SHM), str(error), "ipc: host, or shm_size")
    if not os.access(SHM, os.W_OK | os.X_OK):
        return warn(str(SHM), "not writable: KV can only be sent over NCCL", "mount it writable")
    size = space.f_frsize * space.f_blocks
    text = f"{size / 2**30:.1f} GiB"
    if size < MIN_SHM_BYTES:
        return warn(str(SHM), text, "NCCL may not start: ipc: host, or shm_size: 8gb")
    return ok(str(SHM), text)


def seen_by_torch() -> list[common_pb2.Hardware]:
    """The hardware report of a worker on each of torch's devices; empty if torch has no CUDA."""
    import torch  # noqa: PLC0415

    from baton.worker import hardware  # noqa: PLC0415

    if not torch.cuda.is_available():
        return []
    devices = range(torch.cuda.device_count())
    return [hardware.describe(torch.device("cuda", number), _TIMEOUT_S) for number in devices]


def cuda(gpus: int, seen: Sequence[common_pb2.Hardware], driver: str) -> Finding:
    """Checks that torch can use the `gpus` GPUs that the driver reports."""
    if not seen:
        text = f"torch {version_of('torch')} cannot use the GPUs of driver {driver or 'unknown'}"
        return warn("CUDA", text, "install a CUDA build of torch for a version the driver supports")
    text = f"{seen[0].cuda_version}, driver {seen[0].driver_version or driver or 'unknown'}"
    if len(seen) < gpus:
        return warn(
            "CUDA",
            f"{text}; torch sees {len(seen)} of {gpus} GPUs",
            "leave CUDA_VISIBLE_DEVICES unset and choose GPUs with --device cuda:N: a worker "
            "cannot write to a GPU that it does not see",
        )
    return ok("CUDA", text)


def nccl(version: str) -> Finding:
    """Checks NCCL's version, and whether workers that share a GPU can use it."""
    if not version:
        fix = "install a CUDA build of torch, which includes it"
        return warn("NCCL", "not found: KV of GPUs cannot be sent to other machines", fix)
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    shares = "may" if pairing.shares_gpu(numbers) else "may not"
    return ok("NCCL", f"{version}: two workers {shares} share a GPU over it (from 2.30 on)")


def neighbours(number: int, seen: common_pb2.Hardware) -> Finding:
    """Checks which GPUs a GPU can write to, and over which interconnect."""
    others = [uuid for uuid in seen.visible_gpus if uuid != seen.gpu.uuid]
    links = {uuid: kind for kind, _, uuid in (link.partition(" ") for link in seen.gpu_links)}
    subject = f"cuda:{number}"
    if not others:
        return ok(subject, f"{seen.gpu.name}, alone")
    peers = [uuid for uuid in others if uuid in seen.peer_gpus]
    ways = ", ".join(f"{uuid[:12]} {links.get(uuid, '?')}" for uuid in peers)
    text = f"{seen.gpu.name} writes {len(peers)} of {len(others)} others: {ways or 'none'}"
    if not peers:
        return warn(subject, text, "KV between them is copied through the host's memory")
    return ok(subject, text)
