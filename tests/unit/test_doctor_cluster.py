"""What `baton doctor` says of a cluster: made-up fleets, most with one thing wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from baton.errors import KvMismatch
from baton.local.doctor import Finding
from baton.local.doctor_cluster import check_cluster
from baton.v1 import common_pb2, fleet_pb2, worker_pb2
from baton.v1.common_pb2 import WorkerRecord
from kvtransfer import pairing

CUDA_IPC, NCCL = common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_NCCL
SHM, GLOO = common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO
HOST = "boot-a/pid:[1]/1000"
CONTAINER = "boot-a/pid:[2]/1000"
OTHER_USER = "boot-a/pid:[1]/1001"
ELSEWHERE = "boot-b/pid:[1]/1000"
ROLES = {"p": common_pb2.WORKER_ROLE_PREFILL, "d": common_pb2.WORKER_ROLE_DECODE}


def cpu(name: str, host: str = HOST, **fields: Any) -> WorkerRecord:
    """A worker on a CPU; names begin with p or d, for their role."""
    known = {
        "incarnation": name, "role": ROLES[name[0]], "host_id": host, "transports": [SHM, GLOO],
        "kv": common_pb2.KvDescriptor(dtype="bfloat16", block_size=16),
        "hardware": common_pb2.Hardware(torch_version="2.11.0"),
    }  # fmt: skip
    return WorkerRecord(**{**known, **fields})


def gpu(
    name: str, own: str, others: str = "", host: str = HOST, *, peers: str | None = None,
    nccl: str = "2.27.5", rdma: tuple[str, ...] = (), **fields: Any,
) -> WorkerRecord:  # fmt: skip
    """A worker on the GPU named by one letter, which sees those of `others`, too."""
    hardware = common_pb2.Hardware(
        gpu=common_pb2.Gpu(uuid=own, name="NVIDIA H100 80GB HBM3", capability="9.0"),
        visible_gpus=[own, *others], peer_gpus=others if peers is None else peers,
        nccl_version=nccl, rdma_devices=rdma,
    )  # fmt: skip
    return cpu(name, host, **{"transports": [CUDA_IPC, NCCL], "hardware": hardware, **fields})


def check(
    *records: WorkerRecord, state: str = "READY", used: pairing.Kind | None = None,
    registry: bool = True,
) -> tuple[list[dict[str, Any]], list[Finding]]:  # fmt: skip
    """The pairs of a cluster of these workers, and what is found."""
    link = worker_pb2.PairStatus(prefill="p", decode="d", transport=used or 0, state="OPEN")
    return check_cluster(
        fleet_pb2.GetStatusResponse(
            router=fleet_pb2.RouterStatus(registry_connected=registry),
            workers=[fleet_pb2.WorkerStatus(record=one, state=state) for one in records],
            pairs=[link] if used else [],
        )
    )


IB: dict[str, Any] = {"rdma": ("mlx5_0",)}
ONE_NCCL: dict[str, Any] = {"transports": [NCCL]}
LATE_NCCL: dict[str, Any] = {**ONE_NCCL, "nccl": "2.30.3"}
UNKNOWN: dict[str, Any] = {
    "hardware": common_pb2.Hardware(torch_version="2.11.0"), "transports": [NCCL]
}  # fmt: skip


@pytest.mark.parametrize(
    ("prefill", "decode", "transport", "finding"),
    [
        (cpu("p"), cpu("d"), "shm", ""),
        (cpu("p", transports=[GLOO]), cpu("d"), "gloo", ""),
        (cpu("p"), cpu("d", ELSEWHERE), "gloo", ""),
        (gpu("p", "A", "B"), gpu("d", "B", "A"), "cuda_ipc", ""),
        (gpu("p", "A"), gpu("d", "A"), "cuda_ipc", ""),
        (gpu("p", "A", "B", transports=[NCCL]), gpu("d", "B", "A"), "nccl", ""),
        (gpu("p", "A", "B", peers=""), gpu("d", "B", "A", peers=""), "nccl", ""),
        (gpu("p", "A", **IB), gpu("d", "B", host=ELSEWHERE, **IB), "nccl", ""),
        (gpu("p", "A", **LATE_NCCL), gpu("d", "A", **LATE_NCCL), "nccl", ""),
        # Containers that see one GPU each fall to sockets.
        (gpu("p", "A"), gpu("d", "B", host=CONTAINER), "nccl",
         "do not see each other's GPU … sockets → show every GPU to every worker … pid: host"),
        # Containers that see both lack one process namespace.
        (gpu("p", "A", "B"), gpu("d", "B", "A", host=CONTAINER), "nccl",
         "process namespaces differ → … pid: host"),
        # One machine or both have no RDMA.
        *((gpu("p", "A", rdma=rdma), gpu("d", "B", host=ELSEWHERE), "nccl",
           "NCCL will use TCP sockets … → … /dev/infiniband") for rdma in ((), ("mlx5_0",))),
        # CPUs of one machine that use the network.
        (cpu("p"), cpu("d", CONTAINER), "gloo",
         "within one machine: their process namespaces differ → run both as one user"),
        (cpu("p"), cpu("d", OTHER_USER), "gloo",
         "within one machine: they run as different users → run both as one user"),
        (gpu("p", "A", **IB), gpu("d", "B", host=ELSEWHERE, nccl="2.26.2", **IB), "nccl",
         "NCCL 2.27.5 and 2.26.2 … → … one image"),
        (gpu("p", "A", **UNKNOWN), gpu("d", "B"), "nccl",
         "does not report which GPU … → … --log-level debug"),
        # What cannot work.
        (gpu("p", "A", **ONE_NCCL), gpu("d", "A", **ONE_NCCL), None, "no transport"),
        (gpu("p", "A"), cpu("d"), None,
         "one computes on a GPU and the other on a CPU … → … --cluster"),
        (cpu("p", transports=[SHM]), cpu("d", transports=[GLOO]), None,
         "prefill offers shm, decode gloo → start both with --transport auto"),
        *((cpu("p"), cpu("d", kv=common_pb2.KvDescriptor(
            **{"dtype": "bfloat16", "block_size": 16, field: value})), None,
           f"{field}: … → … --kv-dtype") for field, value in (
            ("model_fingerprint", "other"), ("dtype", "float32"), ("block_size", 32))),
    ],
)  # fmt: skip
def test_a_pair_and_what_it_could_do_better(
    prefill: WorkerRecord, decode: WorkerRecord, transport: str | None, finding: str
) -> None:
    (pair,), findings = check(prefill, decode)
    assert pair["transport"] == transport
    levels = ["ok"] if not finding else ["warn"] if transport else ["fail", "warn"]
    assert [one.level for one in findings] == levels
    if finding:
        said = findings[-1]
        assert said.subject == "p → d" and pair["problems"] == [said.text]
        at = 0
        for part in finding.split("…"):  # in this order
            at = f"{said.text} → {said.fix}".index(part.strip(), at)


def test_links_and_obstacles_of_pairs_are_reported() -> None:
    prefill = gpu("p", "A", "BC")
    prefill.hardware.gpu_links.extend(["NV18 B", "SYS C"])
    pairs, _ = check(prefill, gpu("d1", "B", "AC"), gpu("d2", "C", "AB"), gpu("d3", "D"))
    assert [pair["link"] for pair in pairs] == ["NV18", "SYS", None]
    apart, _ = check(gpu("p", "A"), gpu("d", "B", host=CONTAINER))
    assert apart[0]["not_possible"] == {"cuda_ipc": "their process namespaces differ"}
    no_peers, _ = check(gpu("p", "A", "B", peers=""), gpu("d", "B", "A", peers=""))
    assert "cannot write" in no_peers[0]["not_possible"]["cuda_ipc"]
    shared, _ = check(gpu("p", "A", **ONE_NCCL), gpu("d", "A", **ONE_NCCL))
    assert "2.30" in shared[0]["not_possible"]["nccl"]
    assert not check(gpu("p", "A"), cpu("d"))[0][0]["not_possible"]


def test_problems_of_several_pairs() -> None:
    """One pair that works is enough not to fail; the same problem is reported once."""
    pairs, (found,) = check(gpu("p", "A", "B"), gpu("d1", "B", "A"), cpu("d2"))
    assert [pair["transport"] for pair in pairs] == ["cuda_ipc", None]
    assert (found.level, found.subject) == ("warn", "p → d2")
    prefill = [gpu(f"p{i}", "A") for i in range(3)]
    _, (found,) = check(*prefill, *(gpu(f"d{i}", "B", host=CONTAINER) for i in range(2)))
    assert found.subject.endswith("p1 → d1 and 2 more")


def test_links_that_could_be_faster_and_clusters_that_cannot_serve() -> None:
    (pair,), (found,) = check(cpu("p"), cpu("d"), used=GLOO)
    assert pair["in_use"] == "gloo" and "uses gloo, and shm is faster" in found.text
    _, (found,) = check(cpu("p"), cpu("d"), used=SHM)
    assert found.level == "ok"
    missing = Finding("fail", "cluster", "has no decode worker", "start one: baton decode-worker")
    assert check(cpu("p")) == ([], [missing])
    _, findings = check(cpu("p"), cpu("d"), state="STALLED", registry=False)
    subjects = [(found.level, found.subject) for found in findings]
    assert subjects == [("warn", "registry"), ("warn", "p"), ("warn", "d")]


OFFERS = [(CUDA_IPC, NCCL), (NCCL,), (CUDA_IPC,), (SHM, GLOO), (GLOO,)]
PLACES = [("A", ""), ("A", "B"), ("B", "A"), ("B", "")]


@pytest.mark.parametrize("host", [HOST, ELSEWHERE])
def test_the_workers_choose_the_transport_that_is_reported(host: str) -> None:
    """Every combination of offers, sights and machines: the records lead to the Offer's choice."""
    for ours, theirs, (own, others), (there, beyond) in itertools.product(
        OFFERS, OFFERS, PLACES, PLACES
    ):
        prefill = gpu("p", own, others, transports=ours)
        decode = gpu("d", there, beyond, host=host, transports=theirs)
        reachable = (own, *others)
        apart = pairing.apart(HOST, host)
        ends = pairing.Ends(apart, gpu=there, reachable=reachable, nccl=(2, 27, 5))
        try:
            chosen = pairing.choose(ours, theirs, ends)
        except KvMismatch:
            chosen = None
        assert pairing.fastest(prefill, decode) == chosen
