"""What two workers agree on before the first byte: what KV bytes mean, and how they travel."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import distributed

from baton.errors import ConfigError, KvMismatch
from baton.v1 import common_pb2, handoff_pb2
from kvtransfer import gpus, movers, pairing
from kvtransfer.interface import Transport
from kvtransfer.pairing import FASTEST_FIRST, Ends, Kind, machine_of, name_of
from kvtransfer.pool import KvPool
from kvtransfer.transports.backends import NCCL_STAGING_BYTES, gloo, nccl
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.cuda_memory import CudaArea
from kvtransfer.transports.process_group import ProcessGroupTransport
from kvtransfer.transports.shm import SharedMemoryArea, ShmTransport

log = logging.getLogger(__name__)


def usable(pool: KvPool, host: str, choice: str = "auto") -> list[Transport]:
    """The transports this worker can use, fastest first; only `choice` if that names one.

    `host` is the address at which peers reach this worker. Raises ConfigError when `choice` cannot
    be used with this pool.
    """
    movers.prepare(pool)
    transports: list[Transport] = []
    if isinstance(pool.area, CudaArea):
        transports.append(CudaIpcTransport(pool.area.driver))
    if isinstance(pool.area, SharedMemoryArea):
        transports.append(ShmTransport())
    if pool.device.type == "cpu":
        transports.append(ProcessGroupTransport(gloo(), host))
    elif distributed.is_nccl_available():
        transports.append(ProcessGroupTransport(nccl(), host, NCCL_STAGING_BYTES))
    if choice == "auto":
        return transports
    chosen = [transport for transport in transports if transport.name == choice]
    if not chosen:
        names = ", ".join(transport.name for transport in transports) or "none"
        raise ConfigError(f"--transport {choice} cannot be used here; usable: {names}")
    return chosen


def check_same(
    prefill: common_pb2.KvDescriptor, decode: common_pb2.KvDescriptor, sender: str, receiver: str
) -> None:
    """Raises KvMismatch naming both workers and every field in which they differ."""
    if differences := pairing.differences(prefill, decode):
        raise KvMismatch(
            f"KV caches of prefill {sender} and decode {receiver} differ in "
            + "; ".join(differences)
        )


def ends_of(
    request: handoff_pb2.OfferRequest, sender: common_pb2.WorkerRecord, host_id: str, pool: KvPool
) -> Ends:
    """What the receiver of an Offer, on `host_id` with `pool`, knows of both ends."""
    return Ends(
        same_host=sender.host_id == host_id,
        same_machine=machine_of(sender.host_id) == machine_of(host_id),
        gpu=gpus.uuid(pool.device),
        reachable=tuple(request.reachable_gpus),
        nccl=gpus.nccl_version(),
    )


def choose(
    offered: Iterable[Kind],
    mine: Sequence[Transport],
    same_host: bool = False,
    ends: Ends | None = None,
) -> Transport:
    """The fastest transport that both ends can use. Raises KvMismatch when there is none.

    `same_host` is enough to know where no GPU is involved.
    """
    offered, ends = set(offered), ends or Ends(same_host, same_machine=same_host)
    able = {transport.kind: transport for transport in mine}
    forbidden = []
    for kind in FASTEST_FIRST:
        if kind in offered and kind in able:
            if not (reason := ends.forbids(kind)):
                _warn_if_slow(able[kind], ends)
                return able[kind]
            forbidden.append(f"; not {able[kind].name}: {reason}")
    theirs = ", ".join(name_of(kind) for kind in sorted(offered)) or "none"
    ours = ", ".join(transport.name for transport in mine) or "none"
    where = "one host" if ends.same_host else "different hosts"
    raise KvMismatch(
        f"no common transport on {where}: prefill has {theirs}; decode has {ours}"
        + "".join(forbidden)
    )


def _warn_if_slow(chosen: Transport, ends: Ends) -> None:
    """NCCL itself says nothing when it does not find a direct way."""
    direct = ends.same_host and ends.gpu in ends.reachable
    if chosen.kind == common_pb2.TRANSPORT_NCCL and ends.same_machine and not direct:
        log.warning(
            "nccl to %s goes through the host's memory or sockets: the sender's GPU cannot write to"
            " it; if there is NVLink or PCIe between the two, show every GPU to every worker, and"
            " run them with pid: host and ipc: host",
            ends.gpu,
        )
