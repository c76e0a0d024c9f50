"""What two workers agree on, and what they refuse."""

import dataclasses

import pytest
import torch

from baton.errors import ConfigError, KvMismatch
from baton.v1 import common_pb2
from kvtransfer.pairing import Ends, apart, choose, differences
from kvtransfer.pool import KvPool
from kvtransfer.transports import usable
from tests.contract.kvtransfer_parts import make_pool

SHM, GLOO = common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO
NCCL, CUDA_IPC = common_pb2.TRANSPORT_NCCL, common_pb2.TRANSPORT_CUDA_IPC
ON_GPUS = [CUDA_IPC, NCCL]
MACHINE, NAMESPACE = apart("a/1/0", "b/1/0"), apart("a/1/0", "a/2/0")
ONE_HOST, APART = Ends(apart("a/1/0", "a/1/0")), Ends(MACHINE)
NEIGHBOURS = Ends("", gpu="GPU-b", reachable=("GPU-a", "GPU-b"), nccl=(2, 27, 5))
SHARED = {"reachable": ("GPU-b", "GPU-a")}  # both compute on one GPU


def ends(**changes):
    return dataclasses.replace(NEIGHBOURS, **changes)


OTHER_MACHINE, OTHER_HOST = ends(apart=MACHINE), ends(apart=NAMESPACE)
NO_PEERS = ends(reachable=("GPU-a",))


@pytest.mark.parametrize("where, first", [("host", "shm"), ("gpu", "cuda_ipc"), (None, None)])
def test_what_a_pool_can_use_depends_on_where_it_lies(where, first):
    """`--transport` names one of them, or is refused at start."""
    pool = make_pool(1, where) if where else KvPool(torch.zeros(1, 1, 2, 1, 2, 1))
    names = [first, "gloo"] if first else ["gloo"]
    assert [one.name for one in usable(pool, "127.0.0.1")] == names
    for name in names:
        assert [one.name for one in usable(pool, "127.0.0.1", name)] == [name]
    with pytest.raises(ConfigError, match=f"nccl cannot be used here; usable: {', '.join(names)}"):
        usable(pool, "127.0.0.1", "nccl")
    for name in names:
        (one,) = usable(pool, "127.0.0.1", name, "127.0.0.2")
        assert getattr(one, "host", "127.0.0.2") == "127.0.0.2"
    with pytest.raises(ConfigError, match=r"--kv-host 192\.0\.2\.1 is no address of this machine"):
        usable(pool, "127.0.0.1", "auto", "192.0.2.1")
    if pool.area is not None:
        pool.area.close()


@pytest.mark.parametrize(
    "offered, mine, where, chosen",
    [
        ([GLOO, SHM], [SHM, GLOO], ONE_HOST, SHM),
        ([GLOO, SHM], [SHM, GLOO], APART, GLOO),
        ([GLOO, 99], [SHM, GLOO], ONE_HOST, GLOO),
        ([GLOO, SHM], [GLOO], ONE_HOST, GLOO),
        ([SHM], [GLOO], ONE_HOST, "one host: prefill has shm; decode has gloo"),
        ([NCCL, 99], [GLOO], APART, "different hosts: prefill has nccl, 99"),
        (ON_GPUS, ON_GPUS, NEIGHBOURS, CUDA_IPC),
        (ON_GPUS, ON_GPUS, OTHER_MACHINE, NCCL),
        (ON_GPUS, ON_GPUS, OTHER_HOST, NCCL),
        (ON_GPUS, ON_GPUS, NO_PEERS, NCCL),
        ([CUDA_IPC], ON_GPUS, OTHER_MACHINE, "not cuda_ipc: they are on different machines"),
        ([CUDA_IPC], ON_GPUS, OTHER_HOST, "their process namespaces differ"),
        ([CUDA_IPC], ON_GPUS, NO_PEERS, "the sender's GPU cannot write to GPU-b"),
        (ON_GPUS, ON_GPUS, ends(**SHARED), CUDA_IPC),
        ([NCCL], ON_GPUS, ends(**SHARED), r"both are on GPU-b, .* from 2\.30 on.*2\.27"),
        ([NCCL], ON_GPUS, ends(**SHARED, nccl=(2, 30, 1)), NCCL),
    ],
)
def test_the_fastest_common_one_is_chosen_or_the_refusal_says_why(offered, mine, where, chosen):
    if isinstance(chosen, str):
        with pytest.raises(KvMismatch, match=chosen):
            choose(offered, mine, where)
    else:
        assert choose(offered, mine, where) == chosen


@pytest.mark.parametrize(
    "where, warned",
    [
        (NO_PEERS, True),
        (OTHER_HOST, True),
        (NEIGHBOURS, False),
        (ends(apart=MACHINE, reachable=()), False),
    ],
)
def test_nccl_without_a_direct_way_is_warned_of(where, warned, caplog):
    assert choose([NCCL], ON_GPUS, where) == NCCL
    assert ("show every GPU to every worker" in caplog.text) == warned


def test_equal_descriptors_pass_and_every_difference_is_named():
    one = common_pb2.KvDescriptor(model_fingerprint="a", dtype="float32", num_layers=2)
    two = common_pb2.KvDescriptor(model_fingerprint="a", dtype="bfloat16", num_layers=3)
    assert differences(one, one) == []
    assert differences(one, two) == ["dtype: 'float32' != 'bfloat16'", "num_layers: 2 != 3"]
