"""The KV pool of a rank on another host: both ends of what the worker's first process does with it.

A connection stands for one end of a pair, and has one call at a time. When it ends, that end is
aborted and freed, so nothing outlives the first process.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

from baton.errors import BatonError, TransferFailed
from baton.net.object_connection import ObjectConnection
from kvtransfer.digest import Digest
from kvtransfer.interface import End, Link, Listener, Transport
from kvtransfer.pool import KvPool, Slots

log = logging.getLogger(__name__)

_ANSWER_S = 5.0  # beyond the time that a call itself may take
_LISTEN_S = 10.0
_MOST_DIGESTS = 4096  # of one end; a handoff whose own was dropped is sent again


class RemoteDigest(Digest):
    """The checksum of one pair, as the host that computes it told it last."""

    _keys = itertools.count()

    def __init__(self) -> None:
        self.key, self.num_bytes, self._value = next(self._keys), 0, 0

    @property
    def value(self) -> int:
        return self._value

    def told(self, answer: tuple[int, int]) -> None:
        """Takes over bytes and checksum so far."""
        self.num_bytes, self._value = answer


class RemotePool:
    """A pool, or some of its heads, as the first process of the worker sees it.

    connect: opens one more connection to the process that has it. Raises OSError, EOFError.
    """

    def __init__(self, connect: Callable[[], ObjectConnection], heads: range | None = None) -> None:
        self._connect, self._heads = connect, heads

    def part(self, heads: range) -> RemotePool:
        """Only these heads of it."""
        return RemotePool(self._connect, heads)

    def new_digest(self) -> Digest:
        """The checksum of one transfer."""
        return RemoteDigest()

    def listen(self, transport: Transport) -> Listener:
        """The receiving end of one new link, there. Raises TransferFailed."""
        end = _RemoteListener(self._connected())
        end.endpoint = bytes.fromhex(end.begin(_LISTEN_S, "listen", transport.name, self._place))
        return end

    def connect(self, transport: Transport, endpoint: bytes, timeout_s: float) -> Link:
        """A link that sends from there. Raises TransferFailed."""
        end, place = _RemoteLink(self._connected()), (endpoint.hex(), timeout_s)
        end.begin(timeout_s, "connect", transport.name, self._place, *place)
        return end

    @property
    def _place(self) -> list[int] | None:
        return [self._heads.start, self._heads.stop] if self._heads is not None else None

    def _connected(self) -> ObjectConnection:
        try:
            return self._connect()
        except (OSError, EOFError) as error:
            raise TransferFailed(f"a rank's host cannot be reached: {error}") from error


class _RemoteEnd(End):
    """What the two kinds of ends have in common."""

    def __init__(self, connection: ObjectConnection) -> None:
        self._connection = connection

    def begin(self, timeout_s: float, *call: Any) -> Any:
        """The answer to the first call; where that fails, the end is closed."""
        try:
            return self.call(timeout_s, *call)
        except BaseException:
            self.close()
            raise

    def call(self, timeout_s: float, *call: Any, posted: Callable[[], None] | None = None) -> Any:
        """The other process's answer to a call. Raises TransferFailed."""
        try:
            self._connection.send(call)
            while self._connection.poll(timeout_s + _ANSWER_S):
                kind, value = self._connection.recv()
                if kind == "posted" and posted is not None:
                    posted()
                elif kind == "failed":
                    raise TransferFailed(f"on another host: {value}")
                else:
                    return value
        except (OSError, EOFError) as error:
            raise TransferFailed(f"a rank's host is gone: {error}") from error
        raise TransferFailed("a rank's host does not answer")

    def abort(self) -> None:
        self._connection.end_sending()

    def close(self) -> None:
        self._connection.close()


class _RemoteLink(_RemoteEnd, Link):
    def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> None:
        assert isinstance(digest, RemoteDigest)
        call = "put", digest.key, timeout_s, *astuple(local), *astuple(remote)
        digest.told(self.call(timeout_s, *call))


class _RemoteListener(_RemoteEnd, Listener):
    def accept(self, timeout_s: float) -> None:
        self.call(timeout_s, "accept", timeout_s)

    def receive(
        self, slots: Slots, digest: Digest, timeout_s: float, posted: Callable[[], None]
    ) -> None:
        assert isinstance(digest, RemoteDigest)
        call = "receive", digest.key, timeout_s, *astuple(slots)
        digest.told(self.call(timeout_s, *call, posted=posted))


class PoolServer:
    """Serves a rank's pool to the first process of its worker, in the rank's own process."""

    def __init__(self, pool: KvPool, transports: Sequence[Transport]) -> None:
        self._pool = pool
        self._transports: Mapping[str, Transport] = {one.name: one for one in transports}

    def serve(self, connection: ObjectConnection) -> None:
        """One end of a pair, until its connection ends."""
        served = _ServedEnd(self._pool, self._transports, connection)
        with ThreadPoolExecutor(1, "kv-end") as thread:
            try:
                while True:
                    call = connection.recv()
                    served.answered.clear()
                    thread.submit(served.answer, call)
                    connection.poll(None)
                    if not served.answered.is_set():  # nothing but its end comes before an answer
                        break
            except (OSError, EOFError):
                pass
            served.abort()
        served.close()
        connection.close()


class _ServedEnd:
    """One end of a pair, where its pool is."""

    def __init__(
        self, pool: KvPool, transports: Mapping[str, Transport], connection: ObjectConnection
    ) -> None:
        self._pool, self._transports, self._connection = pool, transports, connection
        self._end: Any = None  # a Link or a Listener
        self._digests = OrderedDict[int, Digest]()
        self.answered = threading.Event()

    def answer(self, call: tuple[Any, ...]) -> None:
        """Does what a call asks for, and answers."""
        name, *arguments = call
        try:
            answer = "done", getattr(self, f"_{name}")(*arguments)
        except Exception as error:
            if not isinstance(error, (BatonError, OSError, RuntimeError)):
                log.exception("a call of the first process failed")
            answer = "failed", str(error)
        self.answered.set()
        self._send(answer)

    def abort(self) -> None:
        if self._end is not None:
            self._end.abort()

    def close(self) -> None:
        """Frees it; nothing runs any more."""
        if self._end is not None:
            self._end.close()

    def _send(self, answer: Any) -> None:
        try:
            self._connection.send(answer)
        except OSError:
            self.abort()  # the first process has ended

    def _part(self, heads: list[int] | None) -> KvPool:
        return self._pool if heads is None else self._pool.part(range(*heads))

    def _listen(self, transport: str, heads: list[int] | None) -> str:
        self._end = self._transports[transport].listen(self._part(heads))
        endpoint: bytes = self._end.endpoint
        return endpoint.hex()

    def _connect(
        self, transport: str, heads: list[int] | None, endpoint: str, timeout_s: float
    ) -> None:
        to = self._transports[transport]
        self._end = to.connect(self._part(heads), bytes.fromhex(endpoint), timeout_s)

    def _accept(self, timeout_s: float) -> None:
        self._end.accept(timeout_s)

    def _put(
        self, key: int, timeout_s: float, ids: list[int], count: int, to: list[int], to_count: int
    ) -> tuple[int, int]:
        digest = self._digest(key)
        self._end.put(Slots(tuple(ids), count), Slots(tuple(to), to_count), digest, timeout_s)
        return digest.num_bytes, digest.value

    def _receive(self, key: int, timeout_s: float, ids: list[int], count: int) -> tuple[int, int]:
        digest, slots = self._digest(key), Slots(tuple(ids), count)
        self._end.receive(slots, digest, timeout_s, lambda: self._send(("posted", None)))
        return digest.num_bytes, digest.value

    def _digest(self, key: int) -> Digest:
        if key not in self._digests:
            self._digests[key] = self._pool.new_digest()
            if len(self._digests) > _MOST_DIGESTS:
                self._digests.popitem(last=False)
        return self._digests[key]
