"""The decode side's links: one for each prefill process, offered, watched and dropped.

It knows processes, epochs and threads; which handoff uses a link is known to the receiver alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.errors import InvalidRequest, Overloaded, TransferFailed, Unavailable
from kvtransfer.deadline import in_background
from kvtransfer.interface import Listener, Transport
from kvtransfer.pool import KvPool

log = logging.getLogger(__name__)

_MAX_PID = 1 << 22  # of Linux
_MAX_LINKS = 64


@dataclass(eq=False)
class Peer:
    """One prefill process's current link, and the one thread that works for it."""

    incarnation: str
    epoch: int
    transport: Transport
    listener: Listener
    thread: ThreadPoolExecutor
    accepted: asyncio.Future[None]


class Peers:
    """Links by prefill incarnation, at most `_MAX_LINKS`; event-loop thread only.

    `busy` returns the incarnations with handoffs under way: their links are not dropped for others.
    `on_exit` is called with the incarnation of a process of this host that has ended: it writes no
    more, and nothing less proves that.
    """

    def __init__(
        self,
        pool: KvPool,
        *,
        timeout_s: float,
        busy: Callable[[], Collection[str]],
        on_exit: Callable[[str], object],
    ) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self._busy, self._on_exit = busy, on_exit
        self._epochs = itertools.count(1)  # of all peers: an epoch is never used twice
        self._peers: dict[str, Peer] = {}  # the one offered first comes first
        self._watches: dict[str, int] = {}  # pidfds of peers on this host
        self._freeing: set[asyncio.Task[None]] = set()

    async def open(self, incarnation: str, transport: Transport, pid: int) -> Peer:
        """A new link, which ends the peer's earlier one.

        `pid` is that of a process of this host, else 0. Raises InvalidRequest, Overloaded,
        TransferFailed.
        """
        if not 0 <= pid <= _MAX_PID:
            raise InvalidRequest(f"pid must be from 1 to {_MAX_PID}, not {pid}", "pid")
        self._make_room(transport)
        peer = await self._listen(incarnation, transport)
        self.drop(incarnation)
        self._peers[incarnation] = peer
        if pid and incarnation not in self._watches:
            self._watch(incarnation, pid)
        peer.accepted.add_done_callback(lambda done: self._accepted(peer, done))
        return peer

    async def connected(self, incarnation: str, epoch: int) -> Peer:
        """That link, once the peer has connected. Raises Unavailable, TransferFailed."""
        peer = self.find(incarnation, epoch)
        await asyncio.wait({peer.accepted})
        peer.accepted.result()
        return self.find(incarnation, epoch)

    def find(self, incarnation: str, epoch: int) -> Peer:
        """That link. Raises Unavailable when it is not in service any more."""
        peer = self._peers.get(incarnation)
        if peer is None or peer.epoch != epoch:
            raise Unavailable(f"link epoch {epoch} of prefill {incarnation} is gone")
        return peer

    def drop(self, incarnation: str) -> None:
        """Takes the peer's link out of service; it is freed when its thread has ended its work."""
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            in_background(self._freeing, _free(peer))

    async def lost(self, incarnation: str) -> None:
        """The process is dead: receives from it fail now, not at their time-out."""
        if (peer := self._peers.get(incarnation)) is not None:
            await asyncio.get_running_loop().run_in_executor(None, peer.listener.abort)
        self.drop(incarnation)

    def remove(self, peer: Peer) -> None:
        if self._peers.get(peer.incarnation) is peer:
            self.drop(peer.incarnation)

    async def close(self) -> None:
        for incarnation in list(self._watches):
            self._unwatch(incarnation)
        for incarnation in list(self._peers):
            self.drop(incarnation)
        while self._freeing:
            await asyncio.wait(set(self._freeing))

    async def _listen(self, incarnation: str, transport: Transport) -> Peer:
        run = asyncio.get_running_loop().run_in_executor
        epoch = next(self._epochs)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-receive-{incarnation}")
        try:
            name = f"{incarnation}/{epoch}"
            listener = await run(thread, transport.listen, self._pool, name)
        except BaseException as error:
            thread.shutdown(wait=False)
            if isinstance(error, (OSError, RuntimeError)):
                raise TransferFailed(f"{transport.name}: cannot listen: {error}") from error
            raise
        accepted = run(thread, listener.accept, self._timeout_s)
        return Peer(incarnation, epoch, transport, listener, thread, accepted)

    def _watch(self, incarnation: str, pid: int) -> None:
        def ended() -> None:
            log.warning("prefill process %d (%s) has ended", pid, incarnation)
            self._unwatch(incarnation)
            self._on_exit(incarnation)

        loop = asyncio.get_running_loop()
        try:
            self._watches[incarnation] = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(ended)
        else:  # a pidfd is readable after the exit
            loop.add_reader(self._watches[incarnation], ended)

    def _unwatch(self, incarnation: str) -> None:
        if (pidfd := self._watches.pop(incarnation, -1)) >= 0:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _accepted(self, peer: Peer, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("link of prefill %s did not open: %s", peer.incarnation, error)
            self.remove(peer)

    def _make_room(self, transport: Transport) -> None:
        """Drops an idle link if there are too many, of all kinds or of this one."""
        names = list(self._peers)
        if len(names) < _MAX_LINKS:
            names = [n for n, peer in self._peers.items() if peer.transport.kind == transport.kind]
            if len(names) < transport.max_links:
                return
        busy = self._busy()
        idle = next((name for name in names if name not in busy), None)
        if idle is None:
            raise Overloaded(f"all {len(names)} links are in use")
        self.drop(idle)


async def _free(peer: Peer) -> None:
    await asyncio.get_running_loop().run_in_executor(peer.thread, peer.listener.close)
    peer.thread.shutdown()
