"""GPUs as this process sees them, and GPU memory that other processes can open.

torch cannot export memory of its own allocator when segments can grow. So a KV pool's memory is
allocated from the CUDA driver, in the GPU's primary context, which is the one that torch uses.
Signatures: CUDA Driver API, "Memory Management" and "Unified Addressing".
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

LIBRARY = "libcuda.so.1"

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_ENABLE_PEER_ACCESS = 0x1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED

# What usually helps, by CUresult; shown beside the driver's own text.
_HINTS = {
    2: "lower --gpu-memory, or end what else runs on this GPU",
    100: "no GPU is visible: give the container its GPUs",
    101: "show every GPU of the machine to every worker",
    201: "run the workers in one pid namespace, pid: host; CUDA opens no handle across them",
    205: "show every GPU of the machine to every worker and run them with ipc: host",
    217: "the two GPUs have no peer access: use --transport nccl",
    400: "show every GPU of the machine to every worker and run them with ipc: host",
    801: "this driver or container cannot share GPU memory: use --transport nccl",
}


class CudaError(OSError):
    """A call of the driver failed: which, with what code, and what may help."""

    def __init__(self, call: str, code: int, text: str) -> None:
        hint = f" ({_HINTS[code]})" if code in _HINTS else ""
        super().__init__(f"{call} failed with CUDA error {code}, {text}{hint}")


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


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
_CONTEXT = ctypes.c_void_p  # CUcontext
_DEVICE = ctypes.c_int  # CUdevice

# The suffix is part of the symbol's name: the header hides it behind a macro.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(_DEVICE), ctypes.c_int),
    "cuDeviceGetP2PAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, _DEVICE, _DEVICE),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_CONTEXT), _DEVICE),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_CONTEXT),),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), ctypes.c_size_t),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _ADDRESS, ctypes.c_size_t),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, _ADDRESS),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


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

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Zeroed memory; returns its address."""
        address = _ADDRESS()
        with self._current(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
            try:
                self._call("cuMemsetD8_v2", address, 0, num_bytes)
                # The driver's stream is not ordered with torch's.
                self._call("cuCtxSynchronize")
            except CudaError:
                self._call("cuMemFree_v2", address)
                raise
        return address.value

    def free(self, device: torch.device, address: int) -> None:
        """Frees `allocate`d memory; waits for what still uses it."""
        self._call_on(device, "cuMemFree_v2", address)

    def export(self, device: torch.device, address: int) -> bytes:
        """What `open` of another process needs, `HANDLE_BYTES` long."""
        handle = _Handle()
        self._call_on(device, "cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open(self, device: torch.device, handle: bytes) -> int:
        """Maps another process's memory for kernels on `device`. Also raises ValueError."""
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address, opened = _ADDRESS(), _Handle.from_buffer_copy(handle)
        arguments = ctypes.byref(address), opened, _LAZY_ENABLE_PEER_ACCESS
        self._call_on(device, "cuIpcOpenMemHandle_v2", *arguments)
        return address.value

    def close(self, device: torch.device, address: int) -> None:
        self._call_on(device, "cuIpcCloseMemHandle", address)

    def read(self, device: torch.device, address: int, num_bytes: int) -> bytes:
        """What lies there now, as `device` sees it."""
        found = ctypes.create_string_buffer(num_bytes)
        self._call_on(device, "cuMemcpyDtoH_v2", found, address, num_bytes)
        return found.raw

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

    def _call_on(self, device: torch.device, name: str, *arguments: Any) -> None:
        with self._current(device):
            self._call(name, *arguments)

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


# The driver shares whole pages of this size, including what lies beside the area in one.
PAGE_BYTES = 2 << 20
NONCE_BYTES = 16


class CudaArea:
    """`num_bytes` of `device`'s memory, for a KV pool that other processes of the machine write to.

    `tensor` is all of them, uint8, zero at first. Behind them lies a nonce: a process that opened
    `handle` and reads the same nonce there has mapped the right memory. Raises OSError when there
    is too little memory or no driver.
    """

    on_gpu = True

    def __init__(
        self, num_bytes: int, device: torch.device, driver: CudaDriver | None = None
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.driver = driver or CudaDriver()
        self.device, self.nbytes = device, num_bytes
        self.whole_bytes = -(-(num_bytes + NONCE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._address = self.driver.allocate(device, self.whole_bytes)
        try:
            self.handle = self.driver.export(device, self._address)
            whole = self.driver.view(self._address, self.whole_bytes)
            self.tensor = whole[:num_bytes]
            whole[num_bytes : num_bytes + NONCE_BYTES].copy_(
                torch.frombuffer(bytearray(self.nonce), dtype=torch.uint8)
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory, which nothing may use any more: freeing what another process has open
        is undefined. The end of this process is not; the driver keeps it until they let go."""
        address, self._address = self._address, 0
        if address:
            self.driver.free(self.device, address)
