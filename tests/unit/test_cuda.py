"""Calls of CUDA's driver, against a library with its signatures; memory to share, over a twin."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton import cuda
from baton.cuda import (
    HANDLE_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    CudaArea,
    CudaDriver,
    CudaError,
)
from tests.contract.kvtransfer_driver import CPU, MemfdDriver

GPU = torch.device("cuda", 1)
SOURCE = Path(__file__).with_name("fake_libcuda.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the native kernels need a C compiler, and so does this test"
    path = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, SOURCE]
    subprocess.run(command, check=True, timeout=60)
    return path


class Fake:
    """The library's counters, and a way to let a call fail."""

    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        for name in ("retained", "synchronized", "freed", "closed"):
            ctypes.c_int.in_dll(self._library, name).value = 0

    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self._library, name).value

    def fail(self, call, code):
        (ctypes.c_char * 64).in_dll(self._library, "failing").value = call.encode()
        ctypes.c_int.in_dll(self._library, "failure").value = code


@pytest.fixture
def fake(library):
    fake = Fake(library)
    yield fake
    assert fake.depth == 0, "a context was left behind"


def test_memory_is_zeroed_exported_opened_and_given_back(library, fake, monkeypatch):
    seen = {}

    def as_tensor(array, device):
        seen.update(array.__cuda_array_interface__, device=device)
        shown = ctypes.c_ubyte * seen["shape"][0]
        return torch.frombuffer(shown.from_address(seen["data"][0]), dtype=torch.uint8)

    monkeypatch.setattr(cuda.torch, "as_tensor", as_tensor)
    driver = CudaDriver(str(library))
    address = driver.allocate(GPU, 100)
    assert ctypes.string_at(address, 100) == bytes(100)
    assert fake.synchronized == 1
    ctypes.memmove(address + 7, b"what", 4)
    assert driver.read(GPU, address + 6, 6) == b"\0what\0"
    handle = driver.export(GPU, address)
    assert len(handle) == HANDLE_BYTES
    assert driver.open(GPU, handle) == address
    assert driver.view(address, 60).shape == (60,)
    assert (seen["typestr"], seen["data"], seen["device"]) == ("|u1", (address, False), GPU)
    driver.close(GPU, address)
    driver.free(GPU, address)
    assert (fake.closed, fake.freed, fake.retained) == (1, 1, 1)


def test_a_link_of_native_atomics_is_nvlink(library, fake, monkeypatch):
    monkeypatch.setattr(cuda.CudaDriver.__init__, "__defaults__", (str(library),))
    other = torch.device("cuda", 0)
    assert cuda.has_nvlink.__wrapped__(other, GPU)
    assert not cuda.has_nvlink.__wrapped__(GPU, other)
    with pytest.raises(CudaError, match="cuDeviceGetP2PAttribute"):
        cuda.has_nvlink.__wrapped__(GPU, GPU)


def test_a_failed_call_is_named_with_its_text_and_a_hint(library, fake, tmp_path):
    driver = CudaDriver(str(library))
    fake.fail("cuMemAlloc_v2", 2)
    with pytest.raises(CudaError) as failed:
        driver.allocate(GPU, 100)
    assert str(failed.value) == (
        "cuMemAlloc_v2 failed with CUDA error 2, CUDA_ERROR_OUT_OF_MEMORY: out of memory"
        " (lower --gpu-memory, or end what else runs on this GPU)"
    )
    with pytest.raises(CudaError, match=r"cuDeviceGet failed with CUDA error 101, .*every GPU"):
        driver.allocate(torch.device("cuda", 7), 100)
    fake.fail("cuIpcGetMemHandle", 12345)
    with pytest.raises(CudaError, match=r"12345, no text from the driver$"):
        driver.export(GPU, 64)
    fake.fail("cuMemsetD8_v2", 1)
    with pytest.raises(CudaError, match="cuMemsetD8_v2"):
        driver.allocate(GPU, 100)
    assert fake.freed == 1  # what could not be zeroed
    with pytest.raises(ValueError, match="64 bytes"):
        driver.open(GPU, bytes(63))
    with pytest.raises(OSError, match="CUDA's driver cannot be loaded"):
        CudaDriver(str(tmp_path / "libcuda.so.1"))


def test_an_area_is_zeroed_padded_to_pages_and_closed_once():
    driver = MemfdDriver()
    area = CudaArea(PAGE_BYTES - 8, CPU, driver)
    assert area.tensor.shape == (area.nbytes,)
    assert not area.tensor.any()
    assert area.whole_bytes == 2 * PAGE_BYTES  # the nonce lies behind
    whole = driver.view(area._address, area.whole_bytes)
    nonce = whole[area.nbytes : area.nbytes + NONCE_BYTES]
    assert bytes(nonce.numpy()) == area.nonce
    area.close()
    area.close()
    assert not driver.mapped


def test_an_area_that_cannot_be_exported_leaves_nothing():
    class Refusing(MemfdDriver):
        def export(self, device, address):
            raise CudaError("cuIpcGetMemHandle", 801, "operation not supported")

    driver = Refusing()
    with pytest.raises(OSError, match="cannot share GPU memory: use --transport nccl"):
        CudaArea(100, CPU, driver)
    assert not driver.mapped


def test_gpus_are_named_as_the_driver_names_them(monkeypatch):
    properties = {n: SimpleNamespace(uuid=f"uuid-{n}") for n in range(3)}
    for cached in (cuda.visible_gpus, cuda.reachable_gpus):
        monkeypatch.setattr(cuda, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(cuda.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda.torch.cuda, "get_device_properties", properties.get)
    monkeypatch.setattr(cuda.torch.cuda, "can_device_access_peer", lambda own, n: n == 2)
    assert cuda.gpu_uuid(GPU) == "GPU-uuid-1"
    assert cuda.reachable_gpus(GPU) == ("GPU-uuid-1", "GPU-uuid-2")
    assert (cuda.gpu_uuid(CPU), cuda.reachable_gpus(CPU)) == ("", ())
