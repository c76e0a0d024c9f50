"""The few calls of CUDA's driver that share a GPU's memory between processes.

torch does not offer them for memory of its own allocator, whose segments cannot be exported when
they can grow. So the memory is taken from the driver, in the primary context of the GPU, which is
the one that torch uses. Signatures: CUDA Driver API, "Memory Management" and "Unified Addressing".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

LIBRARY = "libcuda.so.1"

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_ENABLE_PEER_ACCESS = 0x1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

# What usually helps, by CUresult; told beside the driver's own text.
_MENDS = {
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
        mend = f" ({_MENDS[code]})" if code in _MENDS else ""
        super().__init__(f"{call} failed with CUDA error {code}, {text}{mend}")
        self.call, self.code = call, code


class Driver(Protocol):
    """Memory of one GPU that other processes can open. Addresses are plain numbers.

    Every call may raise CudaError.
    """

    def allocate(self, device: torch.device, num_bytes: int) -> int:
        """Zeroed memory; returns its address."""

    def free(self, device: torch.device, address: int) -> None:
        """Gives `allocate`d memory back."""

    def export(self, device: torch.device, address: int) -> bytes:
        """What `open` of another process needs, `HANDLE_BYTES` long."""

    def open(self, device: torch.device, handle: bytes) -> int:
        """Maps another process's memory for kernels on `device`; returns where."""

    def close(self, device: torch.device, address: int) -> None:
        """Unmaps what `open` mapped."""

    def read(self, device: torch.device, address: int, num_bytes: int) -> bytes:
        """What lies there now, as `device` sees it."""

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """That memory as a uint8 tensor, which does not own it."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_ADDRESS = ctypes.c_uint64  # CUdeviceptr
_CONTEXT = ctypes.c_void_p  # CUcontext
_DEVICE = ctypes.c_int  # CUdevice

# The suffix is part of the symbol's name: the header hides it behind a macro.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(_DEVICE), ctypes.c_int),
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
    """`Driver` over the machine's libcuda. Safe to use from several threads.

    Raises OSError where there is none.
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
        """Zeroed memory; returns its address. Raises CudaError."""
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
        """Gives memory back; waits for what still uses it. Raises CudaError."""
        with self._current(device):
            self._call("cuMemFree_v2", address)

    def export(self, device: torch.device, address: int) -> bytes:
        """The handle of `allocate`d memory. Raises CudaError."""
        handle = _Handle()
        with self._current(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open(self, device: torch.device, handle: bytes) -> int:
        """Maps another process's memory. Raises CudaError, ValueError."""
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = _ADDRESS()
        with self._current(device):
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        return address.value

    def close(self, device: torch.device, address: int) -> None:
        """Unmaps it. Raises CudaError."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    def read(self, device: torch.device, address: int, num_bytes: int) -> bytes:
        """What lies there now. Raises CudaError."""
        found = ctypes.create_string_buffer(num_bytes)
        with self._current(device):
            self._call("cuMemcpyDtoH_v2", found, address, num_bytes)
        return found.raw

    def view(self, address: int, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor over it, on the GPU whose memory it is. Raises CudaError."""
        ordinal = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), _POINTER_DEVICE_ORDINAL, address)
        array = _Array(address, num_bytes)
        tensor = torch.as_tensor(array, device=torch.device("cuda", ordinal.value))
        assert tensor.data_ptr() == address, "torch copied what it should have looked at"
        return tensor

    @contextmanager
    def _current(self, device: torch.device) -> Iterator[None]:
        """Makes the GPU's primary context the calling thread's."""
        assert device.index is not None, "which GPU?"
        self._call("cuCtxPushCurrent_v2", self._primary(device.index))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_CONTEXT()))

    def _primary(self, ordinal: int) -> Any:
        """The primary context, retained once and kept: torch keeps it for as long."""
        with self._guard:
            if ordinal not in self._contexts:
                device, context = _DEVICE(), _CONTEXT()
                self._call("cuDeviceGet", ctypes.byref(device), ordinal)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[ordinal] = context
            return self._contexts[ordinal]

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(name, code, self._text(code))

    def _text(self, code: int) -> str:
        """ "CUDA_ERROR_OUT_OF_MEMORY: out of memory"."""
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if not getattr(self._library, name)(code, ctypes.byref(text)) and text.value:
                texts.append(text.value.decode(errors="replace"))
        return ": ".join(texts) or "of which the driver says nothing"


class _Array:
    """Memory as torch and others take it: https://numba.pydata.org, "CUDA Array Interface"."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
