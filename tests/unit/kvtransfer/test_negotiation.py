"""What two workers agree on, and what they refuse."""

import pytest
import torch
from torch import distributed

from baton.errors import ConfigError, KvMismatch
from baton.v1 import common_pb2
from kvtransfer import backends, shm
from kvtransfer.negotiation import check_same, choose, usable
from kvtransfer.pool import KvPool

SHM, GLOO, NCCL = (
    common_pb2.TRANSPORT_SHM,
    common_pb2.TRANSPORT_GLOO,
    common_pb2.TRANSPORT_NCCL,
)


@pytest.fixture
def shared_pool():
    area = shm.allocate(2 * 2 * 4)
    yield KvPool(area.tensor.view(torch.float32).view(1, 1, 2, 1, 2, 1), area)
    area.close()


def test_the_fastest_common_one_is_chosen(shared_pool):
    mine = usable(shared_pool, "127.0.0.1")
    assert [transport.name for transport in mine] == ["shm", "gloo"]
    assert choose([GLOO, SHM], mine, same_host=True).kind == SHM
    assert choose([GLOO, SHM], mine, same_host=False).kind == GLOO
    assert choose([GLOO], mine, same_host=True).kind == GLOO
    assert choose([GLOO, 99], mine, same_host=True).kind == GLOO


def test_a_forced_one_is_the_only_one(shared_pool):
    mine = usable(shared_pool, "127.0.0.1", "gloo")
    assert choose([GLOO, SHM], mine, same_host=True).kind == GLOO
    with pytest.raises(KvMismatch, match="prefill has shm; decode has gloo"):
        choose([SHM], mine, same_host=True)


def test_none_in_common_names_both_sides(shared_pool):
    with pytest.raises(KvMismatch, match="different hosts: prefill has nccl, 99"):
        choose([NCCL, 99], usable(shared_pool, "127.0.0.1"), same_host=False)


@pytest.mark.parametrize("choice", ["nccl", "cuda_ipc"])
def test_what_cannot_be_used_is_a_config_error(shared_pool, choice):
    with pytest.raises(ConfigError, match=f"{choice} cannot be used here; usable: shm, gloo"):
        usable(shared_pool, "127.0.0.1", choice)


def test_a_private_pool_has_no_shm():
    pool = KvPool(torch.zeros(1, 1, 2, 1, 2, 1))
    assert [transport.name for transport in usable(pool, "127.0.0.1")] == ["gloo"]


def test_equal_descriptors_pass_and_every_difference_is_named():
    one = common_pb2.KvDescriptor(model_fingerprint="a", dtype="float32", num_layers=2)
    two = common_pb2.KvDescriptor(model_fingerprint="a", dtype="bfloat16", num_layers=3)
    check_same(one, one, "p", "d")
    with pytest.raises(KvMismatch) as refused:
        check_same(one, two, "p", "d")
    for part in ("prefill p", "decode d", "dtype: 'float32' != 'bfloat16'", "num_layers: 2 != 3"):
        assert part in str(refused.value)


def test_nccl_is_refused_where_torch_has_none():
    if distributed.is_nccl_available():
        assert backends.nccl().kind == NCCL
    else:
        with pytest.raises(RuntimeError, match="without NCCL"):
            backends.nccl()
