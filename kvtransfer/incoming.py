"""The decode side's links: one for each prefill process, over which KV bytes come in.

It moves and verifies bytes and knows nothing of requests; `decode_worker.reservations` calls it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Protocol

from baton import kv_descriptor
from baton.cuda import gpu_uuid, nccl_version
from baton.errors import KvMismatch, Overloaded, Stale, TransferFailed, Unavailable
from baton.log_format import RateLimit
from baton.net.tasks import in_background, run_on
from baton.v1 import common_pb2
from baton.v1 import handoff_pb2 as pb
from kvtransfer import copier, pairing, rank_ends
from kvtransfer.checksum import Checksum
from kvtransfer.deadline import Deadline
from kvtransfer.interface import FindWorker, ReceivingEnd, Transport
from kvtransfer.pool import KvPool, Slots
from kvtransfer.rank_ends import LinkChecksum, RankEnds, RankPool, local_pool

log = logging.getLogger(__name__)

_MAX_LINKS = 64


class IncomingLink(RankEnds[ReceivingEnd]):
    """One prefill process's current link, and the one thread that works for it."""

    def __init__(
        self, peer: str, epoch: int, transport: Transport, pools: Sequence[RankPool],
        ends: Sequence[ReceivingEnd], thread: ThreadPoolExecutor, timeout_s: float,
    ) -> None:  # fmt: skip
        super().__init__(pools, ends, transport)
        self.peer, self.epoch, self._thread, self._timeout_s = peer, epoch, thread, timeout_s
        self.failed: Callable[[IncomingLink], None] = lambda link: None
        self.accepted: asyncio.Future[None]
        # No one-sided sender writes into a pool on another host.
        self._readers = [copier.copier(pool) for pool in pools if isinstance(pool, KvPool)]
        if transport.one_sided:  # on a GPU this compiles the kernels, before the first Commit
            self._read_checksum(Slots((), 0))

    def accept(self) -> None:
        """Begins to wait for the sender; `accepted` raises TransferFailed."""
        self.accepted = self._run(self._accept)

    async def receive(self, slots: Slots, checksum: LinkChecksum, posted: asyncio.Event) -> None:
        """Receives into `slots`, adding the bytes to `checksum`. Two-sided only.

        Sets `posted` when the sender may send, or this has failed. Raises TransferFailed.
        """
        on_posted = partial(asyncio.get_running_loop().call_soon_threadsafe, posted.set)
        try:
            await self._run(self._receive, slots, checksum, on_posted)
        except Exception as error:
            self.failed(self)
            raise TransferFailed(str(error)) from error
        finally:
            posted.set()

    def checksum(self, slots: Slots) -> asyncio.Future[LinkChecksum]:
        """Computes the slots' checksum. One-sided links only; raises TransferFailed.

        Need not be awaited.
        """
        reading: asyncio.Future[LinkChecksum] = self._run(self._read_checksum, slots)
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return reading

    def sender_pidfd(self) -> int | None:
        """A pidfd of the prefill process if it writes by itself; closed with the link."""
        pidfd: int | None = self.ends[0].sender_pidfd()  # one process sends for all ranks
        return pidfd

    async def free(self) -> None:
        """Frees the link once its thread has ended its work; waits for no sender."""
        if not self.accepted.done():
            self.abort()
        await self._run(self.close_ends)
        self._thread.shutdown()

    def _run(self, call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _accept(self) -> None:
        deadline = Deadline(self._timeout_s)
        for end in self.ends:  # the sender connects them in this order
            end.accept(deadline.remaining_s)

    def _receive(self, slots: Slots, checksum: LinkChecksum, posted: Callable[[], None]) -> None:
        deadline, first = Deadline(self._timeout_s), threading.Lock()

        def receive(end: ReceivingEnd, part: Checksum) -> None:
            # The sender may send once the first pair's receive is posted.
            on_posted = posted if first.acquire(blocking=False) else lambda: None
            end.receive(slots, part, deadline.remaining_s, on_posted)

        self.each_pair(receive, self.ends, checksum.parts)

    def _read_checksum(self, slots: Slots) -> LinkChecksum:
        found = list[Checksum | None]([None] * len(self._readers))

        def compute(at: int) -> None:
            found[at] = self._readers[at].checksum_of(slots)

        self.each_pair(compute, range(len(found)))
        return LinkChecksum([one for one in found if one is not None])


class LinkUser(Protocol):
    """What receives over the links. Called on the event loop."""

    def senders(self) -> Set[str]:
        """The prefill processes whose links are in use."""

    async def sender_exited(self, incarnation: str) -> None:
        """Called when a sender's process has ended and its link is closed."""


@dataclass(eq=False)
class IncomingLinks:
    """Links by prefill incarnation, at most `_MAX_LINKS`. All methods run on the event loop.

    `pools` are those of the worker's ranks, each with some heads of the same blocks. Prefill
    processes that write into them by themselves are watched: one that has ended writes no more, and
    nothing less proves that. `record` is this worker's, complete before the first Offer;
    `transports` are usable ones; `timeout_s` bounds each receive and each connection.
    """

    pools: Sequence[RankPool]
    record: common_pb2.WorkerRecord
    transports: Sequence[Transport]
    find_prefill: FindWorker
    user: LinkUser
    _: KW_ONLY
    timeout_s: float

    def __post_init__(self) -> None:
        self._pool = local_pool(self.pools)
        self._log = RateLimit(log)
        self._epochs = itertools.count(1)  # of all peers: an epoch is never used twice
        self._links: dict[str, IncomingLink] = {}  # in the order of their Offers
        self._pidfds: dict[str, int] = {}  # of prefill processes that write by themselves
        self._tasks: set[asyncio.Task[Any]] = set()

    async def offer(self, request: pb.OfferRequest) -> pb.OfferResponse:
        """Makes a new link, which ends the peer's earlier one.

        Raises Stale, KvMismatch, Overloaded, TransferFailed.
        """
        ours, theirs = self.record.incarnation, request.incarnation
        if request.target_incarnation != ours:
            raise Stale(f"decode {request.target_incarnation} is gone; this is {ours}")
        if fields := kv_descriptor.differences(request.kv, self.record.kv):
            caches = f"KV caches of prefill {theirs} and decode {ours}"
            raise KvMismatch(f"{caches} differ in {'; '.join(fields)}")
        sender = await self.find_prefill(theirs)
        ends = pairing.PairTopology(
            separation=pairing.separation(sender.host_id, self.record.host_id),
            gpu=gpu_uuid(self._pool.device),
            reachable=tuple(request.reachable_gpus),
            nccl=nccl_version(),
        )
        usable = {transport.kind: transport for transport in self.transports}
        while True:
            transport = usable.pop(pairing.choose(request.transports, usable, ends))
            self._make_room(transport)
            try:
                link = await self._listen(theirs, transport, sender.kv_pools or 1)
                break
            except TransferFailed as error:
                left = usable.keys() & set(request.transports)
                if transport.kind not in pairing.ONE_HOST or not left:
                    raise
                self._log.warning("prefill %s gets another transport: %s", theirs, error)
        self._drop(theirs)
        self._links[theirs] = link
        link.accepted.add_done_callback(lambda done: self._accepted(link, done))
        endpoint = rank_ends.joined_endpoint(link.ends)
        return pb.OfferResponse(transport=transport.kind, epoch=link.epoch, endpoint=endpoint)

    def find(self, incarnation: str, epoch: int) -> IncomingLink:
        """The link of that epoch. Raises Unavailable if it is not in service any more."""
        link = self._links.get(incarnation)
        if link is None or link.epoch != epoch:
            raise Unavailable(f"link epoch {epoch} of prefill {incarnation} is gone")
        return link

    async def opened(self, incarnation: str, epoch: int) -> IncomingLink:
        """Returns what `find` does, once the sender has connected. Raises TransferFailed, too."""
        link = self.find(incarnation, epoch)
        await asyncio.wait({link.accepted})
        link.accepted.result()
        return self.find(incarnation, epoch)

    def keep_only(self, incarnations: Set[str]) -> None:
        """Closes the links of all other prefill processes, except those in use."""
        for incarnation in self._links.keys() - incarnations - self.user.senders():
            self._drop(incarnation)

    async def sender_exited(self, incarnation: str) -> None:
        """Ends the link of a prefill process that is dead; no write follows its return."""
        if (link := self._links.get(incarnation)) is not None:
            # Receives from it fail now, not at their time-out.
            await asyncio.get_running_loop().run_in_executor(None, link.abort)
        self._drop(incarnation)
        await self.user.sender_exited(incarnation)

    async def close(self) -> None:
        for incarnation in list(self._pidfds):
            self._unwatch(incarnation)
        for incarnation in list(self._links):
            self._drop(incarnation)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _listen(self, peer: str, transport: Transport, senders: int) -> IncomingLink:
        epoch = next(self._epochs)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-receive-{peer}")

        def listen() -> IncomingLink:
            heads = self.record.kv.num_kv_heads
            parts, ends = rank_ends.listen(transport, self.pools, senders, heads)
            try:
                return IncomingLink(peer, epoch, transport, parts, ends, thread, self.timeout_s)
            except BaseException:
                rank_ends.close_all(ends)
                raise

        try:
            link = await run_on(thread, listen, IncomingLink.close_ends)
        except BaseException as error:
            thread.shutdown(wait=False)
            if isinstance(error, (OSError, RuntimeError)):
                raise TransferFailed(f"{transport.name}: cannot listen: {error}") from error
            raise
        link.failed = self._drop_link
        link.accept()
        return link

    def _accepted(self, link: IncomingLink, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.warning("link of prefill %s did not open: %s", link.peer, error)
            self._drop_link(link)
        elif self._links.get(link.peer) is link:  # otherwise its descriptors may be closed
            self._watch(link.peer, link.sender_pidfd())

    def _watch(self, incarnation: str, pidfd: int | None) -> None:
        def ended() -> None:
            log.warning("prefill process %s has ended", incarnation)
            self._unwatch(incarnation)
            in_background(self._tasks, self.sender_exited(incarnation))

        if pidfd is not None and incarnation not in self._pidfds:
            self._pidfds[incarnation] = os.dup(pidfd)
            # A pidfd becomes readable when its process exits.
            asyncio.get_running_loop().add_reader(self._pidfds[incarnation], ended)

    def _unwatch(self, incarnation: str) -> None:
        if (pidfd := self._pidfds.pop(incarnation, -1)) >= 0:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _drop(self, incarnation: str) -> None:
        """Takes the process's link, if it has one, out of service."""
        if (link := self._links.pop(incarnation, None)) is not None:
            in_background(self._tasks, link.free())

    def _drop_link(self, link: IncomingLink) -> None:
        """Takes this link out of service, unless another one has replaced it."""
        if self._links.get(link.peer) is link:
            self._drop(link.peer)

    def _make_room(self, transport: Transport) -> None:
        """Drops an unused link if there are too many, of all transports or of this one."""
        peers = list(self._links)
        if len(peers) < _MAX_LINKS:
            kind = transport.kind
            peers = [peer for peer, link in self._links.items() if link.transport.kind == kind]
            if len(peers) < transport.max_links:
                return
        in_use = self.user.senders()
        idle = next((peer for peer in peers if peer not in in_use), None)
        if idle is None:
            raise Overloaded(f"all {len(peers)} links are in use")
        self._drop(idle)
