"""The interface of transports, which move KV bytes between two pools.

One-sided transports (`shm`, `cuda_ipc`): the sender writes straight into the receiver's pool, and
the receiver makes no data call. Two-sided ones (`gloo`, `nccl`): the receiver posts, the sender
sends. Every call may block until its timeout; a link runs them on a thread of its own. Failures are
raised as TransferFailed, after which both ends only support `abort`, which any thread may call, and
`close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from baton.v1 import common_pb2
from kvtransfer.checksum import Checksum
from kvtransfer.pairing import Kind
from kvtransfer.pool import KvPool, Slots

# The registry's record of a worker, by incarnation; raises TransferFailed if there is none. A
# worker's address and process id are taken from there alone, never from a message.
FindWorker: TypeAlias = Callable[[str], Awaitable[common_pb2.WorkerRecord]]


class SendingEnd(ABC):
    """The sender's end of a connection between two pools."""

    @abstractmethod
    def put(self, local: Slots, remote: Slots, checksum: Checksum, timeout_s: float) -> None:
        """Sends `local` slots of its pool into `remote` ones, adding their bytes to `checksum`.

        Once it has returned or raised, this call writes nothing more. Raises TransferFailed.
        """

    def abort(self) -> None:  # noqa: B027 - optional
        """Makes a running put fail early if possible; called from any thread."""

    def close(self) -> None:  # noqa: B027 - optional
        """Frees everything; no put runs any more."""


class ReceivingEnd:
    """The receiver's end. The base class receives nothing: it only has an endpoint."""

    def __init__(self, endpoint: bytes) -> None:
        self.endpoint = endpoint  # what the peer's `Transport.connect` needs

    def accept(self, timeout_s: float) -> None:
        """Returns when the peer has connected. Raises TransferFailed."""

    def sender_pidfd(self) -> int | None:
        """A pidfd of the connected process if it writes by itself; closed with this end."""
        return None

    def receive(
        self, slots: Slots, checksum: Checksum, timeout_s: float, posted: Callable[[], None]
    ) -> None:
        """Receives into `slots`; calls `posted` as soon as the sender may send. Two-sided only.

        Raises TransferFailed.
        """
        raise AssertionError("a one-sided transport receives without a call")

    def abort(self) -> None:
        """Makes a running accept or receive fail early if possible; called from any thread."""

    def close(self) -> None:
        """Frees everything; no accept or receive runs any more."""


class Transport(ABC):
    """One way for KV bytes to travel. `max_links`: most links that a receiver keeps open."""

    name: str
    kind: Kind
    one_sided: bool
    max_links: int = 1 << 16

    @abstractmethod
    def listen(self, pool: KvPool) -> ReceivingEnd:
        """The receiving end of `pool` for one new link. Raises OSError, RuntimeError."""

    @abstractmethod
    def connect(self, pool: KvPool, endpoint: bytes, timeout_s: float) -> SendingEnd:
        """An end that sends from `pool` to the process that made `endpoint`.

        Raises TransferFailed.
        """
