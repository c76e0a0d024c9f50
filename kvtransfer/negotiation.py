"""What two workers agree on before the first byte: what KV bytes mean, and how they travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import distributed

from baton.errors import ConfigError, KvMismatch
from baton.v1 import common_pb2
from kvtransfer.backends import gloo, nccl
from kvtransfer.pool import KvPool
from kvtransfer.process_group import ProcessGroupTransport
from kvtransfer.seam import Kind, Transport
from kvtransfer.shm import ShmTransport

FASTEST_FIRST: tuple[Kind, ...] = (
    common_pb2.TRANSPORT_MEMORY,
    common_pb2.TRANSPORT_CUDA_IPC,
    common_pb2.TRANSPORT_SHM,
    common_pb2.TRANSPORT_NCCL,
    common_pb2.TRANSPORT_GLOO,
)
_ONE_HOST = (common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_SHM)


def usable(pool: KvPool, host: str, choice: str = "auto") -> list[Transport]:
    """The transports this worker can use, fastest first; only `choice` if that names one.

    `host` is the address at which peers reach this worker. Raises ConfigError when `choice` cannot
    be used with this pool.
    """
    transports: list[Transport] = []
    if pool.area is not None:
        transports.append(ShmTransport())
    if pool.device.type == "cpu":
        transports.append(ProcessGroupTransport(gloo(), host))
    elif distributed.is_nccl_available():
        transports.append(ProcessGroupTransport(nccl(), host))
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
    differences = [
        f"{field.name}: {getattr(prefill, field.name)!r} != {getattr(decode, field.name)!r}"
        for field in common_pb2.KvDescriptor.DESCRIPTOR.fields
        if getattr(prefill, field.name) != getattr(decode, field.name)
    ]
    if differences:
        raise KvMismatch(
            f"KV caches of prefill {sender} and decode {receiver} differ in "
            + "; ".join(differences)
        )


def choose(offered: Iterable[Kind], mine: Sequence[Transport], same_host: bool) -> Transport:
    """The fastest transport that both ends can use. Raises KvMismatch when there is none."""
    offered = set(offered)
    able = {transport.kind: transport for transport in mine}
    for kind in FASTEST_FIRST:
        if kind in offered and kind in able and (same_host or kind not in _ONE_HOST):
            return able[kind]
    theirs = ", ".join(_name(kind) for kind in sorted(offered)) or "none"
    ours = ", ".join(transport.name for transport in mine) or "none"
    where = "one host" if same_host else "different hosts"
    raise KvMismatch(f"no common transport on {where}: prefill has {theirs}; decode has {ours}")


def _name(kind: Kind) -> str:
    """ "shm" for TRANSPORT_SHM; the number for one this version does not know."""
    if kind not in common_pb2.Transport.values():
        return str(kind)
    return common_pb2.Transport.Name(kind).removeprefix("TRANSPORT_").lower()
