"""The KV pool of a rank on another host: what the worker's first process asks for, and who does it.

A connection stands for one end of a pair and has one command at a time. When it ends, that end is
aborted and freed, so nothing outlives the first process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.errors import BatonError, TransferFailed
from baton.net.object_connection import ObjectConnection
from kvtransfer.checksum import Checksum
from kvtransfer.interface import ReceivingEnd, SendingEnd, Transport
from kvtransfer.pool import KvPool, Slots

log = logging.getLogger(__name__)

_ANSWER_S = 5.0  # beyond the time that a command itself may take
_LISTEN_S = 10.0
_MOST_CHECKSUMS = 4096  # of one end; a handoff whose checksum was dropped is sent again

HeadRange: TypeAlias = tuple[int, int] | None  # first and last + 1 of the pool's heads, or all


@dataclass(frozen=True)
class Listen:
    """Makes the receiving end of a new link; done: its endpoint, in hexadecimal."""

    transport: str
    heads: HeadRange


@dataclass(frozen=True)
class Connect:
    """Makes the sending end of a new link."""

    transport: str
    heads: HeadRange
    endpoint: str
    timeout_s: float


@dataclass(frozen=True)
class Accept:
    """Waits for the sender."""

    timeout_s: float


@dataclass(frozen=True)
class Put:
    """Sends slots; done: number of bytes and value of the checksum with this key so far."""

    checksum: int
    timeout_s: float
    blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    num_tokens: int
    num_tails: int


@dataclass(frozen=True)
class Receive:
    """Receives into slots; is posted, and then done as `Put` is."""

    checksum: int
    timeout_s: float
    blocks: tuple[int, ...]
    num_tokens: int
    num_tails: int


@dataclass(frozen=True)
class Posted:
    """The sender may send."""


@dataclass(frozen=True)
class Failed:
    """The command failed, and why."""

    reason: str


@dataclass(frozen=True)
class Done:
    """The command was carried out."""

    result: Any = None


Command: TypeAlias = Listen | Connect | Accept | Put | Receive
Answer: TypeAlias = Posted | Failed | Done
KV_MESSAGES = (Listen, Connect, Accept, Put, Receive, Posted, Failed, Done)  # of a connection


class RemoteChecksum(Checksum):
    """The checksum of one pair, as last reported by the host that computes it."""

    _keys = itertools.count()
    value = 0

    def __init__(self) -> None:
        self.key, self.num_bytes = next(self._keys), 0


class RemotePool:
    """A pool, or some of its heads, as the worker's first process uses it.

    connect: opens one more connection to the process that has the pool. Raises OSError, EOFError.
    """

    def __init__(self, connect: Callable[[], ObjectConnection], heads: range | None = None) -> None:
        self._connect = connect
        self._heads: HeadRange = (heads.start, heads.stop) if heads is not None else None

    def with_heads(self, heads: range) -> RemotePool:
        """Returns a view of this pool that has these heads only."""
        return RemotePool(self._connect, heads)

    def new_checksum(self) -> Checksum:
        """The checksum of one transfer."""
        return RemoteChecksum()

    def listen(self, transport: Transport) -> ReceivingEnd:
        """The receiving end of one new link, on the other host. Raises TransferFailed."""
        return _RemoteEnd(self._opened(), _LISTEN_S, Listen(transport.name, self._heads))

    def connect(self, transport: Transport, endpoint: bytes, timeout_s: float) -> SendingEnd:
        """An end that sends from the other host. Raises TransferFailed."""
        command = Connect(transport.name, self._heads, endpoint.hex(), timeout_s)
        return _RemoteEnd(self._opened(), timeout_s, command)

    def _opened(self) -> ObjectConnection:
        try:
            return self._connect()
        except (OSError, EOFError) as error:
            raise TransferFailed(f"a rank's host cannot be reached: {error}") from error


class _RemoteEnd(SendingEnd, ReceivingEnd):
    """Either end of a pair, in the process of a rank on another host."""

    def __init__(self, connection: ObjectConnection, timeout_s: float, first: Command) -> None:
        """Raises TransferFailed if the first command, Listen or Connect, fails."""
        self._connection = connection
        try:
            super().__init__(bytes.fromhex(self._call(timeout_s, first) or ""))
        except BaseException:
            self.close()
            raise

    def put(self, local: Slots, remote: Slots, checksum: Checksum, timeout_s: float) -> None:
        assert isinstance(checksum, RemoteChecksum)
        blocks = local.block_ids, remote.block_ids
        command = Put(checksum.key, timeout_s, *blocks, local.num_tokens, local.num_tails)
        checksum.num_bytes, checksum.value = self._call(timeout_s, command)

    def accept(self, timeout_s: float) -> None:
        self._call(timeout_s, Accept(timeout_s))

    def receive(
        self, slots: Slots, checksum: Checksum, timeout_s: float, posted: Callable[[], None]
    ) -> None:
        assert isinstance(checksum, RemoteChecksum)
        of_slots = slots.block_ids, slots.num_tokens, slots.num_tails
        command = Receive(checksum.key, timeout_s, *of_slots)
        checksum.num_bytes, checksum.value = self._call(timeout_s, command, posted)

    def abort(self) -> None:
        self._connection.end_sending()

    def close(self) -> None:
        self._connection.close()

    def _call(
        self, timeout_s: float, command: Command, posted: Callable[[], None] | None = None
    ) -> Any:
        """The command's result. Raises TransferFailed."""
        try:
            self._connection.send(command)
            while self._connection.poll(timeout_s + _ANSWER_S):
                match self._connection.recv():
                    case Posted() if posted is not None:
                        posted()
                    case Failed(reason):
                        raise TransferFailed(f"on another host: {reason}")
                    case Done(result):
                        return result
        except (OSError, EOFError) as error:
            raise TransferFailed(f"a rank's host is gone: {error}") from error
        raise TransferFailed("a rank's host does not answer")


class PoolServer:
    """Serves a rank's pool to its worker's first process, in the rank's own process."""

    def __init__(self, pool: KvPool, transports: Sequence[Transport]) -> None:
        self._pool = pool
        self._transports: Mapping[str, Transport] = {one.name: one for one in transports}

    def serve(self, connection: ObjectConnection) -> None:
        """Serves one end of a pair, until its connection ends."""
        served = _ServedEnd(self._pool, self._transports, connection)
        try:
            with ThreadPoolExecutor(1, "kv-end") as thread:
                with contextlib.suppress(OSError, EOFError):
                    while served.answered.is_set():  # before an answer only the end can come
                        command = connection.recv()
                        served.answered.clear()
                        thread.submit(served.answer, command)
                        connection.poll(None)
                served.abort()
        finally:
            served.close()
            connection.close()


class _ServedEnd:
    """One end of a pair, in the process that has its pool."""

    def __init__(
        self, pool: KvPool, transports: Mapping[str, Transport], connection: ObjectConnection
    ) -> None:
        self._pool, self._transports, self._connection = pool, transports, connection
        self._end: Any = None  # a SendingEnd or a ReceivingEnd
        self._checksums = OrderedDict[int, Checksum]()
        self.answered = threading.Event()
        self.answered.set()

    def answer(self, command: Command) -> None:
        """Carries out a command, and answers."""
        answer: Answer
        try:
            answer = Done(self._result(command))
        except Exception as error:
            if not isinstance(error, (BatonError, OSError, RuntimeError)):
                log.exception("a command of the first process failed")
            answer = Failed(str(error))
        self.answered.set()
        self._send(answer)

    def abort(self) -> None:
        if self._end is not None:
            self._end.abort()

    def close(self) -> None:
        """Frees it; nothing runs any more."""
        if self._end is not None:
            self._end.close()

    def _result(self, command: Command) -> Any:
        match command:
            case Listen(transport, heads):
                self._end = self._transports[transport].listen(self._part(heads))
                return self._end.endpoint.hex()
            case Connect(transport, heads, endpoint, timeout_s):
                to, part = bytes.fromhex(endpoint), self._part(heads)
                self._end = self._transports[transport].connect(part, to, timeout_s)
                return None
            case Accept(timeout_s):
                self._end.accept(timeout_s)
                return None
            case Put(key, timeout_s, blocks, remote, num_tokens, num_tails):
                sizes, checksum = (num_tokens, num_tails), self._checksum(key)
                to_slots = Slots(tuple(remote), *sizes)
                self._end.put(Slots(tuple(blocks), *sizes), to_slots, checksum, timeout_s)
                return checksum.num_bytes, checksum.value
            case Receive(key, timeout_s, blocks, num_tokens, num_tails):
                checksum, slots = self._checksum(key), Slots(tuple(blocks), num_tokens, num_tails)
                self._end.receive(slots, checksum, timeout_s, lambda: self._send(Posted()))
                return checksum.num_bytes, checksum.value

    def _send(self, answer: Answer) -> None:
        try:
            self._connection.send(answer)
        except OSError:
            self.abort()  # the first process has ended

    def _part(self, heads: HeadRange) -> KvPool:
        return self._pool if heads is None else self._pool.with_heads(range(*heads))

    def _checksum(self, key: int) -> Checksum:
        if key not in self._checksums:
            self._checksums[key] = self._pool.new_checksum()
            if len(self._checksums) > _MOST_CHECKSUMS:
                self._checksums.popitem(last=False)
        return self._checksums[key]
