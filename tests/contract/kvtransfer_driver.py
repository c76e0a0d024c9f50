"""A twin of CUDA's driver: "GPU memory" that lies in memfds, with tensors on the CPU.

What `cuda_ipc` does with the driver and a stream runs over it, between threads and processes.
"""

import mmap
import os
import struct
import threading
from pathlib import Path

import torch

from baton.cuda import HANDLE_BYTES, CudaError

INVALID_VALUE, INVALID_HANDLE = 1, 400
CPU = torch.device("cpu")


class MemfdDriver:
    """`baton.cuda.CudaDriver`. `mapped` are the addresses that are allocated or
    open."""

    def __init__(self):
        self._guard = threading.Lock()
        self.mapped = {}  # address -> (map, fd or None when it is another's)

    def allocate(self, device, num_bytes):
        fd = os.memfd_create("twin", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return self._keep(mmap.mmap(fd, num_bytes), fd)

    def free(self, device, address):
        _, fd = self._forget("cuMemFree_v2", address)
        os.close(fd)

    def export(self, device, address):
        _, fd = self._find("cuIpcGetMemHandle", address)
        packed = struct.pack("<iiQ", os.getpid(), fd, os.fstat(fd).st_ino)
        return packed.ljust(HANDLE_BYTES, b"\0")

    def open(self, device, handle):
        pid, fd, inode = struct.unpack_from("<iiQ", handle)
        try:
            own = os.open(Path(f"/proc/{pid}/fd/{fd}"), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CudaError("cuIpcOpenMemHandle_v2", INVALID_HANDLE, str(error)) from error
        try:
            if os.fstat(own).st_ino != inode:
                raise CudaError("cuIpcOpenMemHandle_v2", INVALID_HANDLE, "another file")
            return self._keep(mmap.mmap(own, 0), None)
        finally:
            os.close(own)

    def close(self, device, address):
        self._forget("cuIpcCloseMemHandle", address)

    def read(self, device, address, num_bytes):
        base = max(start for start in self.mapped if start <= address)
        mapped, _ = self._find("cuMemcpyDtoH_v2", base)
        return mapped[address - base : address - base + num_bytes]

    def view(self, address, num_bytes):
        mapped, _ = self._find("cuPointerGetAttribute", address)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes)

    def _keep(self, mapped, fd):
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        with self._guard:
            self.mapped[address] = (mapped, fd)
        return address

    def _find(self, call, address):
        if address not in self.mapped:
            raise CudaError(call, INVALID_VALUE, "no such address")
        return self.mapped[address]

    def _forget(self, call, address):
        with self._guard:
            self._find(call, address)
            return self.mapped.pop(address)


DRIVER = MemfdDriver()
