"""How one prefill worker's KV reaches one decode worker, by what both tell of themselves.

The rule is `kvtransfer.pairing`, by which the workers themselves decide; here it is explained, with
what it costs and how to do better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.v1 import common_pb2
from baton.v1.common_pb2 import WorkerRecord
from kvtransfer import pairing
from kvtransfer.pairing import Kind

# Fastest first.
_ON_CPU = (common_pb2.TRANSPORT_SHM, common_pb2.TRANSPORT_GLOO)
_ON_GPU = (common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_NCCL)
_ONE_CONTAINER_LIKE = (
    "show every GPU to every worker and choose with --device cuda:N; in containers also ipc: host, "
    "pid: host and one NCCL_HOSTID for the machine"
)


@dataclass(frozen=True)
class Trouble:
    """What is not as it could be with a pair; `mend` says how to change that."""

    text: str
    mend: str


@dataclass(frozen=True)
class Judgement:
    """What a pair would do: the transport, why not a faster one, and what to do about it.

    Without a transport its handoffs fail. `link` is what lies between their GPUs, as the driver
    tells ("NV18", "SYS"); empty where it is not known.
    """

    transport: Kind | None
    link: str
    obstacles: dict[Kind, str]
    troubles: tuple[Trouble, ...]


def judge(prefill: WorkerRecord, decode: WorkerRecord) -> Judgement:
    """The pair by its records."""
    different = pairing.differences(prefill.kv, decode.kv)
    chosen = None if different else pairing.fastest(prefill, decode)
    kinds = [] if different else _worth_telling(prefill, decode)
    faster = kinds[: kinds.index(chosen)] if chosen in kinds else kinds
    obstacles = {kind: pairing.obstacle(kind, prefill, decode) for kind in faster}
    troubles = tuple(_troubles(prefill, decode, chosen, different))
    return Judgement(chosen, _link(prefill, decode), obstacles, troubles)


def on_gpu(record: WorkerRecord) -> bool:
    """Whether a worker's KV lies on a GPU."""
    told = bool(record.hardware.gpu.name or record.hardware.gpu.uuid)
    return told or any(kind in record.transports for kind in _ON_GPU)


def _link(prefill: WorkerRecord, decode: WorkerRecord) -> str:
    there = decode.hardware.gpu.uuid
    ways = (link.partition(" ") for link in prefill.hardware.gpu_links)
    return next((kind for kind, _, uuid in ways if there and uuid == there), "")


def _worth_telling(prefill: WorkerRecord, decode: WorkerRecord) -> list[Kind]:
    """Transports of the pair's own kind of memory, fastest first; none if they have no such."""
    if on_gpu(prefill) != on_gpu(decode):
        return []
    return list(_ON_GPU if on_gpu(prefill) else _ON_CPU)


def _troubles(
    prefill: WorkerRecord, decode: WorkerRecord, chosen: Kind | None, different: list[str]
) -> Iterator[Trouble]:
    if on_gpu(prefill) != on_gpu(decode):
        yield Trouble(
            "one computes on a GPU and the other on a CPU: KV cannot travel between them",
            "use one kind of device in a cluster, or two clusters (--cluster)",
        )
    elif different:
        yield Trouble(
            f"their KV caches differ in {'; '.join(different)}",
            "start both with the same model, --dtype, --kv-dtype, --quantization and --block-size",
        )
    elif chosen is None:
        yield Trouble(
            f"no transport that both can use: prefill offers {_names(prefill)}, decode "
            f"{_names(decode)}",
            "start both with --transport auto",
        )
    elif chosen == common_pb2.TRANSPORT_GLOO:
        yield from _of_gloo(prefill, decode)
    elif chosen == common_pb2.TRANSPORT_NCCL:
        yield from _of_nccl(prefill, decode)


def _of_gloo(prefill: WorkerRecord, decode: WorkerRecord) -> Iterator[Trouble]:
    shm = common_pb2.TRANSPORT_SHM
    both = shm in prefill.transports and shm in decode.transports
    if both and pairing.ends_between(prefill, decode).same_machine:
        why = pairing.apart(prefill.host_id, decode.host_id)
        yield Trouble(
            f"KV travels over the network within one machine: {why}",
            "run both as one user in one process namespace (in containers pid: host), or leave it: "
            "gloo works",
        )


def _of_nccl(prefill: WorkerRecord, decode: WorkerRecord) -> Iterator[Trouble]:
    ours, theirs = prefill.hardware, decode.hardware
    if not (ours.gpu.uuid and theirs.gpu.uuid):
        yield Trouble(
            "a worker does not tell which GPU it computes on",
            "see its log at --log-level debug; without it nobody knows what else is possible",
        )
    elif not pairing.ends_between(prefill, decode).same_machine:
        if not (ours.rdma_devices and theirs.rdma_devices):
            yield Trouble(
                "between their machines NCCL will use TCP sockets: one has no RDMA device",
                "give both RDMA devices (in containers /dev/infiniband and memlock: -1), or place "
                "them on one machine",
            )
    elif ours.gpu.uuid not in theirs.visible_gpus or theirs.gpu.uuid not in ours.visible_gpus:
        yield Trouble(
            "they are on one machine and do not see each other's GPU: NCCL can use neither NVLink "
            "nor PCIe between them and falls to the host's memory or to sockets",
            _ONE_CONTAINER_LIKE,
        )
    elif prefill.host_id != decode.host_id and theirs.gpu.uuid in ours.peer_gpus:
        why = pairing.apart(prefill.host_id, decode.host_id)
        yield Trouble(
            f"NCCL moves KV that one GPU could write straight into the other: {why}",
            "run both as one user in one process namespace (in containers pid: host)",
        )
    if ours.nccl_version and theirs.nccl_version and ours.nccl_version != theirs.nccl_version:
        yield Trouble(
            f"NCCL {ours.nccl_version} and {theirs.nccl_version} may not understand each other",
            "run both with one image",
        )


def _names(record: WorkerRecord) -> str:
    return ", ".join(pairing.name_of(kind) for kind in record.transports) or "none"
