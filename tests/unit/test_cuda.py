"""Calls of CUDA's driver, against a library with its signatures and structures over memfds."""

import contextlib
import ctypes
import gc
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton import cuda
from baton.cuda import CudaArea, CudaDriver, CudaError
from tests.contract.kvtransfer_driver import CPU, StandIn, library

GPU = torch.device("cuda", 1)
UNIT = 1 << 16  # the library's granularity


@pytest.fixture
def driver():
    """One that leaves no context, no memory and no descriptor behind."""
    driver = StandIn()
    gc.collect()
    left, descriptors = driver.left, open_files()
    yield driver
    assert driver.counted("pushed") == 0, "a context was left behind"
    assert driver.left == left
    assert open_files() <= descriptors


def open_files():
    """Descriptors of GPU memory; threads of other tests' libraries open and close theirs."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(path.readlink()).startswith("/memfd:gpu"):
                found.add(path.name)
    return found


def test_memory_is_zeroed_opened_by_its_descriptor_and_given_back(driver):
    synchronized = driver.counted("synchronized")
    address, size, fd = driver.allocate(GPU, UNIT + 1)
    assert size == 2 * UNIT
    assert ctypes.string_at(address, size) == bytes(size)
    assert driver.counted("synchronized") == synchronized + 1
    assert not os.get_inheritable(fd)
    other = driver.open(torch.device("cuda", 0), fd, size)
    assert other != address
    ctypes.memmove(address + 7, b"what", 4)
    assert ctypes.string_at(other + 6, 6) == b"\0what\0"
    driver.close(GPU, address, size)  # its owner lets go
    assert ctypes.string_at(other + 6, 6) == b"\0what\0"
    with mmap.mmap(fd, size) as by_descriptor:
        assert by_descriptor[6:12] == b"\0what\0"
    driver.close(torch.device("cuda", 0), other, size)
    with pytest.raises(CudaError, match="cuMemUnmap failed with CUDA error 1,"):
        driver.close(torch.device("cuda", 0), other, size)
    os.close(fd)


def test_memory_is_seen_by_torch_where_it_lies(monkeypatch):
    seen = {}

    def as_tensor(array, device):
        seen.update(array.__cuda_array_interface__, device=device)
        return SimpleNamespace(data_ptr=lambda: seen["data"][0])

    monkeypatch.setattr(cuda.torch, "as_tensor", as_tensor)
    library()
    CudaDriver().view(4096, 60)
    assert (seen["typestr"], seen["data"], seen["device"]) == ("|u1", (4096, False), GPU)
    assert seen["shape"] == (60,)


def test_a_link_of_native_atomics_is_nvlink(driver):
    other = torch.device("cuda", 0)
    assert cuda.has_nvlink.__wrapped__(other, GPU)
    assert not cuda.has_nvlink.__wrapped__(GPU, other)
    with pytest.raises(CudaError, match="cuDeviceGetP2PAttribute"):
        cuda.has_nvlink.__wrapped__(GPU, GPU)


def test_a_failed_call_is_named_with_its_text_and_a_hint(driver):
    driver.fail("cuMemCreate", 2)
    with pytest.raises(CudaError) as failed:
        driver.allocate(GPU, 100)
    assert str(failed.value) == (
        "cuMemCreate failed with CUDA error 2, CUDA_ERROR_OUT_OF_MEMORY: out of memory"
        " (lower --gpu-memory, or end what else runs on this GPU)"
    )
    with pytest.raises(CudaError, match=r"cuDeviceGet failed with CUDA error 101, .*every GPU"):
        driver.allocate(torch.device("cuda", 7), 100)
    driver.fail("cuMemCreate", 999)
    with pytest.raises(CudaError, match=r"999, no text from the driver$"):
        driver.allocate(GPU, 100)
    driver.fail("cuMemCreate", 12345)  # which bindings do not know
    with pytest.raises(OSError, match=r"cuMemCreate of CUDA's driver cannot be called: 12345"):
        driver.allocate(GPU, 100)


def test_a_missing_driver_and_missing_bindings_are_named(monkeypatch):
    def cannot_load(_):
        raise RuntimeError("no libcuda.so.1")

    library()
    with monkeypatch.context() as patched:
        patched.setattr("cuda.bindings.driver.cuInit", cannot_load)
        with pytest.raises(OSError, match="cuInit of CUDA's driver cannot be called: no libcuda"):
            CudaDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(OSError, match=r"install baton-serving\[gpu\]"):
        CudaDriver()


@pytest.mark.parametrize(
    "call",
    ["cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuInit"],
)
def test_memory_that_cannot_be_had_leaves_nothing(driver, call):
    driver.fail(call, 801)
    with pytest.raises(OSError, match=rf"{call} failed .* cannot share GPU memory: use --transpo"):
        CudaArea(100, CPU, StandIn() if call == "cuInit" else driver)


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_opened_leaves_nothing(driver, call):
    area = CudaArea(100, CPU, driver)
    driver.fail(call, 217)
    with pytest.raises(CudaError, match=rf"{call} .* no peer access: use --transport nccl"):
        driver.open(GPU, area.fd, area.nbytes)
    with pytest.raises(CudaError, match="cuMemMap failed with CUDA error 1,"):
        driver.open(GPU, area.fd, 2 * area.nbytes)
    area.close()


def test_a_driver_that_exports_no_descriptors_is_refused_before_memory_is_taken(driver):
    can_share = ctypes.c_int.in_dll(driver._library, "can_share")
    can_share.value = 0
    try:
        with pytest.raises(
            OSError, match=r"cuda:1 cannot share .* no file descr.* update the driv"
        ):
            driver.allocate(GPU, 100)
    finally:
        can_share.value = 1


def test_an_area_is_zeroed_padded_and_closed_once(driver):
    area = CudaArea(UNIT + 8, CPU, driver)
    assert area.tensor.shape == (UNIT + 8,)
    assert not area.tensor.any()
    assert area.nbytes == 2 * UNIT
    synchronized = driver.counted("synchronized")
    area.close()
    area.close()
    assert driver.counted("synchronized") == synchronized + 1  # unmapping would not wait


def test_an_area_that_torch_cannot_see_leaves_nothing(driver, monkeypatch):
    monkeypatch.setattr(driver, "view", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CudaArea(100, CPU, driver)


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
