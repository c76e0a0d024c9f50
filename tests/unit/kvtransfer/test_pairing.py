"""What two workers agree on, and what they refuse."""

import dataclasses

import pytest
import torch
from torch import distributed

from baton.errors import ConfigError, KvMismatch
from baton.v1 import common_pb2
from kvtransfer.pairing import Ends, check_same, choose
from kvtransfer.pool import KvPool
from kvtransfer.transports import cuda, shm, usable
from kvtransfer.transports.cuda import CudaArea
from kvtransfer.transports.process_group import NcclTransport
from tests.contract.kvtransfer_driver import CPU, MemfdDriver

SHM, GLOO, NCCL, CUDA_IPC = (
    common_pb2.TRANSPORT_SHM,
    common_pb2.TRANSPORT_GLOO,
    common_pb2.TRANSPORT_NCCL,
    common_pb2.TRANSPORT_CUDA_IPC,
)

ONE_HOST, APART = Ends(same_host=True, same_machine=True), Ends(same_host=False)


@pytest.fixture
def shared_pool():
    area = shm.SharedMemoryArea(2 * 2 * 4)
    yield KvPool(area.tensor.view(torch.float32).view(1, 1, 2, 1, 2, 1), area)
    area.close()


def test_the_fastest_common_one_is_chosen(shared_pool):
    mine = usable(shared_pool, "127.0.0.1")
    assert [transport.name for transport in mine] == ["shm", "gloo"]
    for offered, ends, kind in (
        ([GLOO, SHM], ONE_HOST, SHM),
        ([GLOO, SHM], APART, GLOO),
        ([GLOO, 99], ONE_HOST, GLOO),
    ):
        assert choose(offered, mine, ends).kind == kind
    with pytest.raises(KvMismatch, match="different hosts: prefill has nccl, 99"):
        choose([NCCL, 99], mine, APART)


def test_a_forced_one_is_the_only_one(shared_pool):
    mine = usable(shared_pool, "127.0.0.1", "gloo")
    assert choose([GLOO, SHM], mine, ONE_HOST).kind == GLOO
    with pytest.raises(KvMismatch, match="prefill has shm; decode has gloo"):
        choose([SHM], mine, ONE_HOST)


@pytest.mark.parametrize("choice", ["nccl", "cuda_ipc"])
def test_what_cannot_be_used_is_a_config_error(shared_pool, choice):
    with pytest.raises(ConfigError, match=f"{choice} cannot be used here; usable: shm, gloo"):
        usable(shared_pool, "127.0.0.1", choice)


def test_a_private_pool_has_no_shm():
    pool = KvPool(torch.zeros(1, 1, 2, 1, 2, 1))
    assert [transport.name for transport in usable(pool, "127.0.0.1")] == ["gloo"]


class Able:
    """A transport, as far as a choice is concerned."""

    def __init__(self, name, kind):
        self.name, self.kind = name, kind


ON_GPUS = [Able("cuda_ipc", CUDA_IPC), Able("nccl", NCCL)]
BOTH = [CUDA_IPC, NCCL]
NEIGHBOURS = Ends(
    same_host=True, same_machine=True, gpu="GPU-b", reachable=("GPU-a", "GPU-b"), nccl=(2, 27, 5)
)


def ends(**changes):
    return dataclasses.replace(NEIGHBOURS, **changes)


def test_a_pool_in_a_cuda_area_is_offered_for_cuda_ipc():
    driver = MemfdDriver()
    area = CudaArea(2 * 2 * 4, CPU, driver)
    pool = KvPool(area.tensor.view(torch.float32).view(1, 1, 2, 1, 2, 1), area)
    assert [transport.name for transport in usable(pool, "127.0.0.1")] == ["cuda_ipc", "gloo"]
    assert [one.name for one in usable(pool, "127.0.0.1", "cuda_ipc")] == ["cuda_ipc"]
    area.close()


@pytest.mark.parametrize(
    "changes, why",
    [
        (
            {"same_host": False, "same_machine": False},
            "not cuda_ipc: they are on different machines",
        ),
        ({"same_host": False}, "not cuda_ipc: their process namespaces or users differ"),
        ({"reachable": ("GPU-a",)}, "not cuda_ipc: the sender's GPU cannot write to GPU-b"),
    ],
)
def test_others_use_nccl_or_are_told_why_not(changes, why):
    assert choose(BOTH, ON_GPUS, NEIGHBOURS).kind == CUDA_IPC
    assert choose(BOTH, ON_GPUS, ends(**changes)).kind == NCCL
    with pytest.raises(KvMismatch, match=why):
        choose([CUDA_IPC], ON_GPUS, ends(**changes))


@pytest.mark.parametrize(
    "changes, warned",
    [
        ({"reachable": ("GPU-a",)}, True),
        ({"same_host": False}, True),
        ({}, False),
        ({"same_machine": False, "reachable": ()}, False),
    ],
)
def test_nccl_without_a_direct_way_is_warned_of(changes, warned, caplog):
    assert choose([NCCL], ON_GPUS, ends(**changes)).kind == NCCL
    assert ("show every GPU to every worker" in caplog.text) == warned


def test_two_workers_on_one_gpu_use_nccl_from_2_30_on():
    shared = {"reachable": ("GPU-b", "GPU-a")}
    assert choose(BOTH, ON_GPUS, ends(**shared)).kind == CUDA_IPC
    with pytest.raises(
        KvMismatch, match=r"both are on GPU-b, which NCCL can do from 2\.30 on.*2\.27"
    ):
        choose([NCCL], ON_GPUS, ends(**shared))
    assert choose([NCCL], ON_GPUS, ends(**shared, nccl=(2, 30, 1))).kind == NCCL


def test_a_cpu_reaches_no_gpu():
    assert cuda.gpu_uuid(CPU) == ""
    assert cuda.reachable_gpus(CPU) == ()


def test_gpus_are_named_as_the_driver_names_them(monkeypatch):
    class Properties:
        def __init__(self, n):
            self.uuid = f"uuid-{n}"

    for cached in (cuda.visible_gpus, cuda.reachable_gpus):
        cached.cache_clear()
    monkeypatch.setattr(cuda.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda.torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(cuda.torch.cuda, "can_device_access_peer", lambda own, n: n == 2)
    try:
        assert cuda.gpu_uuid(torch.device("cuda", 1)) == "GPU-uuid-1"
        assert cuda.reachable_gpus(torch.device("cuda", 1)) == ("GPU-uuid-1", "GPU-uuid-2")
    finally:
        for cached in (cuda.visible_gpus, cuda.reachable_gpus):
            cached.cache_clear()


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
        assert NcclTransport("127.0.0.1").kind == NCCL
    else:
        with pytest.raises(RuntimeError, match="without NCCL"):
            NcclTransport("127.0.0.1")
