"""Memory that other processes can map, and whose it is."""

import json
from pathlib import Path

import pytest
import torch

from baton.errors import TransferFailed
from kvtransfer import shm
from kvtransfer.pool import KvPool

SHAPE = (2, 1, 2, 1, 2, 1)


def descriptors():
    """Open files of this process, that of the listing itself among them."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def pool():
    area = shm.allocate(2 * 4 * 4)
    yield KvPool(area.tensor.view(torch.float32).view(SHAPE), area)
    area.close()


def test_area_is_zeroed_writable_and_leaves_no_descriptor():
    before = descriptors()
    area = shm.allocate(100)
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
    "change", [{"name": "baton-kv-other"}, {"fd": 9999}, {"pid": 2**22}, {"blocks": 99999}]
)
def test_memory_of_somebody_else_is_not_mapped(pool, change):
    transport = shm.ShmTransport()
    place = json.loads(transport.listen(pool).offer("p", 1))
    before = descriptors()
    with pytest.raises(TransferFailed, match="cannot map"):
        transport.connect(pool, json.dumps({**place, **change}).encode(), 1.0)
    assert descriptors() == before


@pytest.mark.parametrize("endpoint", [b"", b"[]", b"{}", b"\xff"])
def test_an_endpoint_that_is_none_fails(pool, endpoint):
    with pytest.raises(TransferFailed):
        shm.ShmTransport().connect(pool, endpoint, 1.0)


def test_a_pool_elsewhere_than_its_area_is_refused(pool):
    with pytest.raises(ValueError, match="shared memory"):
        KvPool(torch.zeros(SHAPE), pool.area)
