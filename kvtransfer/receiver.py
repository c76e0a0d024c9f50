"""The decode side of handoffs: grants writes, takes blocks in, verifies them, starts decoding.

A handoff's record lives from its first Ready to its Commit or Abort. While bytes may still come
into its blocks it outlives its reservation: it is what keeps those blocks in quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from baton.errors import BatonError, Stale, TransferFailed
from baton.log_format import about
from baton.v1 import common_pb2
from baton.v1 import handoff_pb2 as pb
from kvtransfer import movers, negotiation
from kvtransfer.digest import Digest
from kvtransfer.incoming import Incoming, Reservations, ReservedBlocks
from kvtransfer.interface import FindWorker, Transport
from kvtransfer.peers import Peer, Peers
from kvtransfer.pool import KvPool, Slots
from kvtransfer.waiting import uninterrupted

log = logging.getLogger(__name__)


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
        find_prefill: FindWorker,
        *,
        timeout_s: float = 10.0,
        max_links: int = 64,
    ) -> None:
        self._pool, self._descriptor = pool, descriptor
        self._incarnation, self._host_id = incarnation, host_id
        self._transports, self._reservations = transports, reservations
        self._find_prefill = find_prefill
        self._timeout_s = timeout_s
        self._incoming: dict[str, Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers = Peers(
            pool,
            timeout_s=timeout_s,
            max_links=max_links,
            busy=lambda: {record.peer for record in self._incoming.values()},
            on_exit=self._on_exit,
        )

    async def offer(self, request: pb.OfferRequest) -> pb.OfferResponse:
        """A new link, which ends the peer's earlier one.

        Raises Stale, KvMismatch, Overloaded, TransferFailed.
        """
        if request.target_incarnation != self._incarnation:
            raise Stale(f"decode {request.target_incarnation} is gone; this is {self._incarnation}")
        negotiation.check_same(request.kv, self._descriptor, request.incarnation, self._incarnation)
        sender = await self._find_prefill(request.incarnation)
        ends = negotiation.ends_of(request, sender, self._host_id, self._pool)
        transport = negotiation.choose(request.transports, self._transports, ends=ends)
        pid = sender.pid if ends.same_host else 0
        endpoint, peer = await self._peers.open(request.incarnation, transport, pid)
        return pb.OfferResponse(transport=transport.kind, epoch=peer.epoch, endpoint=endpoint)

    async def ready(self, request: pb.ReadyRequest) -> pb.ReadyResponse:
        """Grants the write, or returns once the receive is posted.

        Raises Unavailable for a link that is gone, Stale, InvalidRequest, TransferFailed.
        """
        peer = await self._peers.connected(request.incarnation, request.epoch)
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
        """The sender writes no more, or not before the next Ready if it means to send all again.

        Raises Stale when it is not the handoff's sender, and for one that would send again, when
        its reservation is gone.
        """
        handoff_id, token = request.handoff_id, request.reservation_token
        record = self._incoming.get(handoff_id)
        if record is not None:
            self._check_sender(record, token, request.incarnation)
            record.granted, record.resend = False, request.resend
            await self._end(record, request.reason)
            if record.receives:  # the last bytes, or the end of the link, are on their way
                await asyncio.wait(set(record.receives))
        elif not request.resend:
            await self._reservations.aborted(handoff_id, token, request.reason)
        if request.resend:
            self._reservations.find(handoff_id, token)
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
        await self._peers.abort(incarnation)
        left = [record for record in self._incoming.values() if record.peer == incarnation]
        self._peers.drop(incarnation)
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
        await self._peers.close()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _on_exit(self, incarnation: str) -> None:
        async def give_up() -> None:
            await self.peer_gone(incarnation)

        self._start(give_up())

    async def _commit(self, request: pb.CommitRequest) -> None:
        peer = self._peers.find(request.incarnation, request.epoch)
        record = self._record(request)
        if record.receives:
            await asyncio.wait(set(record.receives))
        try:
            if record.failure is not None:
                raise record.failure
            arrived = await self._arrived(peer, record)
            self._check_reserved(record)
            record.verify(request, arrived)
            if self._incoming.get(record.handoff_id) is not record:
                raise Stale(f"handoff {record.handoff_id} was committed already")
            del self._incoming[record.handoff_id]
        except BatonError as error:
            _warn(record, error)
            record.granted = False  # Commit says that all has been written
            # Its sender still has the KV; if it does not come back, the lease ends the reservation.
            record.resend = isinstance(error, TransferFailed)
            await self._end(record, str(error))
            raise
        await self._reservations.committed(record.handoff_id, record.token, request.first_token_id)

    async def _arrived(self, peer: Peer, record: Incoming) -> Digest:
        """The digest of what came in; of one-sided writes only the blocks themselves can tell."""
        if not peer.transport.one_sided:
            return record.digest
        run = asyncio.get_running_loop().run_in_executor
        return await run(peer.thread, movers.digest, self._pool, record.slots)

    async def _post(self, peer: Peer, record: Incoming, slots: Slots) -> None:
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

    async def _received(self, peer: Peer, record: Incoming, receive: asyncio.Future[None]) -> None:
        try:
            await receive
            self._check_reserved(record)
        except (BatonError, OSError) as error:
            _warn(record, error)
            failed = not isinstance(error, Stale)
            record.failure = record.failure or (
                TransferFailed(str(error)) if failed else Stale(str(error))
            )
            if failed:
                self._peers.condemn(peer)
        record.receives.discard(asyncio.current_task())
        if record.ended is not None and not record.writing:
            await self._end(record, record.ended)

    async def _end(self, record: Incoming, reason: str) -> None:
        """Ends the record, and as soon as nothing is written into them gives its blocks back.

        A reservation that waits for all to be sent again keeps them.
        """
        record.ended = record.ended or reason
        if record.writing or self._incoming.get(record.handoff_id) is not record:
            return
        del self._incoming[record.handoff_id]
        if record.resend and self._still_reserved(record):
            log.info(
                "handoff %s is to be sent again: %s",
                record.handoff_id,
                record.ended,
                extra=about(handoff_id=record.handoff_id),
            )
            return
        await self._reservations.aborted(record.handoff_id, record.token, record.ended)

    def _record(self, request: pb.ReadyRequest | pb.CommitRequest) -> Incoming:
        """The handoff's record, new if this is its first message. Raises Stale."""
        handoff_id, token = request.handoff_id, request.reservation_token
        record = self._incoming.get(handoff_id)
        if record is None:
            reserved = self._reservations.find(handoff_id, token)
            sender = request.incarnation, request.epoch
            digest, cached = self._pool.new_digest(), reserved.cached_tokens
            record = Incoming(handoff_id, token, *sender, reserved, cached, digest)
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

    def _still_reserved(self, record: Incoming) -> bool:
        try:
            return self._reservations.find(record.handoff_id, record.token) == record.reserved
        except Stale:
            return False

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _warn(record: Incoming, error: Exception) -> None:
    more = about(handoff_id=record.handoff_id)
    log.warning("handoff %s from %s: %s", record.handoff_id, record.peer, error, extra=more)
