"""The decode side of handoffs: grants writes, receives blocks, starts decoding, verifies them.

A handoff's record lives from its first Ready to its Commit or Abort. While bytes may still arrive
in its blocks it outlives its reservation and keeps those blocks in quarantine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, TypeAlias

from baton.cuda import gpu_uuid, nccl_version
from baton.errors import (
    BatonError,
    InvalidRequest,
    KvCorrupted,
    KvMismatch,
    Overloaded,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.log_format import RateLimit, about
from baton.telemetry import propagation, tracing
from baton.v1 import common_pb2
from baton.v1 import handoff_pb2 as pb
from kvtransfer import pairing, rank_links
from kvtransfer.control import ControlServicer
from kvtransfer.deadline import in_background, uninterrupted
from kvtransfer.interface import FindWorker, Transport
from kvtransfer.pool import Slots
from kvtransfer.rank_links import PairDigest, RankListener, RankPool, own_pool

log = logging.getLogger(__name__)

Trace: TypeAlias = Mapping[str, str]  # W3C trace context
Verified: TypeAlias = "asyncio.Future[None] | None"  # fails where the KV is not what was sent

_MAX_LINKS = 64


@dataclass(frozen=True)
class ReservedBlocks:
    """Blocks held for one sequence of `num_tokens` tokens.

    `block_ids` cover the whole sequence in order (more may follow); its first `cached_tokens`, a
    multiple of the pool's block size, are valid already, perhaps shared, and never written.
    `token_digest` (`baton.block_hash`) is that of the sequence: only its KV may come in.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    cached_tokens: int
    token_digest: bytes


class BlockOwner(Protocol):
    """The decode worker, which holds the blocks. Called on the event loop."""

    def find(self, handoff_id: str, token: str) -> ReservedBlocks:
        """What is reserved. Raises Stale when unknown, expired, or the token is wrong."""

    async def committed(
        self, handoff_id: str, token: str, first_token_id: int, verified: Verified = None
    ) -> None:
        """All KV is in place: decoding starts with this token. Until it is `verified`, if that is
        not known, nobody is told what comes of it, and no block of it is shared. Where that fails,
        its reservation ends, and this raises why."""

    async def aborted(self, handoff_id: str, token: str, reason: str) -> None:
        """Nothing is written any more: the blocks can be used again, also where the reservation is
        gone already; may be called twice."""


@dataclass(eq=False)
class _Incoming:
    """One handoff's bytes so far: `[cached_tokens, next_token)` has been announced."""

    handoff_id: str
    token: str
    peer: str
    epoch: int
    block_size: int
    reserved: ReservedBlocks
    next_token: int
    digest: PairDigest
    trace: Trace
    granted: bool = False  # a one-sided sender may write
    receives: set[asyncio.Task[Any]] = field(default_factory=set)
    failure: BatonError | None = None
    ended: str | None = None  # why it was given up while bytes might still come
    resend: bool = False  # given up by its sender, which will send all of it again

    @property
    def writing(self) -> bool:
        """Whether the reserved blocks may still change."""
        return self.granted or bool(self.receives)

    @property
    def slots(self) -> Slots:
        return self._between(self.reserved.cached_tokens, self.next_token)

    async def received(self) -> None:
        if self.receives:
            await asyncio.wait(set(self.receives))

    def check_sender(self, token: str, incarnation: str) -> None:
        if self.token != token or self.peer != incarnation:
            raise Stale(f"handoff {self.handoff_id} belongs to another sender")

    def warn(self, error: Exception) -> None:
        trace_id = tracing.trace_id_in(propagation.extract(self.trace.items()))
        more = about(trace_id=trace_id, handoff_id=self.handoff_id)
        log.warning("handoff %s from %s: %s", self.handoff_id, self.peer, error, extra=more)

    def announce(self, first_token: int, num_tokens: int) -> Slots:
        """Where the next tokens go. Raises InvalidRequest when they are not the next ones."""
        reserved, end = self.reserved, first_token + num_tokens
        if first_token != self.next_token:
            text = f"tokens from {first_token} were announced, {self.next_token} are next"
            cached = f" ({reserved.cached_tokens} are cached here)"
            raise InvalidRequest(text + cached, "first_token")
        if num_tokens == 0 or end > reserved.num_tokens:
            raise InvalidRequest(f"[{first_token}, {end}) is not reserved", "num_tokens")
        if end % self.block_size and end != reserved.num_tokens:
            raise InvalidRequest(f"only the last block may be partial, not at {end}", "num_tokens")
        self.next_token = end
        return self._between(first_token, end)

    def check_tokens(self, request: pb.CommitRequest) -> None:
        """Raises KvCorrupted unless all that was reserved was sent; InvalidRequest when it is the
        KV of other tokens."""
        reserved = self.reserved
        if request.token_digest != reserved.token_digest:
            text = f"handoff {self.handoff_id}: other tokens were prefilled than were reserved"
            raise InvalidRequest(text, "token_digest")
        self._compare("tokens", request.num_tokens, reserved.num_tokens)
        self._compare("tokens announced", self.next_token, reserved.num_tokens)

    def check_bytes(self, request: pb.CommitRequest, arrived: PairDigest) -> None:
        """Raises KvCorrupted unless exactly what was sent is here."""
        self._compare("bytes", request.num_bytes, arrived.num_bytes)
        self._compare("checksum", request.checksum, arrived.value)

    def _compare(self, what: str, theirs: int, ours: int) -> None:
        if theirs != ours:
            raise KvCorrupted(f"handoff {self.handoff_id}: {what}: {theirs} != {ours}")

    def _between(self, first_token: int, end: int) -> Slots:
        ids = self.reserved.block_ids[first_token // self.block_size : -(-end // self.block_size)]
        return Slots(ids, end - first_token)


@dataclass(eq=False)
class Peer:
    """One prefill process's current link, and the one thread that works for it."""

    incarnation: str
    epoch: int
    transport: Transport
    listener: RankListener
    thread: ThreadPoolExecutor
    accepted: asyncio.Future[None]

    async def free(self) -> None:
        """Frees the link when its thread has ended its work; waits for no sender."""
        if not self.accepted.done():
            self.listener.abort()
        await asyncio.get_running_loop().run_in_executor(self.thread, self.listener.close)
        self.thread.shutdown()


@dataclass(eq=False)
class HandoffReceiver(ControlServicer):
    """Serves HandoffService for one worker. All methods run on the event loop.

    `pools` are those of its ranks, each with some heads of the same blocks. It keeps one link for
    each prefill process, at most `_MAX_LINKS`, and watches those that write into its memory: one
    that has ended writes no more, and nothing less proves that. `record` is this worker's, complete
    before the first Offer; `transports` are usable ones; `timeout_s` bounds each receive and each
    connection.
    """

    pools: Sequence[RankPool]
    record: common_pb2.WorkerRecord
    transports: Sequence[Transport]
    owner: BlockOwner
    find_prefill: FindWorker
    _: KW_ONLY
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        super().__init__(
            {
                "offer": self.offer,
                "ready": self.ready,
                "commit": self.commit,
                "abort": self.abort,
            }
        )
        self.pool = own_pool(self.pools)
        self._log = RateLimit(log)
        self._incoming: dict[str, _Incoming] = {}
        self._epochs = itertools.count(1)  # of all peers: an epoch is never used twice
        self._peers: dict[str, Peer] = {}  # the one offered first comes first
        self._watches: dict[str, int] = {}  # pidfds of prefill processes that write by themselves
        self._tasks: set[asyncio.Task[Any]] = set()

    async def offer(self, request: pb.OfferRequest, trace: Trace) -> pb.OfferResponse:
        """A new link, which ends the peer's earlier one.

        Raises Stale, KvMismatch, InvalidRequest, Overloaded, TransferFailed.
        """
        ours, theirs = self.record.incarnation, request.incarnation
        if request.target_incarnation != ours:
            raise Stale(f"decode {request.target_incarnation} is gone; this is {ours}")
        if fields := pairing.differences(request.kv, self.record.kv):
            caches = f"KV caches of prefill {theirs} and decode {ours}"
            raise KvMismatch(f"{caches} differ in {'; '.join(fields)}")
        sender = await self.find_prefill(theirs)
        ends = pairing.Ends(
            apart=pairing.apart(sender.host_id, self.record.host_id),
            gpu=gpu_uuid(self.pool.device),
            reachable=tuple(request.reachable_gpus),
            nccl=nccl_version(),
        )
        usable = {transport.kind: transport for transport in self.transports}
        while True:
            transport = usable.pop(pairing.choose(request.transports, usable, ends))
            self._make_room(transport)
            try:
                peer = await self._listen(theirs, transport, sender.kv_pools or 1)
                break
            except TransferFailed as error:
                left = usable.keys() & set(request.transports)
                if transport.kind not in pairing.ONE_HOST or not left:
                    raise
                self._log.warning("the link of prefill %s goes another way: %s", theirs, error)
        self._drop(theirs)
        self._peers[theirs] = peer
        peer.accepted.add_done_callback(lambda done: self._accepted(peer, done))
        endpoint = peer.listener.endpoint
        return pb.OfferResponse(transport=transport.kind, epoch=peer.epoch, endpoint=endpoint)

    async def ready(self, request: pb.ReadyRequest, trace: Trace) -> pb.ReadyResponse:
        """Grants the write, or returns once the receive is posted.

        Raises Unavailable for a link that is gone, Stale, InvalidRequest, TransferFailed.
        """
        peer = self._peer(request)
        await asyncio.wait({peer.accepted})
        peer.accepted.result()
        peer = self._peer(request)
        record = self._record(request, trace)
        slots = record.announce(request.first_token, request.num_tokens)
        slots.check(self.pool.block_size, self.pool.num_blocks)
        if peer.transport.one_sided:
            record.granted = True
        else:
            await self._post(peer, record, slots)
        return pb.ReadyResponse(block_ids=slots.block_ids)

    async def commit(self, request: pb.CommitRequest, trace: Trace) -> pb.CommitResponse:
        """Starts decoding, and returns when the KV is verified. Raises Unavailable, Stale,
        KvCorrupted, TransferFailed."""
        # To the end even if the caller hangs up: a commit must not stop half-way.
        await uninterrupted(self._commit(request, trace))
        return pb.CommitResponse()

    async def abort(self, request: pb.AbortRequest, trace: Trace) -> pb.AbortResponse:
        """The sender writes no more, or not before the next Ready if it means to send all again.

        Raises Stale when it is not the handoff's sender, and for one that would send again, when
        its reservation is gone.
        """
        # To the end even if the caller hangs up: blocks that are in no list would be lost.
        await uninterrupted(self._abort(request))
        return pb.AbortResponse()

    async def _abort(self, request: pb.AbortRequest) -> None:
        handoff_id, token = request.handoff_id, request.reservation_token
        record = self._incoming.get(handoff_id)
        if record is not None:
            record.check_sender(token, request.incarnation)
            record.granted, record.resend = False, request.resend
            await self._end(record, request.reason)
            await record.received()  # the last bytes, or the end of the link, are on their way
        elif not request.resend:
            await self.owner.aborted(handoff_id, token, request.reason)
        if request.resend:
            self.owner.find(handoff_id, token)

    def writing(self, handoff_id: str) -> bool:
        """Whether bytes may still come into this handoff's blocks."""
        record = self._incoming.get(handoff_id)
        return record is not None and record.writing

    def forget(self, handoff_id: str) -> None:
        """Its reservation is gone. If `writing`, its blocks are free once `aborted` is called."""
        if (record := self._incoming.get(handoff_id)) is not None:
            record.ended = record.ended or "the reservation is gone"
            if not record.writing:
                del self._incoming[handoff_id]

    def keep_links(self, incarnations: Set[str]) -> None:
        """Closes the links of all other prefill processes, except those that handoffs use."""
        for incarnation in self._peers.keys() - incarnations - self._busy():
            self._drop(incarnation)

    async def peer_gone(self, incarnation: str) -> None:
        """That prefill process is dead: nothing of it is written once this returns, and the
        handoffs that it leaves unfinished are given up."""
        if (peer := self._peers.get(incarnation)) is not None:
            # Receives from it fail now, not at their time-out.
            await asyncio.get_running_loop().run_in_executor(None, peer.listener.abort)
        self._drop(incarnation)
        left = [record for record in self._incoming.values() if record.peer == incarnation]
        for record in left:
            record.granted, record.ended = False, f"prefill {incarnation} is gone"
            del self._incoming[record.handoff_id]
        for record in left:
            await record.received()
        reason = f"prefill {incarnation} has ended"
        for record in left:
            await self.owner.aborted(record.handoff_id, record.token, reason)

    async def close(self) -> None:
        for incarnation in list(self._watches):
            self._unwatch(incarnation)
        for incarnation in list(self._peers):
            self._drop(incarnation)
        self.close_streams()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _commit(self, request: pb.CommitRequest, trace: Trace) -> None:
        peer, record = self._peer(request), self._record(request, trace)
        await record.received()
        try:
            if record.failure is not None:
                raise record.failure
            self._check_reserved(record)
            record.check_tokens(request)
            if not peer.transport.one_sided:
                record.check_bytes(request, record.digest)
            if self._incoming.get(record.handoff_id) is not record:
                raise Stale(f"handoff {record.handoff_id} was committed already")
            del self._incoming[record.handoff_id]
        except BatonError as error:
            record.warn(error)
            record.granted = False  # Commit says that all has been written
            # Its sender still has the KV; if it does not come back, the lease ends the reservation.
            record.resend = isinstance(error, TransferFailed)
            await self._end(record, str(error))
            raise
        ours = record.handoff_id, record.token, request.first_token_id
        if not peer.transport.one_sided:
            await self.owner.committed(*ours)
            return
        # What was written is read once more, for which decoding does not wait.
        loop = asyncio.get_running_loop()
        digest = loop.run_in_executor(peer.thread, peer.listener.digest, record.slots)
        verified = in_background(self._tasks, self._verify(record, request, digest))
        verified.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await self.owner.committed(*ours, verified)
        except TransferFailed as error:
            record.warn(error)
            raise

    async def _verify(
        self, record: _Incoming, request: pb.CommitRequest, digest: asyncio.Future[PairDigest]
    ) -> None:
        """Compares what lies in the blocks with what was sent. Raises TransferFailed."""
        await asyncio.wait({digest}, timeout=self.timeout_s)
        if not digest.done():
            raise TransferFailed("the blocks were not read back in time")
        record.check_bytes(request, digest.result())

    async def _post(self, peer: Peer, record: _Incoming, slots: Slots) -> None:
        """Starts the receive and returns when it is posted. Raises TransferFailed."""
        loop = asyncio.get_running_loop()
        posted = loop.create_future()

        def on_posted() -> None:
            loop.call_soon_threadsafe(posted.set_result, None)

        what = slots, record.digest, self.timeout_s, on_posted
        receive = loop.run_in_executor(peer.thread, peer.listener.receive, *what)
        task = in_background(self._tasks, self._received(peer, record, receive))
        record.receives.add(task)
        task.add_done_callback(record.receives.discard)
        await asyncio.wait({posted, receive}, return_when=asyncio.FIRST_COMPLETED)
        if not posted.done():
            receive.result()

    async def _received(self, peer: Peer, record: _Incoming, receive: asyncio.Future[None]) -> None:
        try:
            await receive
            self._check_reserved(record)
        except Stale as error:
            record.warn(error)
            record.failure = record.failure or error
        except (BatonError, OSError) as error:
            record.warn(error)
            record.failure = record.failure or TransferFailed(str(error))
            self._drop(peer.incarnation, peer)
        record.receives.discard(asyncio.current_task())
        if record.ended is not None and not record.writing:
            await self._end(record, record.ended)

    async def _end(self, record: _Incoming, reason: str) -> None:
        """Ends the record, and as soon as nothing is written into them gives its blocks back,
        unless its reservation waits for a resend."""
        record.ended = record.ended or reason
        if record.writing or self._incoming.get(record.handoff_id) is not record:
            return
        del self._incoming[record.handoff_id]
        if record.resend and self._is_reserved(record):
            extra = about(handoff_id=record.handoff_id)
            log.info("handoff %s is resent: %s", record.handoff_id, record.ended, extra=extra)
            return
        await self.owner.aborted(record.handoff_id, record.token, record.ended)

    def _record(self, request: pb.ReadyRequest | pb.CommitRequest, trace: Trace) -> _Incoming:
        """The handoff's record, new if this is its first message. Raises Stale."""
        handoff_id, token = request.handoff_id, request.reservation_token
        record = self._incoming.get(handoff_id)
        if record is None:
            reserved = self.owner.find(handoff_id, token)
            sender = request.incarnation, request.epoch, self.pool.block_size
            digest = self._peer(request).listener.new_digest()
            cached = reserved.cached_tokens
            record = _Incoming(handoff_id, token, *sender, reserved, cached, digest, dict(trace))
            self._incoming[handoff_id] = record
        record.check_sender(token, request.incarnation)
        if record.epoch != request.epoch:
            raise Stale(f"handoff {handoff_id} began on link epoch {record.epoch}")
        self._check_reserved(record)
        return record

    def _check_reserved(self, record: _Incoming) -> None:
        """Raises Stale unless the blocks are still held for this handoff, and the same ones."""
        if record.ended is not None or not self._is_reserved(record):
            raise Stale(f"the reservation of handoff {record.handoff_id} is gone")

    def _is_reserved(self, record: _Incoming) -> bool:
        try:
            return self.owner.find(record.handoff_id, record.token) == record.reserved
        except Stale:
            return False

    # The links.

    async def _listen(self, incarnation: str, transport: Transport, senders: int) -> Peer:
        run = asyncio.get_running_loop().run_in_executor
        epoch = next(self._epochs)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-receive-{incarnation}")
        try:
            ranks = self.pools, senders, self.record.kv.num_kv_heads
            listener = await run(thread, rank_links.listen, transport, *ranks)
        except BaseException as error:
            thread.shutdown(wait=False)
            if isinstance(error, (OSError, RuntimeError)):
                raise TransferFailed(f"{transport.name}: cannot listen: {error}") from error
            raise
        accepted = run(thread, listener.accept, self.timeout_s)
        return Peer(incarnation, epoch, transport, listener, thread, accepted)

    def _watch(self, incarnation: str, pidfd: int | None) -> None:
        def ended() -> None:
            log.warning("prefill process %s has ended", incarnation)
            self._unwatch(incarnation)
            in_background(self._tasks, self.peer_gone(incarnation))

        if pidfd is not None and incarnation not in self._watches:
            self._watches[incarnation] = os.dup(pidfd)
            # It is readable after the exit.
            asyncio.get_running_loop().add_reader(self._watches[incarnation], ended)

    def _unwatch(self, incarnation: str) -> None:
        if (pidfd := self._watches.pop(incarnation, -1)) >= 0:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _accepted(self, peer: Peer, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.warning("link of prefill %s did not open: %s", peer.incarnation, error)
            self._drop(peer.incarnation, peer)
        elif self._peers.get(peer.incarnation) is peer:  # else its descriptors may be closed
            self._watch(peer.incarnation, peer.listener.sender_pidfd())

    def _peer(self, request: pb.ReadyRequest | pb.CommitRequest) -> Peer:
        """The request's link. Raises Unavailable when it is not in service any more."""
        peer = self._peers.get(request.incarnation)
        if peer is None or peer.epoch != request.epoch:
            raise Unavailable(
                f"link epoch {request.epoch} of prefill {request.incarnation} is gone"
            )
        return peer

    def _drop(self, incarnation: str, only: Peer | None = None) -> None:
        """Takes the process's link out of service, whichever it is or if it is `only`."""
        peer = self._peers.get(incarnation)
        if peer is not None and only in (None, peer):
            del self._peers[incarnation]
            in_background(self._tasks, peer.free())

    def _busy(self) -> Set[str]:
        """The prefill processes from which bytes are coming."""
        return {record.peer for record in self._incoming.values()}

    def _make_room(self, transport: Transport) -> None:
        """Drops a link without handoffs if there are too many, of all kinds or of this one."""
        names = list(self._peers)
        if len(names) < _MAX_LINKS:
            names = [n for n, peer in self._peers.items() if peer.transport.kind == transport.kind]
            if len(names) < transport.max_links:
                return
        busy = self._busy()
        idle = next((name for name in names if name not in busy), None)
        if idle is None:
            raise Overloaded(f"all {len(names)} links are in use")
        self._drop(idle)
