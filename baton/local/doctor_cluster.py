"""The checks of `baton doctor` on a cluster: its workers, and every pair of them.

A pair's transport follows from the two records by `kvtransfer.pairing`, as the workers decide it
themselves; here it is explained, with what it costs and how to do better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from baton.local.doctor import Finding, fail, ok, warn
from baton.v1 import common_pb2
from baton.v1.common_pb2 import WorkerRecord
from baton.v1.fleet_pb2 import GetStatusResponse
from kvtransfer import pairing
from kvtransfer.pairing import Kind

_MAX_PAIRS_NAMED = 4
# Fastest first.
_ON_CPU = (common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO)
_ON_GPU = (common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_NCCL)
_ROLES = {common_pb2.WORKER_ROLE_PREFILL: "prefill", common_pb2.WORKER_ROLE_DECODE: "decode"}


@dataclass(frozen=True)
class Problem:
    """What a pair could do better, and how."""

    text: str
    fix: str


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, and the transport that they would agree on now.

    Without a transport their handoffs fail. `link` is what connects their GPUs by the driver
    ("NV18", "SYS"); empty where it is not known. `obstacles` says why each faster transport cannot
    be used. `in_use` is the transport of their open link, None without one.
    """

    prefill: WorkerRecord
    decode: WorkerRecord
    transport: Kind | None
    link: str
    obstacles: Mapping[Kind, str]
    problems: tuple[Problem, ...]
    in_use: Kind | None

    @property
    def name(self) -> str:
        """Which two."""
        return f"{self.prefill.incarnation} → {self.decode.incarnation}"


def pairs_of(status: GetStatusResponse) -> list[Pair]:
    """Every prefill worker with every decode worker, in the router's order."""
    used = {
        (pair.prefill, pair.decode): pair.transport
        for pair in status.pairs
        if pair.state == "OPEN" and pair.transport
    }
    return [
        _pair(prefill, decode, used.get((prefill.incarnation, decode.incarnation)))
        for prefill in _workers(status, common_pb2.WORKER_ROLE_PREFILL)
        for decode in _workers(status, common_pb2.WORKER_ROLE_DECODE)
    ]


def check_cluster(status: GetStatusResponse, pairs: list[Pair]) -> Iterator[Finding]:
    """What is wrong in the cluster; one line that says so where nothing is."""
    found = [*_workers_findings(status), *_pairs_findings(pairs)]
    yield from found or [ok("cluster", "every worker is READY, every pair does its best")]


def _workers(status: GetStatusResponse, role: common_pb2.WorkerRole) -> list[WorkerRecord]:
    return [worker.record for worker in status.workers if worker.record.role == role]


def _workers_findings(status: GetStatusResponse) -> Iterator[Finding]:
    for role, name in _ROLES.items():
        if not _workers(status, role):
            yield fail("cluster", f"has no {name} worker", f"start one: baton {name}-worker")
    if not status.router.registry_connected:
        yield warn("registry", "the router does not reach etcd: no worker joins or leaves")
    for worker in status.workers:
        if worker.state != "READY":
            why = f": {worker.reason}" if worker.reason else ""
            yield warn(worker.record.incarnation, f"{worker.state}{why}")


def _pairs_findings(pairs: list[Pair]) -> Iterator[Finding]:
    """Problems of pairs, those of the same kind together."""
    if pairs and all(pair.transport is None for pair in pairs):
        yield fail("pairs", "none can hand a prompt's KV over", "see the reasons below")
    grouped: dict[Problem, list[str]] = {}
    for pair in pairs:
        for problem in pair.problems:
            grouped.setdefault(problem, []).append(pair.name)
        best, used = pair.transport, pair.in_use
        if best is not None and used is not None and used != best:
            names = pairing.name_of(used), pairing.name_of(best)
            text = f"the open link uses {names[0]}, and {names[1]} is faster"
            slower = Problem(text, "restart the workers of this pair if it stays so")
            grouped.setdefault(slower, []).append(pair.name)
    for problem, named in grouped.items():
        more = len(named) - _MAX_PAIRS_NAMED
        listed = ", ".join(named[:_MAX_PAIRS_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield warn(listed, problem.text, problem.fix)


def _on_gpu(record: WorkerRecord) -> bool:
    """Whether a worker's KV lies on a GPU."""
    described = bool(record.hardware.gpu.name or record.hardware.gpu.uuid)
    return described or any(kind in record.transports for kind in _ON_GPU)


def _pair(prefill: WorkerRecord, decode: WorkerRecord, in_use: Kind | None) -> Pair:
    different = pairing.differences(prefill.kv, decode.kv)
    chosen = None if different else pairing.fastest(prefill, decode)
    kinds: list[Kind] = []  # of the pair's own kind of memory, fastest first
    if not different and _on_gpu(prefill) == _on_gpu(decode):
        kinds = list(_ON_GPU if _on_gpu(prefill) else _ON_CPU)
    faster = kinds[: kinds.index(chosen)] if chosen in kinds else kinds
    there = decode.hardware.gpu.uuid
    links = (link.partition(" ") for link in prefill.hardware.gpu_links)
    return Pair(
        prefill,
        decode,
        transport=chosen,
        link=next((kind for kind, _, uuid in links if there and uuid == there), ""),
        obstacles={kind: pairing.obstacle(kind, prefill, decode) for kind in faster},
        problems=tuple(_problems(prefill, decode, chosen, different)),
        in_use=in_use,
    )


def _problems(
    prefill: WorkerRecord, decode: WorkerRecord, chosen: Kind | None, different: list[str]
) -> Iterator[Problem]:
    if _on_gpu(prefill) != _on_gpu(decode):
        yield Problem(
            "one computes on a GPU and the other on a CPU: KV cannot travel between them",
            "use one kind of device in a cluster, or two clusters (--cluster)",
        )
    elif different:
        yield Problem(
            f"their KV caches differ in {'; '.join(different)}",
            "start both with the same model, --dtype, --kv-dtype, --quantization and --block-size",
        )
    elif chosen is None:
        yield Problem(
            f"no transport that both can use: prefill offers {_names(prefill)}, decode "
            f"{_names(decode)}",
            "start both with --transport auto",
        )
    elif chosen == common_pb2.TRANSPORT_NCCL:
        yield from _nccl_problems(prefill, decode)
    elif chosen == common_pb2.TRANSPORT_GLOO:
        shm = common_pb2.TRANSPORT_SHM
        both = shm in prefill.transports and shm in decode.transports
        if both and pairing.ends_between(prefill, decode).same_machine:
            why = pairing.apart(prefill.host_id, decode.host_id)
            yield Problem(
                f"KV travels over the network within one machine: {why}",
                "run both as one user in one process namespace (in containers pid: host), or leave "
                "it: gloo works",
            )


def _nccl_problems(prefill: WorkerRecord, decode: WorkerRecord) -> Iterator[Problem]:
    ours, theirs = prefill.hardware, decode.hardware
    if not (ours.gpu.uuid and theirs.gpu.uuid):
        yield Problem(
            "a worker does not report which GPU it computes on",
            "see its log at --log-level debug; without it faster transports cannot be judged",
        )
    elif not pairing.ends_between(prefill, decode).same_machine:
        if not (ours.rdma_devices and theirs.rdma_devices):
            yield Problem(
                "between their machines NCCL will use TCP sockets: one has no RDMA device",
                "give both RDMA devices (in containers /dev/infiniband and memlock: -1), or place "
                "them on one machine",
            )
    elif ours.gpu.uuid not in theirs.visible_gpus or theirs.gpu.uuid not in ours.visible_gpus:
        yield Problem(
            "they are on one machine and do not see each other's GPU: NCCL can use neither NVLink "
            "nor PCIe between them and falls to the host's memory or to sockets",
            "show every GPU to every worker and choose with --device cuda:N; in containers also "
            "ipc: host, pid: host and one NCCL_HOSTID for the machine",
        )
    elif prefill.host_id != decode.host_id and theirs.gpu.uuid in ours.peer_gpus:
        why = pairing.apart(prefill.host_id, decode.host_id)
        yield Problem(
            f"NCCL moves KV that one GPU could write straight into the other: {why}",
            "run both as one user in one process namespace (in containers pid: host)",
        )
    if ours.nccl_version and theirs.nccl_version and ours.nccl_version != theirs.nccl_version:
        yield Problem(
            f"NCCL {ours.nccl_version} and {theirs.nccl_version} may not understand each other",
            "run both with one image",
        )


def _names(record: WorkerRecord) -> str:
    return ", ".join(pairing.name_of(kind) for kind in record.transports) or "none"
