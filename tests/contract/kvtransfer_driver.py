"""CUDA's driver where there is no GPU: `baton.cuda.CudaDriver` over a fake libcuda, whose "GPU
memory" is memfds, with tensors on the CPU. Descriptors and mappings between processes are real.
"""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from baton.cuda import CudaDriver
from tests.waiting import WAIT_S

SOURCE = Path(__file__).parents[1] / "unit" / "fake_libcuda.c"
CPU = torch.device("cpu")


@cache
def library():
    """The fake libcuda, loaded so that this process's cuda-bindings find it by its name."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the native kernels need a C compiler, and so does this test"
    with tempfile.TemporaryDirectory(prefix="baton-libcuda-") as folder:
        path = Path(folder) / "libcuda.so.1"
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        command += ["-Wl,-soname,libcuda.so.1", "-o", path, SOURCE]
        subprocess.run(command, check=True, timeout=WAIT_S)
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


class StandIn(CudaDriver):
    """Its devices are CPUs, which are taken for the first GPU."""

    def __init__(self):
        self._library = library()
        super().__init__()

    def allocate(self, device, num_bytes):
        return super().allocate(_gpu(device), num_bytes)

    def open(self, device, fd, size):
        return super().open(_gpu(device), fd, size)

    def close(self, device, address, size):
        super().close(_gpu(device), address, size)

    def synchronize(self, device):
        super().synchronize(_gpu(device))

    def view(self, address, num_bytes):
        return torch.frombuffer(
            (ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8
        )

    def counted(self, name):
        """One of the library's counters, of all drivers in this process."""
        return ctypes.c_int.in_dll(self._library, name).value

    @property
    def left(self):
        """Handles, address ranges and mappings that have not been given up."""
        return [self.counted(name) for name in ("handles", "reserved", "mapped")]

    def fail(self, call, code):
        """Lets the next call of that name fail."""
        (ctypes.c_char * 64).in_dll(self._library, "failing").value = call.encode()
        ctypes.c_int.in_dll(self._library, "failure").value = code


def _gpu(device):
    return torch.device("cuda", 0) if device.type == "cpu" else device


DRIVER = StandIn()
