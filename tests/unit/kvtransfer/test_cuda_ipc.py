"""Whose memory a cuda_ipc link opens, when it stops, and what it leaves behind."""

import time
from functools import partial

import pytest
import torch

from baton.cuda import CudaArea, CudaError
from baton.errors import InvalidRequest, TransferFailed
from kvtransfer.kernels import reference
from kvtransfer.pool import KvPool, Slots
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tests.contract.kvtransfer_driver import CPU, StandIn
from tests.contract.kvtransfer_parts import connected

SHAPE = (6, 1, 2, 1, 4, 2)  # 64 bytes a block


@pytest.fixture
def driver():
    return StandIn()


@pytest.fixture
def pools(driver):
    """(sender's, receiver's)"""
    left = driver.left
    areas = [CudaArea(6 * 64, CPU, driver) for _ in range(2)]
    both = [KvPool(area.tensor.view(torch.float32).view(SHAPE), area) for area in areas]
    both[0].tensor.copy_(torch.randn(SHAPE))
    yield both
    for area in areas:
        area.close()
    assert driver.left == left


@pytest.fixture
def connect(driver, pools):
    """Connects to the receiver's endpoint with some fields changed."""
    return partial(connected, CudaIpcTransport(driver), *pools)


@pytest.fixture
def link(connect):
    link = connect()
    yield link
    link.close()


@pytest.mark.parametrize(
    "change, why",
    [
        ({"bytes": 1 << 40}, "memory: cuMemMap failed with CUDA error 1,"),
        ({"bytes": 128 << 10}, "memory: cuMemMap failed with CUDA error 1,"),
        ({"bytes": 64}, "memory: 6 blocks do not fit in 64 bytes"),
        ({"bytes": None, "gpu": "GPU-1"}, "memory on GPU-1: "),
        ({"blocks": 99999}, "memory: 99999 blocks do not fit"),
    ],
)
def test_memory_that_is_not_as_the_receiver_says_is_not_written(driver, connect, change, why):
    left = driver.left
    with pytest.raises(TransferFailed, match=f"cuda_ipc: cannot open the receiver's {why}"):
        connect(**change)
    assert driver.left == left


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_memory_that_kernels_cannot_reach_is_no_link(driver, connect, monkeypatch, error):
    def checksum(*arguments):
        raise error("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr(reference, "checksum", checksum)
    left = driver.left
    with pytest.raises(TransferFailed, match=r"cannot open .* cannot be accessed from Triton"):
        connect()
    assert driver.left == left


def test_a_put_in_pieces_is_one_and_writes_no_other_block(link, pools, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "PIECE_BYTES", 64)
    checksum = pools[0].new_checksum()
    local, remote = Slots((0, 2, 4, 5, 1), 18), Slots((5, 4, 3, 2, 0), 18)
    link.put(local, remote, checksum, 1.0)
    assert checksum.value == pools[0].checksum_of(local).value == pools[1].checksum_of(remote).value
    assert torch.equal(pools[1].tensor[0, ..., :2, :], pools[0].tensor[1, ..., :2, :])
    assert not pools[1].tensor[0, ..., 2:, :].any()
    before = pools[1].tensor.clone()
    with pytest.raises(InvalidRequest, match="outside the pool"):
        link.put(Slots((1,), 4), Slots((6,), 4), checksum, 1.0)
    assert torch.equal(pools[1].tensor, before)


@pytest.mark.parametrize("stop", ["aborted", "in time", "illegal memory access"])
def test_a_put_stops_between_pieces(link, pools, monkeypatch, stop):
    monkeypatch.setattr(cuda_ipc, "PIECE_BYTES", 64)
    copy = link._copier.copy
    copied = []

    def stopping(*slots):
        copied.append(copy(*slots))
        if len(copied) == 2:
            if stop == "aborted":
                link.abort()
            elif stop == "in time":
                time.sleep(0.03)
            else:
                raise RuntimeError(f"CUDA error: an {stop} was encountered")

    link._copier.copy = stopping
    ids = (0, 1, 2, 3, 4, 5)
    with pytest.raises(TransferFailed, match=stop):
        link.put(Slots(ids, 24), Slots(ids, 24), pools[0].new_checksum(), 0.02)
    assert len(copied) == 2
    assert torch.equal(pools[1].tensor[:2], pools[0].tensor[:2])
    assert not pools[1].tensor[2:].any()


def test_a_link_that_cannot_unmap_is_logged_and_closed_all_the_same(
    driver, pools, connect, caplog, monkeypatch
):
    close = driver.close

    def closed(*memory):
        close(*memory)
        raise CudaError("cuMemUnmap", 719, "unspecified launch failure")

    link = connect()
    monkeypatch.setattr(driver, "close", closed)
    link.close()
    link.close()
    monkeypatch.undo()
    assert "stays open: cuMemUnmap failed with CUDA error 719" in caplog.text
    with pytest.raises(TransferFailed):
        link.put(Slots((1,), 4), Slots((2,), 4), pools[0].new_checksum(), 1.0)
