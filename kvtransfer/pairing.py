"""The rule by which two workers choose a transport, and which ranks of them exchange which heads.

It is a pure function of what both workers report. The decode worker applies it at an Offer, and
`baton doctor` uses it to explain why a faster transport is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.config import kv_heads_of
from baton.errors import KvMismatch
from baton.v1 import common_pb2
from baton.v1.common_pb2 import WorkerRecord

Kind: TypeAlias = common_pb2.Transport

FASTEST_FIRST: tuple[Kind, ...] = (
    common_pb2.TRANSPORT_MEMORY,
    common_pb2.TRANSPORT_CUDA_IPC,
    common_pb2.TRANSPORT_SHM,
    common_pb2.TRANSPORT_NCCL,
    common_pb2.TRANSPORT_GLOO,
)
ONE_HOST = (common_pb2.TRANSPORT_CUDA_IPC, common_pb2.TRANSPORT_SHM)
_SEPARATIONS = (  # by the first part of the host ids that differs
    "they are on different machines",
    "they share no /dev/shm",
    "they run as different users",
)


@dataclass(frozen=True)
class PairTopology:
    """What the choice of a transport depends on.

    separation: why the two cannot map each other's memory, empty if they can · gpu: UUID of the
    receiver's GPU, empty on a CPU · reachable: UUIDs of the GPUs that the sender's GPU can write
    to, its own first · nccl: the receiver's version.
    """

    separation: str
    gpu: str = ""
    reachable: Sequence[str] = ()
    nccl: tuple[int, ...] = ()

    @property
    def same_machine(self) -> bool:
        """Whether they run on one kernel, perhaps in containers that share nothing."""
        return self.separation != _SEPARATIONS[0]

    def forbids(self, kind: Kind) -> str:
        """Why this transport cannot work between the two; empty if it can."""
        if kind in ONE_HOST and self.separation:
            return self.separation
        if kind == common_pb2.TRANSPORT_CUDA_IPC and self.gpu and self.gpu not in self.reachable:
            return f"the sender's GPU cannot write to {self.gpu}"
        share_gpu = self.gpu and self.gpu in self.reachable[:1]
        if kind == common_pb2.TRANSPORT_NCCL and share_gpu and not shares_gpu(self.nccl):
            have = ".".join(map(str, self.nccl)) or "unknown"
            return f"both are on {self.gpu}, which NCCL can do from 2.30 on and this is {have}"
        return ""


def topology_of(prefill: WorkerRecord, decode: WorkerRecord) -> PairTopology:
    """The topology of a pair by the records of the two."""
    ours, theirs = prefill.hardware, decode.hardware
    return PairTopology(
        separation=separation(prefill.host_id, decode.host_id),
        gpu=theirs.gpu.uuid,
        reachable=(ours.gpu.uuid, *ours.peer_gpus),
        nccl=tuple(int(part) for part in theirs.nccl_version.split(".") if part.isdigit()),
    )


def obstacle(kind: Kind, prefill: WorkerRecord, decode: WorkerRecord) -> str:
    """Why this pair cannot use that transport; empty if it can."""
    for name, record in (("prefill", prefill), ("decode", decode)):
        if kind not in record.transports:
            return f"the {name} worker does not offer it"
    return topology_of(prefill, decode).forbids(kind)


def fastest(prefill: WorkerRecord, decode: WorkerRecord) -> Kind | None:
    """The fastest transport that the pair can use; None if there is none."""
    return next((kind for kind in FASTEST_FIRST if not obstacle(kind, prefill, decode)), None)


def missed_transport(
    used: Kind, prefill: WorkerRecord, decode: WorkerRecord
) -> tuple[Kind, str] | None:
    """The faster transport that a pair using `used` is expected to use, and why it does not; None
    if `used` is the expected one.

    Within one machine the expected transport is the one that writes straight into the other's
    memory, if at least one of the two offers it. It is also expected if NCCL has to go through host
    memory or sockets, because NCCL does not warn of that.
    """
    ends = topology_of(prefill, decode)
    for kind in ONE_HOST if ends.same_machine else ():
        offered = kind in prefill.transports or kind in decode.transports
        if used == common_pb2.TRANSPORT_NCCL and kind == common_pb2.TRANSPORT_CUDA_IPC:
            offered = offered or bool(ends.forbids(kind))
        if offered and FASTEST_FIRST.index(kind) < FASTEST_FIRST.index(used):
            return kind, ends.forbids(kind) or obstacle(kind, prefill, decode)
    return None


@dataclass(frozen=True)
class RankPair:
    """Heads, by their numbers in the model, that one rank sends to another."""

    sender: int
    receiver: int
    heads: range


def rank_pairs(senders: int, receivers: int, num_kv_heads: int) -> list[RankPair]:
    """The pairs by which each receiver gets each of its heads once.

    If several senders hold a head, its receivers use different ones.
    """
    pairs = []
    for receiver in range(receivers):
        wanted = kv_heads_of(receiver, receivers, num_kv_heads)
        held = [kv_heads_of(sender, senders, num_kv_heads) for sender in range(senders)]
        at = wanted.start
        while at < wanted.stop:
            holders = [sender for sender in range(senders) if at in held[sender]]
            sender = holders[receiver % len(holders)]
            end = min(wanted.stop, held[sender].stop)
            pairs.append(RankPair(sender, receiver, range(at, end)))
            at = end
    return pairs


def separation(one: str, other: str) -> str:
    """Why two processes with these host ids (`baton.config.host_id`) cannot map each other's
    memory; empty if they can."""
    if one == other:
        return ""
    parts = zip(one.split("/"), other.split("/"), _SEPARATIONS, strict=False)
    return next((text for a, b, text in parts if a != b), _SEPARATIONS[0])


def shares_gpu(nccl: tuple[int, ...]) -> bool:
    """Whether this version of NCCL, as (2, 27, 5), lets two workers share a GPU."""
    return nccl >= (2, 30)


def choose(offered: Collection[Kind], mine: Collection[Kind], ends: PairTopology) -> Kind:
    """The fastest transport that both ends can use. Raises KvMismatch if there is none."""
    forbidden = ""
    for kind in FASTEST_FIRST:
        if kind in offered and kind in mine:
            if reason := ends.forbids(kind):
                forbidden += f"; not {transport_name(kind)}: {reason}"
                continue
            return kind
    theirs, ours = (
        ", ".join(map(transport_name, sorted(kinds))) or "none" for kinds in (offered, mine)
    )
    where = "different hosts" if ends.separation else "one host"
    raise KvMismatch(
        f"no common transport on {where}: prefill has {theirs}; decode has {ours}{forbidden}"
    )


def transport_name(kind: Kind) -> str:
    """ "shm" for TRANSPORT_SHM; the number for one this version does not know."""
    if kind not in common_pb2.Transport.values():
        return str(kind)
    return common_pb2.Transport.Name(kind).removeprefix("TRANSPORT_").lower()
