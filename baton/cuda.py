"""GPUs as this process sees them, and GPU memory that other processes can open.

torch cannot export memory of its own allocator when segments can grow. So a KV pool's memory is
allocated from the CUDA driver and mapped for the GPU's primary context, which is the one that torch
uses. Other processes map it by a file descriptor, in whatever namespaces they are; the handles of
cuIpcGetMemHandle end at a process namespace. Signatures: CUDA Driver API, "Virtual Memory
Management" and "Unified Addressing"; structures: cuda.h of CUDA 12.9 and 13.5.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

LIBRARY = "libcuda.so.1"

_POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM

# What memory to share needs of a GPU and its driver, by CU_DEVICE_ATTRIBUTE_….
_NEEDED = {
    102: "virtual memory management",  # VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    103: "file descriptors of memory",  # HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
}

# What usually helps, by CUresult; shown beside the driver's own text.
_HINTS = {
    2: "lower --gpu-memory, or end what else runs on this GPU",
    100: "no GPU is visible: give the container its GPUs",
    101: "show every GPU of the machine to every worker",
    217: "the two GPUs have no peer access: use --transport nccl",
    801: "this driver or container cannot share GPU memory: use --transport nccl",
}


class CudaError(OSError):
    """A call of the driver failed: which, with what code, and what may help."""

    def __init__(self, call: str, code: int, text: str) -> None:
        hint = f" ({_HINTS[code]})" if code in _HINTS else ""
        super().__init__(f"{call} failed with CUDA error {code}, {text}{hint}")


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; what is not named is zero."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("alloc_flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@cache
def visible_gpus() -> tuple[str, ...]:
    """The driver's names, "GPU-…", of all GPUs of this process, by torch's numbers."""
    count = torch.cuda.device_count()
    return tuple(f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(count))


def gpu_uuid(device: torch.device) -> str:
    """The driver's name of a GPU, the same in every process; empty for a CPU."""
    return visible_gpus()[device.index or 0] if device.type == "cuda" else ""


@cache
def reachable_gpus(device: torch.device) -> tuple[str, ...]:
    """The names of the GPUs whose memory kernels on `device` can write to, its own first."""
    if device.type != "cuda":
        return ()
    own, names = device.index or 0, visible_gpus()
    peers = [n for n in range(len(names)) if n != own and torch.cuda.can_device_access_peer(own, n)]
    return tuple(names[n] for n in (own, *peers))


@cache
def has_nvlink(one: torch.device, other: torch.device) -> bool:
    """Whether two GPUs reach each other by NVLink; by PCIe, if at all. Raises OSError."""
    return CudaDriver().has_native_atomics(one, other)


@cache
def nccl_version() -> tuple[int, ...]:
    """NCCL's, (2, 27, 5); empty where torch has none."""
    return tuple(torch.cuda.nccl.version()) if distributed.is_nccl_available() else ()


# For `os.environ`, before the first group is built; NCCL reads its own when it is first used.
NCCL_ENVIRONMENT = {
    # A wait only queues work. Blocking ones would poll once a millisecond.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # A lost peer must fail a link, not end the process: torch's watchdog must do nothing on an
    # error, write no dumps, and not be monitored itself.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # On an error the watchdog sleeps four times this in any case, and the group cannot be freed
    # meanwhile: a lost peer would keep its link's thread for a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Else every message's Python stack is recorded for a dump that is never written.
    "TORCH_FR_BUFFER_SIZE": "0",
    # Seconds until torch gives up a non-blocking call, a connection among them, which an abort
    # cannot end: torch holds the communicator's lock meanwhile. Its default is half an hour.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
}

_ADDRESS = ctypes.c_uint64  # CUdeviceptr
_ALLOCATION = ctypes.c_uint64  # CUmemGenericAllocationHandle
_FLAGS = ctypes.c_uint64  # unsigned long long
_CONTEXT = ctypes.c_void_p  # CUcontext
_DEVICE = ctypes.c_int  # CUdevice

# The suffix is part of the symbol's name: the header hides it behind a macro.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(_DEVICE), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, _DEVICE),
    "cuDeviceGetP2PAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, _DEVICE, _DEVICE),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_CONTEXT), _DEVICE),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_CONTEXT),),
    "cuCtxSynchronize": (),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(_Properties), ctypes.c_int
    ),
    "cuMemCreate": (
        ctypes.POINTER(_ALLOCATION), ctypes.c_size_t, ctypes.POINTER(_Properties), _FLAGS
    ),
    "cuMemRelease": (_ALLOCATION,),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _ALLOCATION, ctypes.c_int, _FLAGS),
    "cuMemImportFromShareableHandle": (
        ctypes.POINTER(_ALLOCATION), ctypes.c_void_p, ctypes.c_int
    ),
    "cuMemAddressReserve": (
        ctypes.POINTER(_ADDRESS), ctypes.c_size_t, ctypes.c_size_t, _ADDRESS, _FLAGS
    ),
    "cuMemAddressFree": (_ADDRESS, ctypes.c_size_t),
    "cuMemMap": (_ADDRESS, ctypes.c_size_t, ctypes.c_size_t, _ALLOCATION, _FLAGS),
    "cuMemUnmap": (_ADDRESS, ctypes.c_size_t),
    "cuMemSetAccess": (_ADDRESS, ctypes.c_size_t, ctypes.POINTER(_Access), ctypes.c_size_t),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, _ADDRESS),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}  # fmt: skip


class CudaDriver:
    """Memory of one GPU that other processes can open, over the machine's libcuda; any thread.

    Addresses are plain numbers. Raises OSError where there is no libcuda; every call, CudaError.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise OSError(f"CUDA's driver cannot be loaded: {error}") from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._guard = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._call("cuInit", 0)

    def allocate(self, device: torch.device, num_bytes: int) -> tuple[int, int, int]:
        """At least so much zeroed memory: its address, its size, and the descriptor by which
        another process can `open` it. The caller closes both."""
        self._check_can_share(device)
        unit, memory, fd = ctypes.c_size_t(), _ALLOCATION(), ctypes.c_int(-1)
        wanted = ctypes.byref(_Properties(_PINNED, _FILE_DESCRIPTOR, _on(device)))
        with self._current(device), ExitStack() as failed:
            self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), wanted, _MINIMUM)
            size = -(-num_bytes // unit.value) * unit.value
            self._call("cuMemCreate", ctypes.byref(memory), size, wanted, 0)
            with self._releasing(memory):
                export = ctypes.byref(fd), memory, _FILE_DESCRIPTOR, 0
                self._call("cuMemExportToShareableHandle", *export)
                failed.callback(os.close, fd.value)
                os.set_inheritable(fd.value, False)
                address = self._map(device, memory, size)
                failed.callback(self.close, device, address, size)
            self._call("cuMemsetD8_v2", address, 0, size)
            # The driver's stream is not ordered with torch's.
            self._call("cuCtxSynchronize")
            failed.pop_all()
        return address, size, fd.value

    def open(self, device: torch.device, fd: int, size: int) -> int:
        """Maps another process's memory for kernels on `device`; `fd` is not needed any more."""
        memory = _ALLOCATION()
        with self._current(device):
            found = ctypes.byref(memory), fd, _FILE_DESCRIPTOR
            self._call("cuMemImportFromShareableHandle", *found)
            with self._releasing(memory):
                return self._map(device, memory, size)

    def close(self, device: torch.device, address: int, size: int) -> None:
        """Unmaps memory that no work uses any more, for unmapping waits for none.

        The memory is freed with its last mapping and descriptor, in whichever process.
        """
        with self._current(device):
            self._call("cuMemUnmap", address, size)
            self._call("cuMemAddressFree", address, size)

    def synchronize(self, device: torch.device) -> None:
        """Returns when all work of this process on `device` is done."""
        with self._current(device):
            self._call("cuCtxSynchronize")

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """That memory as a uint8 tensor on its GPU, which does not own it."""
        ordinal = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), _POINTER_DEVICE_ORDINAL, address)
        # Memory as torch accepts it: https://numba.pydata.org, "CUDA Array Interface".
        fields = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False)}
        array = SimpleNamespace(__cuda_array_interface__=fields | {"strides": None, "version": 3})
        tensor = torch.as_tensor(array, device=torch.device("cuda", ordinal.value))
        assert tensor.data_ptr() == address, "torch made a copy instead of a view"
        return tensor

    def has_native_atomics(self, one: torch.device, other: torch.device) -> bool:
        """Whether atomics of `one` on `other`'s memory are as on its own: NVLink's are."""
        value, pair = ctypes.c_int(), (self._device(one), self._device(other))
        self._call("cuDeviceGetP2PAttribute", ctypes.byref(value), _NATIVE_ATOMICS, *pair)
        return bool(value.value)

    def _check_can_share(self, device: torch.device) -> None:
        """Raises OSError unless `device` has what memory to share needs."""
        value = ctypes.c_int()
        for attribute, what in _NEEDED.items():
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device(device))
            if not value.value:
                raise OSError(
                    f"{device} cannot share memory with other processes: its driver offers no "
                    f"{what}; update the driver, or use --transport nccl"
                )

    def _map(self, device: torch.device, memory: ctypes.c_uint64, size: int) -> int:
        address, access = _ADDRESS(), _Access(_on(device), _READ_WRITE)
        with ExitStack() as failed:
            self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
            failed.callback(self._call, "cuMemAddressFree", address, size)
            self._call("cuMemMap", address, size, 0, memory, 0)
            failed.callback(self._call, "cuMemUnmap", address, size)
            self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            failed.pop_all()
        return address.value

    @contextmanager
    def _releasing(self, memory: ctypes.c_uint64) -> Iterator[None]:
        """Gives up the handle of an allocation, which its mappings and descriptors keep."""
        try:
            yield
        finally:
            self._call("cuMemRelease", memory)

    def _device(self, device: torch.device) -> ctypes.c_int:
        ordinal = _DEVICE()
        self._call("cuDeviceGet", ctypes.byref(ordinal), device.index)
        return ordinal

    @contextmanager
    def _current(self, device: torch.device) -> Iterator[None]:
        """Makes the GPU's primary context the calling thread's: retained once, as torch does."""
        assert device.index is not None, "which GPU?"
        with self._guard:
            if device.index not in self._contexts:
                ordinal, context = self._device(device), _CONTEXT()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
                self._contexts[device.index] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device.index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_CONTEXT()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(name, code, self._text(code))

    def _text(self, code: int) -> str:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if not getattr(self._library, name)(code, ctypes.byref(text)) and text.value:
                texts.append(text.value.decode(errors="replace"))
        return ": ".join(texts) or "no text from the driver"


def _on(device: torch.device) -> _Location:
    return _Location(_ON_DEVICE, device.index)


class CudaArea:
    """`num_bytes` of `device`'s memory, for a KV pool that other processes of the machine write to.

    `tensor` is all of them, uint8, zero at first; `nbytes`, a few more, are what another process
    maps by `fd`. Raises OSError when there is too little memory or no driver that can share it.
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
        """This process uses the memory no more; others that have mapped it may go on."""
        address, self._address = self._address, 0
        if address:
            os.close(self.fd)
            self.driver.synchronize(self.device)
            self.driver.close(self.device, address, self.nbytes)
