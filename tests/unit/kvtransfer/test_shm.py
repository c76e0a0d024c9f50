"""Memory that other processes can map, and whose it is."""

import json
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from baton.errors import TransferFailed
from kvtransfer.pool import KvPool
from kvtransfer.transports import shm

SHAPE = (2, 1, 2, 1, 2, 1)


def descriptors():
    """Open files of this process, that of the listing itself among them."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def pool():
    area = shm.SharedMemoryArea(2 * 4 * 4)
    yield KvPool(area.tensor.view(torch.float32).view(SHAPE), area)
    area.close()


def test_area_is_zeroed_writable_and_leaves_no_descriptor():
    before = descriptors()
    area = shm.SharedMemoryArea(100)
    assert area.tensor.shape == (100,)
    assert not area.tensor.any()
    area.tensor[7] = 3
    descriptor = area.fd
    assert Path(f"/proc/self/fd/{descriptor}").read_bytes()[7] == 3
    area.close()
    area.close()
    assert area.tensor[7] == 3
    del area
    assert descriptors() == before


@pytest.mark.parametrize(
    "change, pid",
    [
        ({"name": "baton-kv-other"}, None),
        ({"name": "baton-kv-"}, None),
        ({"fd": 9999}, None),
        ({}, 2**22),
        ({}, os.getppid()),
        ({"blocks": 99999}, None),
        ({"blocks": 1}, None),
    ],
)
def test_memory_of_another_process_is_not_mapped(pool, change, pid):
    transport = shm.ShmTransport()
    place = json.loads(transport.listen(pool, "p/1").endpoint)
    before = descriptors()
    with pytest.raises(TransferFailed, match="cannot map"):
        endpoint = json.dumps({**place, **change}).encode()
        transport.connect(pool, endpoint, pid or os.getpid(), 1.0)
    assert descriptors() == before


def endpoint_of(fd, name):
    return json.dumps({"fd": fd, "name": name, "blocks": 2, "touched": False}).encode()


def test_memory_that_is_not_sealed_is_not_mapped(pool):
    fd = os.memfd_create("baton-kv-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, pool.area.nbytes)
    try:
        with pytest.raises(TransferFailed, match="not sealed"):
            shm.ShmTransport().connect(pool, endpoint_of(fd, "baton-kv-unsealed"), os.getpid(), 1.0)
        with pytest.raises(PermissionError):
            os.ftruncate(pool.area.fd, 0)  # the receiver's own cannot shrink under a sender
    finally:
        os.close(fd)


def test_a_file_is_not_written_whatever_its_name_contains(pool, tmp_path):
    path = tmp_path / f"memfd:{pool.area.name} (deleted)"
    path.write_bytes(bytes(pool.area.nbytes))
    with path.open("r+b") as file, pytest.raises(TransferFailed, match="cannot map"):
        shm.ShmTransport().connect(
            pool, endpoint_of(file.fileno(), pool.area.name), os.getpid(), 1.0
        )


def test_a_closed_link_maps_nothing_though_it_is_still_referenced(pool):
    def mappings():
        return Path("/proc/self/maps").read_text().count(pool.area.name)

    transport = shm.ShmTransport()
    before = mappings()
    link = transport.connect(pool, transport.listen(pool, "p/1").endpoint, os.getpid(), 1.0)
    assert mappings() == before + 1
    link.close()
    assert mappings() == before


@pytest.mark.parametrize("endpoint", [b"", b"[]", b"{}", b"\xff"])
def test_a_malformed_endpoint_fails(pool, endpoint):
    with pytest.raises(TransferFailed):
        shm.ShmTransport().connect(pool, endpoint, os.getpid(), 1.0)


def test_a_pool_elsewhere_than_its_area_is_refused(pool):
    with pytest.raises(ValueError, match="shared memory"):
        KvPool(torch.zeros(SHAPE), pool.area)


MIB = 1 << 20


def resident(name):
    """For each mapping of an area in this process, how many bytes of it are mapped to memory."""
    found = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            found += [0] if name in line else [None]
        elif line.startswith("Rss:") and found[-1] is not None:
            found[-1] = int(line.split()[1]) << 10
    return [size for size in found if size is not None]


def in_memory(area):
    """Whether not a page of it is missing."""
    return os.lseek(area.fd, 0, os.SEEK_HOLE) == area.nbytes


@pytest.fixture
def large():
    area = shm.SharedMemoryArea(9 * MIB)
    yield KvPool(area.tensor.view(torch.float32).view(9, 8, 2, 16, 16, 64), area)
    area.close()


def joined(pool):
    transport = shm.ShmTransport()
    return transport.connect(pool, transport.listen(pool, "p/1").endpoint, os.getpid(), 1.0)


def mapping_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kv-map"]


def test_touched_memory_is_all_there_and_keeps_what_was_written(large):
    area = large.area
    area.tensor[5 * MIB] = 3
    assert not in_memory(area)
    area.touch()
    assert area.touched
    assert in_memory(area)
    assert resident(area.name) == [area.nbytes]
    assert area.tensor.count_nonzero() == 1


@pytest.mark.parametrize("touched", [True, False])
def test_a_sender_maps_what_the_receiver_has_in_memory_and_no_more(large, touched):
    if touched:
        large.area.touch()
    link = joined(large)
    for thread in mapping_threads():
        assert touched
        thread.join(10.0)
    assert resident(large.area.name) == [9 * MIB if touched else 0] * 2
    link.close()


def test_a_closed_link_maps_no_further(large):
    large.area.touch()
    stop = threading.Event()
    stop.set()
    second = mmap.mmap(large.area.fd, large.area.nbytes)
    assert not shm._populate(second, shm._MADV_POPULATE_READ, stop)
    assert sorted(resident(large.area.name)) == [0, 9 * MIB]
    second.close()


def test_a_kernel_that_cannot_populate_is_served_all_the_same(large, monkeypatch):
    monkeypatch.setattr(shm, "_MADV_POPULATE_WRITE", 9999)
    large.area.touch()
    assert not large.area.touched
    assert resident(large.area.name) == [0]
