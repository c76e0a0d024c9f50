"""What `baton doctor` says of a cluster: made-up fleets, each with one thing wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from baton.errors import KvMismatch
from baton.local.doctor import fleet
from baton.local.doctor.finding import Finding, Level
from baton.v1 import common_pb2, fleet_pb2, worker_pb2
from baton.v1.common_pb2 import WorkerRecord
from kvtransfer import pairing
from kvtransfer.interface import Transport

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


def told(
    *records: WorkerRecord,
    state: str = "READY",
    used: pairing.Kind | None = None,
    registry: bool = True,
) -> tuple[list[fleet.Pair], list[Finding]]:
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
    pairs = fleet.pairs_of(status)
    return pairs, list(fleet.examine(status, pairs))


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
    pairs, findings = told(*records)
    assert [pair.judgement.transport for pair in pairs] == [transport]
    assert only(findings).level is Level.OK


def test_containers_that_see_one_gpu_each_fall_to_sockets() -> None:
    pairs, findings = told(gpu("p", "A"), gpu("d", "B", host=CONTAINER))
    found = only(findings)
    assert (found.level, found.subject) == (Level.WARN, "p → d")
    assert "do not see each other's GPU" in found.text and "sockets" in found.text
    for mend in ("every GPU to every worker", "ipc: host", "pid: host", "NCCL_HOSTID"):
        assert mend in found.mend
    judged = pairs[0].judgement
    assert judged.transport == NCCL
    assert judged.obstacles == {CUDA_IPC: "their process namespaces differ"}


def test_containers_that_see_both_gpus_lack_one_process_namespace() -> None:
    _, findings = told(gpu("p", "A", "B"), gpu("d", "B", "A", host=CONTAINER))
    found = only(findings)
    assert "process namespaces differ" in found.text and "pid: host" in found.mend


def test_what_lies_between_two_gpus_is_told() -> None:
    prefill = gpu("p", "A", "BC")
    prefill.hardware.gpu_links.extend(["NV18 B", "SYS C"])
    pairs, _ = told(prefill, gpu("d1", "B", "AC"), gpu("d2", "C", "AB"), gpu("d3", "D"))
    assert [pair.judgement.link for pair in pairs] == ["NV18", "SYS", ""]


def test_gpus_that_are_no_peers_are_explained_and_not_complained_of() -> None:
    pairs, findings = told(gpu("p", "A", "B", peers=""), gpu("d", "B", "A", peers=""))
    assert "cannot write" in pairs[0].judgement.obstacles[CUDA_IPC]
    assert only(findings).level is Level.OK


@pytest.mark.parametrize("rdma", [(), ("mlx5_0",)])
def test_machines_of_which_one_has_no_rdma_use_tcp(rdma: tuple[str, ...]) -> None:
    _, findings = told(gpu("p", "A", rdma=rdma), gpu("d", "B", host=ELSEWHERE))
    found = only(findings)
    assert "NCCL will use TCP sockets" in found.text and "/dev/infiniband" in found.mend


@pytest.mark.parametrize(
    ("host", "why"), [(CONTAINER, "process namespaces differ"), (OTHER_USER, "different users")]
)
def test_cpus_of_one_machine_that_use_the_network(host: str, why: str) -> None:
    pairs, findings = told(cpu("p"), cpu("d", host))
    assert pairs[0].judgement.transport == GLOO
    found = only(findings)
    assert "within one machine" in found.text and why in found.text and "one user" in found.mend


def test_a_gpu_and_a_cpu_never_talk() -> None:
    pairs, findings = told(gpu("p", "A"), cpu("d"))
    assert pairs[0].judgement.transport is None and not pairs[0].judgement.obstacles
    assert [found.level for found in findings] == [Level.FAIL, Level.WARN]
    assert "one computes on a GPU and the other on a CPU" in findings[1].text


def test_one_pair_that_works_is_enough_not_to_fail() -> None:
    pairs, findings = told(gpu("p", "A", "B"), gpu("d1", "B", "A"), cpu("d2"))
    assert [pair.judgement.transport for pair in pairs] == [CUDA_IPC, None]
    assert only(findings).level is Level.WARN and only(findings).subject == "p → d2"


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_fingerprint", "other"), ("dtype", "float32"), ("block_size", 32)],
)
def test_caches_that_mean_different_things(field: str, value: Any) -> None:
    other = common_pb2.KvDescriptor(dtype="bfloat16", block_size=16)
    setattr(other, field, value)
    pairs, findings = told(cpu("p"), cpu("d", kv=other))
    assert pairs[0].judgement.transport is None
    assert findings[1].level is Level.WARN and f"{field}: " in findings[1].text


def test_transports_that_exclude_each_other() -> None:
    _, findings = told(cpu("p", transports=[SHM]), cpu("d", transports=[GLOO]))
    assert "prefill offers shm, decode gloo" in findings[1].text
    assert "--transport auto" in findings[1].mend


def test_one_gpu_for_both_is_for_cuda_ipc_or_a_late_nccl() -> None:
    alone: dict[str, Any] = {"transports": [NCCL]}
    pairs, findings = told(gpu("p", "A", **alone), gpu("d", "A", **alone))
    assert pairs[0].judgement.transport is None and findings[0].level is Level.FAIL
    assert "2.30" in pairs[0].judgement.obstacles[NCCL]
    late: dict[str, Any] = {**alone, "nccl": "2.30.3"}
    pairs, findings = told(gpu("p", "A", **late), gpu("d", "A", **late))
    assert pairs[0].judgement.transport == NCCL and only(findings).level is Level.OK


def test_two_versions_of_nccl() -> None:
    rdma: dict[str, Any] = {"rdma": ("mlx5_0",)}
    _, findings = told(gpu("p", "A", **rdma), gpu("d", "B", host=ELSEWHERE, nccl="2.26.2", **rdma))
    assert "NCCL 2.27.5 and 2.26.2" in only(findings).text


def test_a_gpu_that_was_not_described() -> None:
    silent = common_pb2.Hardware(torch_version="2.11.0")
    pairs, findings = told(gpu("p", "A", hardware=silent, transports=[NCCL]), gpu("d", "B"))
    assert pairs[0].judgement.transport == NCCL
    assert "does not tell which GPU" in only(findings).text


def test_the_same_trouble_of_many_pairs_is_told_once() -> None:
    prefill = [gpu(f"p{i}", "A") for i in range(3)]
    decode = [gpu(f"d{i}", "B", host=CONTAINER) for i in range(2)]
    _, findings = told(*prefill, *decode)
    assert only(findings).subject.endswith("p1 → d1 and 2 more")


def test_an_open_link_that_is_slower_than_it_could_be() -> None:
    pairs, findings = told(cpu("p"), cpu("d"), used=GLOO)
    assert pairs[0].in_use == GLOO
    assert "uses gloo, and shm is faster" in only(findings).text
    _, findings = told(cpu("p"), cpu("d"), used=SHM)
    assert only(findings).level is Level.OK


def test_a_cluster_that_cannot_serve() -> None:
    _, findings = told(cpu("p"))
    assert only(findings) == Finding(
        Level.FAIL, "cluster", "has no decode worker", "start one: baton decode-worker"
    )
    _, findings = told(cpu("p"), cpu("d"), state="STALLED", registry=False)
    assert [found.level for found in findings] == [Level.WARN] * 3
    assert [found.subject for found in findings] == ["registry", "prefill p", "decode d"]


class Named(Transport):
    """Of a kind, and nothing else: it is only chosen."""

    def __init__(self, kind: pairing.Kind) -> None:
        self.kind, self.name = kind, pairing.name_of(kind)

    def listen(self, pool: Any) -> Any:
        raise NotImplementedError

    def connect(self, pool: Any, endpoint: bytes, timeout_s: float) -> Any:
        raise NotImplementedError


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
                chosen = pairing.choose(ours, [Named(kind) for kind in theirs], ends).kind
            except KvMismatch:
                chosen = None
            assert pairing.fastest(prefill, decode) == chosen
