"""The decode side of handoffs: offers links, takes blocks in, verifies them, starts decoding."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, Overloaded, Stale, TransferFailed, Unavailable
from baton.v1 import common_pb2
from baton.v1 import handoff_pb2 as pb
from kvtransfer import negotiation
from kvtransfer.incoming import Incoming, Reservations, ReservedBlocks
from kvtransfer.liveness import ProcessWatch
from kvtransfer.pool import Digest, KvPool, Slots
from kvtransfer.seam import Kind, Listener, Transport
from kvtransfer.waiting import uninterrupted

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Peer:
    """One prefill process's current link, and the one thread that works for it."""

    incarnation: str
    epoch: int
    transport: Transport
    listener: Listener
    thread: ThreadPoolExecutor
    accepted: asyncio.Future[None]


class HandoffReceiver:
    """Serves HandoffService for one pool. All methods run on the event loop.

    `transports` are usable ones; `timeout_s` bounds each receive and each connection. At most
    `max_links` links are kept; one that no handoff uses makes room for a new one.
    """

    def __init__(
        self,
        pool: KvPool,
        descriptor: common_pb2.KvDescriptor,
        incarnation: str,
        host_id: str,
        transports: Sequence[Transport],
        reservations: Reservations,
        *,
        timeout_s: float = 10.0,
        max_links: int = 64,
    ) -> None:
        self._pool, self._descriptor = pool, descriptor
        self._incarnation, self._host_id = incarnation, host_id
        self._transports, self._reservations = transports, reservations
        self._timeout_s, self._max_links = timeout_s, max_links
        self._listeners: dict[Kind, Listener] = {}
        self._epochs = itertools.count(1)  # of all peers: an epoch is never used twice
        self._peers: dict[str, _Peer] = {}  # the one offered first comes first
        self._incoming: dict[str, Incoming] = {}
        self._watches: dict[str, ProcessWatch] = {}  # of peers on this host
        self._tasks: set[asyncio.Task[None]] = set()

    async def offer(self, request: pb.OfferRequest) -> pb.OfferResponse:
        """A new link, which ends the peer's earlier one. Raises Stale, KvMismatch, Overloaded."""
        if request.target_incarnation != self._incarnation:
            raise Stale(f"decode {request.target_incarnation} is gone; this is {self._incarnation}")
        negotiation.check_same(request.kv, self._descriptor, request.incarnation, self._incarnation)
        same_host = request.host_id == self._host_id
        transport = negotiation.choose(request.transports, self._transports, same_host)
        self._make_room()
        if transport.kind not in self._listeners:
            self._listeners[transport.kind] = transport.listen(self._pool)
        endpoint, peer = await self._listen(request.incarnation, transport)
        self._drop(request.incarnation)
        self._peers[request.incarnation] = peer
        if same_host and request.pid:
            self._watch(request.incarnation, request.pid)
        peer.accepted.add_done_callback(lambda done: self._accepted(peer, done))
        return pb.OfferResponse(transport=transport.kind, epoch=peer.epoch, endpoint=endpoint)

    async def ready(self, request: pb.ReadyRequest) -> pb.ReadyResponse:
        """Grants the write, or returns once the receive is posted.

        Raises Unavailable for a link that is gone, Stale, InvalidRequest, TransferFailed.
        """
        peer = self._peer(request.incarnation, request.epoch)
        await asyncio.wait({peer.accepted})
        peer.accepted.result()
        self._peer(request.incarnation, request.epoch)
        record = self._record(request)
        slots = record.announce(request.first_token, request.num_tokens)
        slots.check(self._pool.block_size, self._pool.num_blocks)
        if peer.transport.one_sided:
            record.granted = True
        else:
            await self._post(peer, record, slots)
        return pb.ReadyResponse(block_ids=slots.block_ids)

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Verifies and starts decoding. Raises Unavailable, Stale, KvCorrupted, TransferFailed."""
        # To the end even if the caller hangs up: half a commit would be neither here nor there.
        await uninterrupted(self._commit(request))
        return pb.CommitResponse()

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """The sender writes no more. Raises Stale when it is not the handoff's sender."""
        record = self._incoming.get(request.handoff_id)
        if record is None:
            await self._reservations.aborted(
                request.handoff_id, request.reservation_token, request.reason
            )
        else:
            self._check_sender(record, request.reservation_token, request.incarnation)
            record.granted = False
            await self._end(record, request.reason)
            if record.receives:  # the last bytes, or the end of the link, are on their way
                await asyncio.wait(set(record.receives))
        return pb.AbortResponse()

    def writing(self, handoff_id: str) -> bool:
        """Whether bytes may still come into this handoff's blocks."""
        record = self._incoming.get(handoff_id)
        return record is not None and record.writing

    def forget(self, handoff_id: str) -> None:
        """Its reservation is gone. While `writing`, `aborted` tells when its blocks are free."""
        record = self._incoming.get(handoff_id)
        if record is not None:
            record.ended = record.ended or "the reservation is gone"
            if not record.writing:
                del self._incoming[handoff_id]

    async def peer_gone(self, incarnation: str) -> list[str]:
        """That prefill process is dead: nothing of it is written once this returns.

        Gives up the handoffs that it leaves unfinished, and returns their ids.
        """
        left = [record for record in self._incoming.values() if record.peer == incarnation]
        self._drop(incarnation)
        receives = {task for record in left for task in record.receives}
        for record in left:
            record.granted, record.ended = False, f"prefill {incarnation} is gone"
            del self._incoming[record.handoff_id]
        if receives:
            await asyncio.wait(receives)
        reason = f"prefill {incarnation} has ended"
        for record in left:
            await self._reservations.aborted(record.handoff_id, record.token, reason)
        return [record.handoff_id for record in left]

    async def close(self) -> None:
        """Drops every link and waits for what still runs on their threads."""
        for watch in self._watches.values():
            watch.close()
        for incarnation in list(self._peers):
            self._drop(incarnation)
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        for listener in self._listeners.values():
            listener.close()

    async def _listen(self, incarnation: str, transport: Transport) -> tuple[bytes, _Peer]:
        """The endpoint of a new link, and the link, whose thread waits for the peer."""
        run = asyncio.get_running_loop().run_in_executor
        epoch, listener = next(self._epochs), self._listeners[transport.kind]
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-receive-{incarnation}")
        try:
            endpoint = await run(thread, listener.offer, incarnation, epoch)
        except BaseException as error:
            thread.submit(listener.drop, incarnation, epoch)
            thread.shutdown(wait=False)
            if isinstance(error, (OSError, RuntimeError)):
                raise TransferFailed(f"{transport.name}: cannot listen: {error}") from error
            raise
        accepted = run(thread, listener.accept, incarnation, epoch, self._timeout_s)
        return endpoint, _Peer(incarnation, epoch, transport, listener, thread, accepted)

    def _watch(self, incarnation: str, pid: int) -> None:
        """A process that has ended writes no more; nothing less proves that."""

        def ended() -> None:
            log.warning("prefill process %d (%s) has ended", pid, incarnation)
            self._watches.pop(incarnation, None)
            self._start(self._ended(incarnation))

        if incarnation not in self._watches:
            self._watches[incarnation] = ProcessWatch(pid, ended)

    async def _ended(self, incarnation: str) -> None:
        await self.peer_gone(incarnation)

    async def _commit(self, request: pb.CommitRequest) -> None:
        peer = self._peer(request.incarnation, request.epoch)
        record = self._record(request)
        if record.receives:
            await asyncio.wait(set(record.receives))
        try:
            if record.failure is not None:
                raise record.failure
            arrived = await self._arrived(peer, record)
            self._check_reserved(record)
            record.verify(request, arrived)
            if self._incoming.pop(record.handoff_id, None) is not record:
                raise Stale(f"handoff {record.handoff_id} was committed already")
        except BatonError as error:
            log.warning("handoff %s from %s: %s", record.handoff_id, record.peer, error)
            record.granted = False  # Commit says that all has been written
            await self._end(record, str(error))
            raise
        await self._reservations.committed(record.handoff_id, record.token, request.first_token_id)

    async def _arrived(self, peer: _Peer, record: Incoming) -> Digest:
        """The digest of what came in; of one-sided writes only the blocks themselves can tell."""
        if not peer.transport.one_sided:
            return record.digest
        run = asyncio.get_running_loop().run_in_executor
        return await run(peer.thread, self._pool.digest, record.slots)

    async def _post(self, peer: _Peer, record: Incoming, slots: Slots) -> None:
        """Starts the receive and returns when it is posted. Raises TransferFailed."""
        loop = asyncio.get_running_loop()
        posted = loop.create_future()

        def on_posted() -> None:
            loop.call_soon_threadsafe(posted.set_result, None)

        receive = loop.run_in_executor(
            peer.thread,
            peer.listener.receive,
            peer.incarnation,
            peer.epoch,
            slots,
            record.digest,
            self._timeout_s,
            on_posted,
        )
        task = self._start(self._received(peer, record, receive))
        record.receives.add(task)
        task.add_done_callback(record.receives.discard)
        await asyncio.wait({posted, receive}, return_when=asyncio.FIRST_COMPLETED)
        if not posted.done():
            receive.result()

    async def _received(self, peer: _Peer, record: Incoming, receive: asyncio.Future[None]) -> None:
        try:
            await receive
            self._check_reserved(record)
        except (BatonError, OSError) as error:
            log.warning("handoff %s from %s: %s", record.handoff_id, record.peer, error)
            failed = not isinstance(error, Stale)
            record.failure = record.failure or (
                TransferFailed(str(error)) if failed else Stale(str(error))
            )
            if failed and self._peers.get(peer.incarnation) is peer:
                self._drop(peer.incarnation)
        record.receives.discard(asyncio.current_task())
        if record.ended is not None and not record.writing:
            await self._end(record, record.ended)

    async def _end(self, record: Incoming, reason: str) -> None:
        """Gives the handoff up, and its blocks back as soon as nothing is written into them."""
        record.ended = record.ended or reason
        if record.writing or self._incoming.get(record.handoff_id) is not record:
            return
        del self._incoming[record.handoff_id]
        await self._reservations.aborted(record.handoff_id, record.token, record.ended)

    def _record(self, request: pb.ReadyRequest | pb.CommitRequest) -> Incoming:
        """The handoff's record, new if this is its first message. Raises Stale."""
        handoff_id, token = request.handoff_id, request.reservation_token
        record = self._incoming.get(handoff_id)
        if record is None:
            reserved = self._reservations.find(handoff_id, token)
            record = Incoming(
                handoff_id,
                token,
                request.incarnation,
                request.epoch,
                reserved,
                reserved.cached_tokens,
            )
            self._incoming[handoff_id] = record
        self._check_sender(record, token, request.incarnation)
        if record.epoch != request.epoch:
            raise Stale(f"handoff {handoff_id} began on link epoch {record.epoch}")
        self._check_reserved(record)
        return record

    def _check_sender(self, record: Incoming, token: str, incarnation: str) -> None:
        if record.token != token or record.peer != incarnation:
            raise Stale(f"handoff {record.handoff_id} belongs to another sender")

    def _check_reserved(self, record: Incoming) -> ReservedBlocks:
        """Raises Stale unless the blocks are still held for this handoff, and the same ones."""
        reserved = self._reservations.find(record.handoff_id, record.token)
        if record.ended is not None or reserved != record.reserved:
            raise Stale(f"the reservation of handoff {record.handoff_id} is gone")
        return reserved

    def _peer(self, incarnation: str, epoch: int) -> _Peer:
        peer = self._peers.get(incarnation)
        if peer is None or peer.epoch != epoch:
            raise Unavailable(f"link epoch {epoch} of prefill {incarnation} is gone")
        return peer

    def _accepted(self, peer: _Peer, done: asyncio.Future[None]) -> None:
        if done.cancelled() or (error := done.exception()) is None:
            return
        log.warning("link of prefill %s did not open: %s", peer.incarnation, error)
        if self._peers.get(peer.incarnation) is peer:
            self._drop(peer.incarnation)

    def _make_room(self) -> None:
        if len(self._peers) < self._max_links:
            return
        busy = {record.peer for record in self._incoming.values()}
        idle = next((name for name in self._peers if name not in busy), None)
        if idle is None:
            raise Overloaded(f"all {self._max_links} links are in use")
        self._drop(idle)

    def _drop(self, incarnation: str) -> None:
        """Takes the peer's link out of service; it is freed when its thread has ended its work."""
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            self._start(self._free(peer))

    async def _free(self, peer: _Peer) -> None:
        run = asyncio.get_running_loop().run_in_executor
        await run(peer.thread, peer.listener.drop, peer.incarnation, peer.epoch)
        peer.thread.shutdown()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
