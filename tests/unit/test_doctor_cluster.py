"""What `baton doctor` says of a cluster: made-up fleets, each with one thing wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from baton.errors import KvMismatch
from baton.local.doctor import Finding
from baton.local.doctor_cluster import Pair, check_cluster, pairs_of
from baton.v1 import common_pb2, fleet_pb2, worker_pb2
from baton.v1.common_pb2 import WorkerRecord
from kvtransfer import pairing

CUDA_IPC, NCCL = common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_NCCL
SHM, GLOO = common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO
HOST = "boot-a/pid:[1]/1000"
CONTAINER = "boot-a/pid:[2]/1000"
OTHER_USER = "boot-a/pid:[1]/1001"
ELSEWHERE = "boot-b/pid:[1]/1000"
ROLES = {
    "p": common_pb2.WORKER_ROLE_PREFILL,
    "d": common_pb2.WORKER_ROLE_DECODE,
}


def cpu(name: str, host: str = HOST, **fields: Any) -> WorkerRecord:
    """A worker on a CPU; names begin with p or d, for their role."""
    return WorkerRecord(
        **{
            "incarnation": name,
            "role": ROLES[name[0]],
            "host_id": host,
            "transports": [SHM, GLOO],
            "kv": common_pb2.KvDescriptor(dtype="bfloat16", block_size=16),
            "hardware": common_pb2.Hardware(torch_version="2.11.0"),
            **fields,
        }
    )


def gpu(
    name: str,
    own: str,
    others: str = "",
    host: str = HOST,
    *,
    peers: str | None = None,
    nccl: str = "2.27.5",
    rdma: tuple[str, ...] = (),
    **fields: Any,
) -> WorkerRecord:
    """A worker on the GPU named by one letter, which sees those of `others`, too."""
    hardware = common_pb2.Hardware(
        gpu=common_pb2.Gpu(uuid=own, name="NVIDIA H100 80GB HBM3", capability="9.0"),
        visible_gpus=[own, *others],
        peer_gpus=list(others if peers is None else peers),
        nccl_version=nccl,
        rdma_devices=list(rdma),
    )
    fields = {"transports": [CUDA_IPC, NCCL], "hardware": hardware, **fields}
    return cpu(name, host, **fields)


def check(
    *records: WorkerRecord,
    state: str = "READY",
    used: pairing.Kind | None = None,
    registry: bool = True,
) -> tuple[list[Pair], list[Finding]]:
    """The pairs of a cluster of these workers, and what is found."""
    open_pairs = []
    if used is not None:
        pair = worker_pb2.PairStatus(prefill="p", decode="d", transport=used, state="OPEN")
        open_pairs.append(pair)
    status = fleet_pb2.GetStatusResponse(
        router=fleet_pb2.RouterStatus(registry_connected=registry),
        workers=[fleet_pb2.WorkerStatus(record=one, state=state) for one in records],
        pairs=open_pairs,
    )
    pairs = pairs_of(status)
    return pairs, list(check_cluster(status, pairs))


def only(findings: list[Finding]) -> Finding:
    """The one thing that was found."""
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("records", "transport"),
    [
        ((cpu("p"), cpu("d")), SHM),
        ((cpu("p", transports=[GLOO]), cpu("d")), GLOO),
        ((cpu("p"), cpu("d", ELSEWHERE)), GLOO),
        ((gpu("p", "A", "B"), gpu("d", "B", "A")), CUDA_IPC),
        ((gpu("p", "A"), gpu("d", "A")), CUDA_IPC),
        ((gpu("p", "A", "B", transports=[NCCL]), gpu("d", "B", "A")), NCCL),
        ((gpu("p", "A", "B", peers=""), gpu("d", "B", "A", peers="")), NCCL),
        (
            (gpu("p", "A", rdma=("mlx5_0",)), gpu("d", "B", host=ELSEWHERE, rdma=("mlx5_0",))),
            NCCL,
        ),
    ],
)
def test_a_good_pair_is_left_alone(records: tuple[WorkerRecord, ...], transport: int) -> None:
    pairs, findings = check(*records)
    assert [pair.transport for pair in pairs] == [transport]
    assert only(findings).level == "ok"


IB: dict[str, Any] = {"rdma": ("mlx5_0",)}
ONE_NCCL: dict[str, Any] = {"transports": [NCCL]}
UNKNOWN: dict[str, Any] = {
    "hardware": common_pb2.Hardware(torch_version="2.11.0"), "transports": [NCCL]
}  # fmt: skip


@pytest.mark.parametrize(
    ("records", "transport", "text", "fix"),
    [
        # Containers that see one GPU each fall to sockets.
        (
            (gpu("p", "A"), gpu("d", "B", host=CONTAINER)), NCCL,
            ["do not see each other's GPU", "sockets"],
            ["every GPU to every worker", "ipc: host", "pid: host", "NCCL_HOSTID"],
        ),
        # Containers that see both lack one process namespace.
        (
            (gpu("p", "A", "B"), gpu("d", "B", "A", host=CONTAINER)), NCCL,
            ["process namespaces differ"], ["pid: host"],
        ),
        # One machine or both have no RDMA.
        *(
            ((gpu("p", "A", rdma=rdma), gpu("d", "B", host=ELSEWHERE)), NCCL,
             ["NCCL will use TCP sockets"], ["/dev/infiniband"])
            for rdma in ((), ("mlx5_0",))
        ),
        # CPUs of one machine that use the network.
        *(
            ((cpu("p"), cpu("d", host)), GLOO, ["within one machine", why], ["one user"])
            for host, why in ((CONTAINER, "process namespaces differ"),
                              (OTHER_USER, "different users"))
        ),
        (
            (gpu("p", "A", **IB), gpu("d", "B", host=ELSEWHERE, nccl="2.26.2", **IB)), NCCL,
            ["NCCL 2.27.5 and 2.26.2"], ["one image"],
        ),
        (
            (gpu("p", "A", **UNKNOWN), gpu("d", "B")), NCCL,
            ["does not report which GPU"], ["--log-level debug"],
        ),
    ],
)  # fmt: skip
def test_a_pair_that_could_do_better(
    records: tuple[WorkerRecord, ...], transport: int, text: list[str], fix: list[str]
) -> None:
    pairs, findings = check(*records)
    found = only(findings)
    assert (found.level, found.subject, pairs[0].transport) == ("warn", "p → d", transport)
    assert all(part in found.text for part in text), found
    assert all(part in found.fix for part in fix), found


@pytest.mark.parametrize(
    ("records", "text", "fix"),
    [
        ((gpu("p", "A"), cpu("d")), "one computes on a GPU and the other on a CPU", "--cluster"),
        (
            (cpu("p", transports=[SHM]), cpu("d", transports=[GLOO])),
            "prefill offers shm, decode gloo", "--transport auto",
        ),
        *(
            ((cpu("p"), cpu("d", kv=common_pb2.KvDescriptor(
                **{"dtype": "bfloat16", "block_size": 16, field: value}))),
             f"{field}: ", "--kv-dtype")
            for field, value in (("model_fingerprint", "other"), ("dtype", "float32"),
                                 ("block_size", 32))
        ),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_work(records: tuple[WorkerRecord, ...], text: str, fix: str) -> None:
    pairs, findings = check(*records)
    assert pairs[0].transport is None
    assert [found.level for found in findings] == ["fail", "warn"]
    assert text in findings[1].text and fix in findings[1].fix


def test_links_and_obstacles_of_pairs_are_reported() -> None:
    prefill = gpu("p", "A", "BC")
    prefill.hardware.gpu_links.extend(["NV18 B", "SYS C"])
    pairs, _ = check(prefill, gpu("d1", "B", "AC"), gpu("d2", "C", "AB"), gpu("d3", "D"))
    assert [pair.link for pair in pairs] == ["NV18", "SYS", ""]
    pairs, _ = check(gpu("p", "A"), gpu("d", "B", host=CONTAINER))
    assert pairs[0].obstacles == {CUDA_IPC: "their process namespaces differ"}
    pairs, findings = check(gpu("p", "A", "B", peers=""), gpu("d", "B", "A", peers=""))
    assert "cannot write" in pairs[0].obstacles[CUDA_IPC] and only(findings).level == "ok"
    assert not check(gpu("p", "A"), cpu("d"))[0][0].obstacles


def test_one_pair_that_works_is_enough_not_to_fail() -> None:
    pairs, findings = check(gpu("p", "A", "B"), gpu("d1", "B", "A"), cpu("d2"))
    assert [pair.transport for pair in pairs] == [CUDA_IPC, None]
    assert (only(findings).level, only(findings).subject) == ("warn", "p → d2")


def test_one_gpu_for_both_is_for_cuda_ipc_or_a_late_nccl() -> None:
    pairs, findings = check(gpu("p", "A", **ONE_NCCL), gpu("d", "A", **ONE_NCCL))
    assert pairs[0].transport is None and findings[0].level == "fail"
    assert "2.30" in pairs[0].obstacles[NCCL]
    late = {**ONE_NCCL, "nccl": "2.30.3"}
    pairs, findings = check(gpu("p", "A", **late), gpu("d", "A", **late))
    assert pairs[0].transport == NCCL and only(findings).level == "ok"


def test_the_same_problem_of_many_pairs_is_reported_once() -> None:
    prefill = [gpu(f"p{i}", "A") for i in range(3)]
    decode = [gpu(f"d{i}", "B", host=CONTAINER) for i in range(2)]
    _, findings = check(*prefill, *decode)
    assert only(findings).subject.endswith("p1 → d1 and 2 more")


def test_an_open_link_that_is_slower_than_it_could_be() -> None:
    pairs, findings = check(cpu("p"), cpu("d"), used=GLOO)
    assert pairs[0].in_use == GLOO
    assert "uses gloo, and shm is faster" in only(findings).text
    assert only(check(cpu("p"), cpu("d"), used=SHM)[1]).level == "ok"


def test_a_cluster_that_cannot_serve() -> None:
    missing = Finding("fail", "cluster", "has no decode worker", "start one: baton decode-worker")
    assert only(check(cpu("p"))[1]) == missing
    _, findings = check(cpu("p"), cpu("d"), state="STALLED", registry=False)
    assert [(found.level, found.subject) for found in findings] == [
        ("warn", "registry"), ("warn", "p"), ("warn", "d")
    ]  # fmt: skip


OFFERS = [(CUDA_IPC, NCCL), (NCCL,), (CUDA_IPC,), (SHM, GLOO), (GLOO,)]
PLACES = [("A", ""), ("A", "B"), ("B", "A"), ("B", "")]


@pytest.mark.parametrize("host", [HOST, ELSEWHERE])
def test_the_doctor_says_what_the_workers_do(host: str) -> None:
    """Every combination of offers, sights and machines: the records lead to the Offer's choice."""
    places = list(itertools.product(PLACES, PLACES))
    for ours, theirs in itertools.product(OFFERS, OFFERS):
        for (own, others), (there, beyond) in places:
            prefill = gpu("p", own, others, transports=ours)
            decode = gpu("d", there, beyond, host=host, transports=theirs)
            ends = pairing.Ends(
                same_host=host == HOST, same_machine=host == HOST, gpu=there,
                reachable=(own, *others), nccl=(2, 27, 5),
            )  # fmt: skip
            try:
                chosen = pairing.choose(ours, theirs, ends)
            except KvMismatch:
                chosen = None
            assert pairing.fastest(prefill, decode) == chosen
