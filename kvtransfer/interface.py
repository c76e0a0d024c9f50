"""What a transport is: the one interface behind which KV bytes travel.

Two families. One-sided (`shm`, `cuda_ipc`): the sender writes straight into the receiver's pool and
the receiver makes no data call. Two-sided (`gloo`, `nccl`): the receiver posts, the sender sends.
Every call may block until its timeout; the layer above runs them on one thread for each link.
What goes wrong is raised as TransferFailed, after which both ends only support `abort`, which any
thread may call, and `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from baton.v1 import common_pb2
from kvtransfer.digest import Digest
from kvtransfer.pairing import Kind
from kvtransfer.pool import KvPool, Slots

# The registry's record of a worker, by incarnation; raises TransferFailed when it has none. The
# address and process id of a worker are taken from there alone, never from a message.
FindWorker: TypeAlias = Callable[[str], Awaitable[common_pb2.WorkerRecord]]


class End:
    """One end of a pair."""

    def abort(self) -> None:
        """Makes a running put or receive fail early where possible; called from any thread."""

    def close(self) -> None:
        """Frees everything; no put or receive runs any more."""


class Link(End, ABC):
    """The sender's end."""

    @abstractmethod
    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> None:
        """Sends `local` blocks of the own pool into `remote` ones, adding them to `digest`.

        Once it has returned or raised, this call writes nothing more. Raises TransferFailed.
        """


class Listener(End):
    """The receiver's end. As it is here, it only says where it is."""

    def __init__(self, endpoint: bytes) -> None:
        self.endpoint = endpoint  # what `Transport.connect` of the peer needs

    def accept(self, timeout_s: float) -> None:
        """Returns when the peer has connected. Raises TransferFailed."""

    def sender_pidfd(self) -> int | None:
        """Of the process that has connected, where it writes by itself; closed with this."""
        return None

    def receive(
        self, slots: Slots, digest: Digest, timeout_s: float, posted: Callable[[], None]
    ) -> None:
        """Receives into `slots`; calls `posted` as soon as the sender may send. Two-sided only.

        Raises TransferFailed.
        """
        raise AssertionError("a one-sided transport receives without a call")


class Transport(ABC):
    """One way for KV bytes to travel. `max_links`: a receiver keeps no more of them open."""

    name: str
    kind: Kind
    one_sided: bool
    max_links: int = 1 << 16

    @abstractmethod
    def listen(self, pool: KvPool) -> Listener:
        """The receiving end of `pool` for one new link. Raises OSError, RuntimeError."""

    @abstractmethod
    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> Link:
        """A link that sends from `pool` to the process that made `endpoint`.

        Raises TransferFailed.
        """
