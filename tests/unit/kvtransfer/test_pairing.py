"""What two workers agree on, and what they refuse."""

import dataclasses

import pytest
import torch

from baton.errors import ConfigError, KvMismatch
from baton.kv_descriptor import differences
from baton.v1 import common_pb2
from kvtransfer import shared_pool
from kvtransfer.pairing import PairTopology, choose, missed_transport, separation
from kvtransfer.pool import KvPool
from kvtransfer.transports import usable
from tests.contract.kvtransfer_parts import make_pool

SHM, GLOO = common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO
NCCL, CUDA_IPC = common_pb2.TRANSPORT_NCCL, common_pb2.TRANSPORT_CUDA_IPC
ON_GPUS = [CUDA_IPC, NCCL]
MACHINE, SEPARATE = separation("a/1/0", "b/1/0"), separation("a/1/0", "a/2/0")
ONE_HOST, APART = PairTopology(separation("a/1/0", "a/1/0")), PairTopology(MACHINE)
NEIGHBOURS = PairTopology("", gpu="GPU-b", reachable=("GPU-a", "GPU-b"), nccl=(2, 27, 5))
SHARED = {"reachable": ("GPU-b", "GPU-a")}  # both compute on one GPU


def ends(**changes):
    return dataclasses.replace(NEIGHBOURS, **changes)


OTHER_MACHINE, OTHER_HOST = ends(separation=MACHINE), ends(separation=SEPARATE)
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
        for hosts in (("[::1]", name), ("127.0.0.1", name, "[::1]")):
            assert getattr(usable(pool, *hosts)[0], "host", "::1") == "::1"
    with pytest.raises(ConfigError, match=r"--kv-host 192\.0\.2\.1 is no address of this machine"):
        usable(pool, "127.0.0.1", "auto", "192.0.2.1")
    if pool.area is not None:
        pool.area.close()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(("where", "first"), [("host", "shm"), ("gpu", "cuda_ipc")])
def test_what_needs_a_folder_to_meet_in_is_not_offered_without_it(
    where, first, is_there, monkeypatch, tmp_path, caplog
):
    # The path of a socket has 107 bytes at most: where the folder is good for files alone.
    (folder := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(shared_pool, "SHARED_FOLDER", folder if is_there else tmp_path / "none")
    pool = make_pool(1, where)
    assert [one.name for one in usable(pool, "127.0.0.1")] == ["gloo"]
    assert "other processes cannot write KV here" in caplog.text
    with pytest.raises(ConfigError, match=f"{first} cannot be used here; usable: gloo"):
        usable(pool, "127.0.0.1", first)
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
        ([CUDA_IPC], ON_GPUS, OTHER_HOST, "they share no /dev/shm"),
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


def worker(transports, host="a/1/0", gpu="", peers=()):
    """A worker's record: what it offers, where it runs, its GPU and those that this one writes."""
    hardware = common_pb2.Hardware(gpu=common_pb2.Gpu(uuid=gpu), peer_gpus=peers)
    return common_pb2.WorkerRecord(transports=transports, host_id=host, hardware=hardware)


ON_CPU, CONTAINER, ELSEWHERE = [SHM, GLOO], "a/2/0", "b/1/0"
GPU_A, GPU_B = worker(ON_GPUS, gpu="GPU-a", peers=["GPU-b"]), worker(ON_GPUS, gpu="GPU-b")
BLIND = worker(ON_GPUS, gpu="GPU-a")


@pytest.mark.parametrize(
    "used, prefill, decode, expected",
    [
        (SHM, worker(ON_CPU), worker(ON_CPU), None),
        (GLOO, worker(ON_CPU), worker([GLOO]), (SHM, "the decode worker does not offer it")),
        (GLOO, worker([GLOO]), worker(ON_CPU), (SHM, "the prefill worker does not offer it")),
        (GLOO, worker([GLOO]), worker([GLOO]), None),  # as both were told
        (GLOO, worker(ON_CPU), worker(ON_CPU, CONTAINER), (SHM, SEPARATE)),
        (GLOO, worker(ON_CPU), worker(ON_CPU, ELSEWHERE), None),
        (CUDA_IPC, GPU_A, GPU_B, None),
        (NCCL, BLIND, GPU_B, (CUDA_IPC, "the sender's GPU cannot write to GPU-b")),
        (NCCL, worker([NCCL], gpu="GPU-a"), worker([NCCL], gpu="GPU-b"),
         (CUDA_IPC, "the sender's GPU cannot write to GPU-b")),
        (NCCL, worker([NCCL], gpu="GPU-a", peers=["GPU-b"]), worker([NCCL], gpu="GPU-b"), None),
        (NCCL, GPU_A, worker(ON_GPUS, CONTAINER, "GPU-b"), (CUDA_IPC, SEPARATE)),
        (NCCL, BLIND, worker(ON_GPUS, ELSEWHERE, "GPU-b"), None),
    ],
)  # fmt: skip
def test_a_slower_transport_than_two_workers_of_one_machine_should_have_is_a_fallback(
    used, prefill, decode, expected
):
    assert missed_transport(used, prefill, decode) == expected


def test_equal_descriptors_pass_and_every_difference_is_named():
    one = common_pb2.KvDescriptor(model_fingerprint="a", dtype="float32", num_layers=2)
    two = common_pb2.KvDescriptor(model_fingerprint="a", dtype="bfloat16", num_layers=3)
    assert differences(one, one) == []
    assert differences(one, two) == ["dtype: 'float32' != 'bfloat16'", "num_layers: 2 != 3"]
