"""The prefill side's open links: one for each decode process, opened once, kept while useful."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import grpc

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvCorrupted,
    KvMismatch,
    Overloaded,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.v1 import common_pb2, prefill_pb2, worker_pb2
from kvtransfer.aborts import Aborts
from kvtransfer.connector import Connector
from kvtransfer.interface import FindWorker, Transport
from kvtransfer.pair_link import PairLink
from kvtransfer.pool import KvPool
from kvtransfer.waiting import Deadline

log = logging.getLogger(__name__)

# These speak of one handoff; whatever else goes wrong is the link's failure.
_LINK_IS_GOOD = (Stale, Cancelled, InvalidRequest, KvCorrupted)


class LinkPool:
    """Links by decode incarnation, at most `cap`, least recently used and idle ones closed first.

    A peer whose link failed is refused for `backoff_s`; the use after that opens a new epoch.
    `connect_timeout_s` bounds Offer, and connecting, each.
    """

    def __init__(
        self,
        pool: KvPool,
        transports: Sequence[Transport],
        descriptor: common_pb2.KvDescriptor,
        incarnation: str,
        find_decode: FindWorker,
        *,
        cap: int = 16,
        backoff_s: float = 1.0,
        connect_timeout_s: float = 5.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.pool, self.incarnation, self._find_decode = pool, incarnation, find_decode
        self._cap, self._backoff_s, self._connect_s = cap, backoff_s, connect_timeout_s
        self._connect = Connector(
            pool,
            transports,
            descriptor,
            incarnation,
            timeout_s=connect_timeout_s,
            credentials=credentials,
        ).connect
        self.aborts = Aborts(credentials)
        self._links: dict[str, PairLink] = {}  # least recently used first
        self._opening: dict[str, asyncio.Task[PairLink]] = {}
        self._refused_until: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def acquire(
        self, target: prefill_pb2.HandoffTarget, deadline: Deadline, again: bool = False
    ) -> PairLink:
        """The link to `target`, opened if need be; give it back with `release`.

        `again` is for a handoff whose link failed while the peer's control still answered: it need
        not wait until the quarantine has passed.
        Raises Unavailable while the pair is quarantined, Overloaded when all links are in use,
        KvMismatch, Stale, TransferFailed, DeadlineExceeded.
        """
        peer = target.incarnation
        decode: common_pb2.WorkerRecord | None = None
        while (link := self._links.get(peer)) is None:
            if peer not in self._opening:
                if self._closed:
                    raise Unavailable("the prefill worker is closing its links")
                if not again:
                    self._check_quarantine(peer)
                if decode is None:  # another handoff may open the link meanwhile
                    decode = await self._find_decode(peer)
                    continue
                self._opening[peer] = asyncio.create_task(self._open(decode))
            # Shielded: others may wait for the same link. Its own time is bounded.
            opening = asyncio.shield(self._opening[peer])
            try:
                await asyncio.wait_for(opening, deadline.left_s(3 * self._connect_s))
            except DeadlineExceeded:
                raise
            except TimeoutError:
                deadline.left_s(0)
                raise TransferFailed(f"no link to decode {peer} in time") from None
        self._links[peer] = self._links.pop(peer)
        link.users += 1
        return link

    def release(self, link: PairLink) -> None:
        """The caller is done with `link`."""
        link.users -= 1
        if link.users == 0 and self._links.get(link.peer) is not link:
            self._in_background(link.close_control())

    @contextlib.contextmanager
    def judging(self, link: PairLink, deadline: Deadline) -> Iterator[None]:
        """Around what uses `link`: takes it out of service when it is the link that failed.

        A call that was not answered, or not with one of our errors, becomes TransferFailed, unless
        it was the request's time that ran out: then nobody is to blame, but a two-sided link may be
        out of step and is opened anew.
        """
        try:
            yield
        except _LINK_IS_GOOD:
            raise
        except BatonError as error:
            out_of_time = isinstance(error, DeadlineExceeded) and deadline.passed
            if not (out_of_time and link.transport.one_sided):
                self.condemn(link, quarantine=not out_of_time)
            if isinstance(error, (Unavailable, DeadlineExceeded)) and not out_of_time:
                raise TransferFailed(f"decode {link.peer} did not answer: {error}") from error
            if isinstance(error, InternalError):  # INTERNAL also carries its TransferFailed
                raise TransferFailed(f"decode {link.peer}: {error}") from error
            raise

    def condemn(self, link: PairLink, quarantine: bool = True) -> None:
        """Nobody uses `link` any more, and, if told so, its peer is refused for a while."""
        if self._links.get(link.peer) is link:
            if quarantine:
                self._quarantine(link.peer)
            self._drop(link)

    def status(self) -> list[worker_pb2.PairStatus]:
        """One entry for each open or quarantined pair; links that are abandoned are closed."""
        for link in [link for link in self._links.values() if link.abandoned]:
            self._drop(link)  # it would keep the memory of a dead process mapped
        now = time.monotonic()
        self._refused_until = {p: end for p, end in self._refused_until.items() if end > now}
        pairs = [
            worker_pb2.PairStatus(
                prefill=self.incarnation,
                decode=link.peer,
                transport=link.transport.kind,
                state="OPEN",
                epoch=link.epoch,
                sent_bytes=link.sent_bytes,
                sent_ms=link.sent_s * 1e3,
            )
            for link in self._links.values()
        ]
        return pairs + [
            worker_pb2.PairStatus(prefill=self.incarnation, decode=peer, state="QUARANTINED")
            for peer in self._refused_until
            if peer not in self._links
        ]

    async def close(self) -> None:
        """Closes every link; handoffs that still run fail. Aborts get a last moment to be heard."""
        self._closed = True
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for link in list(self._links.values()):
            self._drop(link)
            if link.users:  # its users release it, but perhaps only after we are gone
                self._in_background(link.close_control())
        while self._closing:
            await asyncio.gather(*self._closing)
        await self.aborts.close()

    async def _open(self, decode: common_pb2.WorkerRecord) -> PairLink:
        peer = decode.incarnation
        try:
            self._make_room()
            link = await self._connect(decode)
        except (KvMismatch, Stale, Overloaded):
            raise
        except BatonError as error:
            log.warning("no link from prefill %s to decode %s: %s", self.incarnation, peer, error)
            self._quarantine(peer)
            raise
        finally:
            del self._opening[peer]
        log.info("link to decode %s: %s, epoch %d", peer, link.transport.name, link.epoch)
        self._links[peer] = link
        return link

    def _make_room(self) -> None:
        """Closes idle links until one more fits, those being opened counted."""
        while len(self._links) + len(self._opening) > self._cap:
            idle = next((link for link in self._links.values() if link.users == 0), None)
            if idle is None:
                raise Overloaded(f"all {self._cap} links are in use", self._backoff_s)
            self._drop(idle)

    def _check_quarantine(self, peer: str) -> None:
        left = self._refused_until.get(peer, 0.0) - time.monotonic()
        if left > 0:
            raise Unavailable(f"the pair {self.incarnation} → {peer} failed just now", left)

    def _quarantine(self, peer: str) -> None:
        self._refused_until[peer] = time.monotonic() + self._backoff_s

    def _drop(self, link: PairLink) -> None:
        del self._links[link.peer]
        self._in_background(link.close_data())
        if link.users == 0:
            self._in_background(link.close_control())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
