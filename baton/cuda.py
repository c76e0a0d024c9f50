"""GPUs that this process sees, and GPU memory that other processes can map.

torch's allocator cannot export memory of growing segments. A KV pool's memory is therefore
allocated from the CUDA driver (virtual memory management) and mapped for the GPU's primary context,
which is the one that torch uses. Other processes map it by a file descriptor, which works across
process and container namespaces; handles of cuIpcGetMemHandle do not.

The driver is called through NVIDIA's `cuda-bindings`, which CUDA builds of torch require.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

# Remedies by CUresult, shown beside the driver's own text.
_HINTS = {
    2: "lower --gpu-memory, or end what else runs on this GPU",
    100: "no GPU is visible: give the container its GPUs",
    101: "show every GPU of the machine to every worker",
    217: "the two GPUs have no peer access: use --transport nccl",
    801: "this driver or container cannot share GPU memory: use --transport nccl",
}


class CudaError(OSError):
    """A failed call of the CUDA driver: its name, error code and text, and a remedy if known."""

    def __init__(self, call: str, code: int, text: str) -> None:
        hint = f" ({_HINTS[code]})" if code in _HINTS else ""
        super().__init__(f"{call} failed with CUDA error {code}, {text}{hint}")


@cache
def visible_gpus() -> tuple[str, ...]:
    """UUIDs ("GPU-…") of the GPUs that this process sees, in the order of torch's numbers."""
    count = torch.cuda.device_count()
    return tuple(f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(count))


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in every process; empty for a CPU."""
    return visible_gpus()[device.index or 0] if device.type == "cuda" else ""


def compute_capability(device: torch.device) -> int:
    """A GPU's compute capability, 90 for 9.0; 90 for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def reachable_gpus(device: torch.device) -> tuple[str, ...]:
    """UUIDs of the GPUs whose memory kernels on `device` can access, its own first."""
    if device.type != "cuda":
        return ()
    own, names = device.index or 0, visible_gpus()
    peers = [n for n in range(len(names)) if n != own and torch.cuda.can_device_access_peer(own, n)]
    return tuple(names[n] for n in (own, *peers))


@cache
def has_nvlink(one: torch.device, other: torch.device) -> bool:
    """Whether two GPUs are connected by NVLink and not by PCIe. Raises OSError."""
    return CudaDriver().has_native_atomics(one, other)


@cache
def nccl_version() -> tuple[int, ...]:
    """NCCL's version, such as (2, 27, 5); empty where torch has no NCCL."""
    return tuple(torch.cuda.nccl.version()) if distributed.is_nccl_available() else ()


# Environment variables of torch and NCCL, to be set before the first process group is built.
NCCL_ENVIRONMENT = {
    # Waits only queue work on a stream. Blocking waits poll once a millisecond.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # A lost peer must fail one link, not end the process: torch's watchdog must not handle errors,
    # write dumps or be monitored itself.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After an error the watchdog sleeps for four times this, and the group cannot be freed until
    # then: a lost peer would block its link's thread for a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Otherwise the Python stack of every message is recorded, for a dump that is never written.
    "TORCH_FR_BUFFER_SIZE": "0",
    # Seconds until torch gives up a non-blocking call, such as connecting. An abort cannot end the
    # call, because torch holds the communicator's lock. The default is half an hour.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
}


class CudaDriver:
    """Allocates GPU memory that other processes can map, and maps theirs. Usable from any thread.

    Addresses are integers. Raises OSError where there is no CUDA driver; all calls, CudaError.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver  # noqa: PLC0415
        except ImportError as error:
            raise OSError(
                f"CUDA's driver cannot be called: {error}; install baton-serving[gpu]"
            ) from error
        self._driver: Any = driver
        self._guard = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._handle_type = (
            driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        self._call("cuInit", 0)

    def allocate(self, device: torch.device, num_bytes: int) -> tuple[int, int, int]:
        """Allocates zeroed memory of at least `num_bytes`: its address, size and file descriptor.

        Another process passes the descriptor to `open`. The caller closes memory and descriptor.
        """
        self._check_can_share(device)
        wanted = self._driver.CUmemAllocationProp()
        wanted.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = self._handle_type
        wanted.location = self._location(device)
        minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self._current(device), ExitStack() as failed:
            unit = self._call("cuMemGetAllocationGranularity", wanted, minimum)
            size = -(-num_bytes // unit) * unit
            memory = self._call("cuMemCreate", size, wanted, 0)
            with self._releasing(memory):
                fd = self._call("cuMemExportToShareableHandle", memory, self._handle_type, 0)
                failed.callback(os.close, fd)
                os.set_inheritable(fd, False)
                address = self._map(device, memory, size)
                failed.callback(self.close, device, address, size)
            self._call("cuMemsetD8", address, 0, size)
            # The driver's stream is not ordered with torch's.
            self._call("cuCtxSynchronize")
            failed.pop_all()
        return address, size, fd

    def open(self, device: torch.device, fd: int, size: int) -> int:
        """Maps another process's memory for kernels on `device`; `fd` may be closed afterwards."""
        with self._current(device):
            memory = self._call("cuMemImportFromShareableHandle", fd, self._handle_type)
            with self._releasing(memory):
                return self._map(device, memory, size)

    def close(self, device: torch.device, address: int, size: int) -> None:
        """Unmaps memory that no queued work uses: unmapping waits for none.

        The memory is freed with its last mapping and descriptor in any process.
        """
        with self._current(device):
            self._call("cuMemUnmap", address, size)
            self._call("cuMemAddressFree", address, size)

    def synchronize(self, device: torch.device) -> None:
        """Waits for all work of this process on `device`."""
        with self._current(device):
            self._call("cuCtxSynchronize")

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """The memory at an address as a uint8 tensor on its GPU, which does not own it."""
        ordinal = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        device = torch.device("cuda", self._call("cuPointerGetAttribute", ordinal, address))
        # Memory as torch accepts it: https://numba.pydata.org, "CUDA Array Interface".
        fields = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False)}
        array = SimpleNamespace(__cuda_array_interface__=fields | {"strides": None, "version": 3})
        tensor = torch.as_tensor(array, device=device)
        assert tensor.data_ptr() == address, "torch made a copy instead of a view"
        return tensor

    def has_native_atomics(self, one: torch.device, other: torch.device) -> bool:
        """Whether `one` has native atomics on `other`'s memory, as NVLink has and PCIe has not."""
        wanted = self._driver.CUdevice_P2PAttribute
        native = wanted.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        pair = (self._device(one), self._device(other))
        return bool(self._call("cuDeviceGetP2PAttribute", native, *pair))

    def _check_can_share(self, device: torch.device) -> None:
        """Raises OSError unless GPU and driver can share memory between processes."""
        attributes = self._driver.CUdevice_attribute
        for name, what in (
            ("VIRTUAL_MEMORY_MANAGEMENT", "virtual memory management"),
            ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "file descriptors of memory"),
        ):
            attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED")
            if not self._call("cuDeviceGetAttribute", attribute, self._device(device)):
                raise OSError(
                    f"{device} cannot share memory with other processes: its driver offers no "
                    f"{what}; update the driver, or use --transport nccl"
                )

    def _location(self, device: torch.device) -> Any:
        location = self._driver.CUmemLocation()
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index
        return location

    def _map(self, device: torch.device, memory: Any, size: int) -> int:
        access = self._driver.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as failed:
            address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
            failed.callback(self._call, "cuMemAddressFree", address, size)
            self._call("cuMemMap", address, size, 0, memory, 0)
            failed.callback(self._call, "cuMemUnmap", address, size)
            self._call("cuMemSetAccess", address, size, [access], 1)
            failed.pop_all()
        return address

    @contextmanager
    def _releasing(self, memory: Any) -> Iterator[None]:
        """Releases the handle of an allocation, which its mappings and descriptors keep alive."""
        try:
            yield
        finally:
            self._call("cuMemRelease", memory)

    def _device(self, device: torch.device) -> Any:
        return self._call("cuDeviceGet", device.index)

    @contextmanager
    def _current(self, device: torch.device) -> Iterator[None]:
        """Makes the GPU's primary context current; it is retained once a GPU, as torch does."""
        assert device.index is not None, "which GPU?"
        with self._guard:
            if device.index not in self._contexts:
                context = self._call("cuDevicePrimaryCtxRetain", self._device(device))
                self._contexts[device.index] = context
        self._call("cuCtxPushCurrent", self._contexts[device.index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a driver function, if it has any. Raises OSError."""
        try:
            code, *results = getattr(self._driver, name)(*arguments)
        except (RuntimeError, ValueError) as error:  # no libcuda; an error code newer than bindings
            raise OSError(f"{name} of CUDA's driver cannot be called: {error}") from error
        if code:
            raise CudaError(name, int(code), self._text(code))
        return results[0] if results else None

    def _text(self, code: Any) -> str:
        texts = (self._driver.cuGetErrorName(code)[1], self._driver.cuGetErrorString(code)[1])
        found = [text.decode(errors="replace") for text in texts if text]
        return ": ".join(found) or "no text from the driver"


class CudaArea:
    """GPU memory of a KV pool that other processes of this machine write to.

    tensor: all `num_bytes` of it, uint8, zero at first · nbytes: size of the mapping, which may be
    larger, as another process maps it by `fd`. Raises OSError where memory is short or the driver
    cannot share it.
    """

    on_gpu = True

    def __init__(
        self, num_bytes: int, device: torch.device, driver: CudaDriver | None = None
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.driver, self.device = driver or CudaDriver(), device
        self._address, self.nbytes, self.fd = self.driver.allocate(device, num_bytes)
        try:
            self.tensor = self.driver.view(self._address, num_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps the memory here; other processes that have mapped it keep it."""
        address, self._address = self._address, 0
        if address:
            os.close(self.fd)
            self.driver.synchronize(self.device)
            self.driver.close(self.device, address, self.nbytes)
