"""Memory that other processes can map, and whose it is."""

import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from baton import shared_memory
from baton.errors import TransferFailed
from kvtransfer.pool import KvPool
from kvtransfer.transports import shm
from tests.contract.kvtransfer_parts import connected
from tests.waiting import WAIT_S

MIB = 1 << 20


@pytest.fixture
def pool():
    """9 MiB: more than is touched at once."""
    area = shm.SharedMemoryArea(9 * MIB)
    yield KvPool(area.tensor.view(torch.float32).view(9, 8, 2, 16, 16, 64), area)
    area.close()


def descriptors():
    """Open files of this process, that of the listing itself among them. What another test left
    may be closed at any time: a test looks for new ones."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def connect(pool, **change):
    """A link to the pool's own memory."""
    return connected(shm.ShmTransport(), pool, pool, **change)


def resident(name):
    """For each mapping of an area in this process, how many bytes of it are mapped to memory."""
    found = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            found += [0] if name in line else [None]
        elif line.startswith("Rss:") and found[-1] is not None:
            found[-1] = int(line.split()[1]) << 10
    return [size for size in found if size is not None]


def test_area_is_zeroed_writable_and_leaves_no_descriptor():
    before = descriptors()
    area = shm.SharedMemoryArea(100)
    assert area.tensor.shape == (100,)
    assert not area.tensor.any()
    area.tensor[7] = 3
    assert Path(f"/proc/self/fd/{area.fd}").read_bytes()[7] == 3
    with pytest.raises(PermissionError):
        os.ftruncate(area.fd, 0)  # it cannot shrink under a sender
    area.close()
    area.close()
    assert area.tensor[7] == 3
    del area
    assert descriptors() <= before


@pytest.mark.parametrize("blocks", [1, 99999, None])
def test_memory_of_another_size_is_not_mapped(pool, blocks):
    before = descriptors()
    with pytest.raises(TransferFailed, match="shm: cannot open the receiver's memory: "):
        connect(pool, blocks=blocks)
    assert descriptors() <= before


def test_only_sealed_memory_is_mapped(pool, monkeypatch):
    fd = os.memfd_create("baton-kv-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, pool.area.nbytes)
    monkeypatch.setattr(pool.area, "fd", fd)
    with pytest.raises(TransferFailed, match="not sealed"):
        connect(pool)
    os.close(fd)
    monkeypatch.undo()


def test_touched_memory_is_all_there_and_keeps_what_was_written(pool):
    def is_complete():
        return os.lseek(area.fd, 0, os.SEEK_HOLE) == area.nbytes

    area = pool.area
    area.tensor[5 * MIB] = 3
    assert not is_complete()
    area.touch()
    assert area.touched and is_complete()
    assert resident(area.name) == [area.nbytes]
    assert area.tensor.count_nonzero() == 1


@pytest.mark.parametrize("touched", [True, False])
def test_a_sender_maps_what_the_receiver_has_in_memory_until_it_closes(pool, touched):
    if touched:
        pool.area.touch()
    link = connect(pool)
    for thread in threading.enumerate():
        if thread.name == "kv-map":
            thread.join(WAIT_S)
    assert resident(pool.area.name) == [9 * MIB if touched else 0] * 2
    link.close()  # it is still referenced here, and maps nothing
    assert resident(pool.area.name) == [9 * MIB if touched else 0]


def test_a_closed_link_maps_no_further_and_an_older_kernel_maps_on_demand(pool, monkeypatch):
    stop = threading.Event()
    stop.set()
    with mmap.mmap(pool.area.fd, pool.area.nbytes) as second:
        assert not shared_memory.populate(second, shared_memory._MADV_POPULATE_WRITE, stop)
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", 9999)
    pool.area.touch()
    assert not pool.area.touched
    assert resident(pool.area.name) == [0]
