"""The prefill side's links: one for each decode process, opened once and kept while in use.

Aborts are sent here, too: until a decode worker has an Abort it must keep the blocks out of use. So
an Abort must not be lost, but a handoff that is given up need not wait for the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial

from baton.cuda import reachable_gpus
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
from baton.log_format import about
from baton.net.backoff import Backoff
from baton.net.tasks import cancelled, in_background, run_on
from baton.v1 import common_pb2, handoff_pb2, prefill_pb2, worker_pb2
from kvtransfer import pairing, rank_ends
from kvtransfer.checksum import Checksum
from kvtransfer.control import Control
from kvtransfer.deadline import Deadline
from kvtransfer.interface import FindWorker, SendingEnd, Transport
from kvtransfer.pairing import ONE_HOST, Kind
from kvtransfer.pool import Slots
from kvtransfer.rank_ends import LinkChecksum, RankEnds, RankPool, local_pool

log = logging.getLogger(__name__)

# Errors of one handoff; any other error means that the link failed.
_HANDOFF_ERRORS = (Stale, Cancelled, InvalidRequest, KvCorrupted)
_MAX_REMEMBERED = 256  # unusable transports and fallbacks of peers; more than live at a time
_CONNECT_S = 5.0  # limit of Offer and of connecting, each
_NO_ANSWER = (Unavailable, DeadlineExceeded, Cancelled)
_MAX_PENDING = 4096  # Aborts that wait for a silent or failed peer
_ABORT_S, _MAX_INTERVAL_S, _CLOSE_S = 2.0, 5.0, 1.0


class OutgoingLink(RankEnds[SendingEnd]):
    """One open link: its ends, the thread that its puts run on, and its control stream.

    `turn` is held from Ready to the end of the put: a two-sided receiver takes bytes in Ready's
    order.
    """

    def __init__(
        self, peer: str, epoch: int, transport: Transport, pools: Sequence[RankPool],
        ends: Sequence[SendingEnd], thread: ThreadPoolExecutor, control: Control, fallback: str,
    ) -> None:  # fmt: skip
        super().__init__(pools, ends, transport)
        self.peer, self.epoch, self._thread, self.control = peer, epoch, thread, control
        self.fallback = fallback  # the expected faster transport, and why it is not used
        self.turn = asyncio.Lock()
        self.users = 0  # handoffs
        self.aborts = 0  # not answered yet
        self.sent_bytes, self.sent_s = 0, 0.0
        self._closing = False
        self._last_put: asyncio.Future[float] | None = None

    @property
    def puts(self) -> bool:
        """Whether a put runs, in time or not."""
        return self._last_put is not None and not self._last_put.done()

    @property
    def abandoned(self) -> bool:
        """Whether no handoff uses it and its control connection has ended."""
        return not self.users and self.control.lost

    def put(
        self, local: Slots, remote: Slots, checksum: LinkChecksum, timeout_s: float
    ) -> asyncio.Future[float]:
        """Begins to send `local` slots into `remote` ones, each pair its heads of them; the result
        is the seconds that it took. Raises TransferFailed.

        Must not be cancelled: the thread would go on.
        """
        if self._closing:
            raise TransferFailed(f"the link to decode {self.peer} was closed")
        run = asyncio.get_running_loop().run_in_executor
        put = run(self._thread, self._put, local, remote, checksum, timeout_s)
        self._last_put = put
        return put

    def _put(self, local: Slots, remote: Slots, checksum: LinkChecksum, timeout_s: float) -> float:
        bytes_before, start, deadline = checksum.num_bytes, time.perf_counter(), Deadline(timeout_s)

        def put(end: SendingEnd, part: Checksum) -> None:
            end.put(local, remote, part, deadline.remaining_s)

        self.each_pair(put, self.ends, checksum.parts)
        seconds = time.perf_counter() - start
        self.sent_bytes += checksum.num_bytes - bytes_before
        self.sent_s += seconds
        return seconds

    async def close_data(self) -> None:
        """Ends a running put, then frees the ends; control still works."""
        self._closing = True
        run = asyncio.get_running_loop().run_in_executor
        await run(None, self.abort)  # NCCL's takes long
        await run(self._thread, self.close_ends)
        self._thread.shutdown()


@dataclass(eq=False)
class OutgoingLinks:
    """Links by decode incarnation, at most `cap`; the least recently used idle one is closed first.

    A peer whose link failed is refused for `backoff_s`; the next use opens a new epoch. If mapping
    a peer's memory fails, the peer gets the next transport for as long as it lives: the cause is
    how its container was started, so no retry helps. An Abort is repeated until it is answered or
    `give_up_s` have passed. After that only the end of this process frees the blocks; by then the
    peer has almost surely ended.
    """

    pools: Sequence[RankPool]  # one for each rank that has one; block ids are common to all
    record: common_pb2.WorkerRecord  # this worker's, complete before the first link is opened
    transports: Sequence[Transport]
    find_decode: FindWorker
    _: KW_ONLY
    cap: int = 16
    backoff_s: float = 1.0
    give_up_s: float = 600.0

    def __post_init__(self) -> None:
        self.pool = local_pool(self.pools)
        self._links: dict[str, OutgoingLink] = {}  # least recently used first
        self._opening: dict[str, asyncio.Task[OutgoingLink]] = {}
        self._ahead: set[str] = set()  # of these, the ones that no handoff waits for yet
        self._refused_until: dict[str, float] = {}
        self._unusable: dict[tuple[str, Kind], str] = {}  # reasons, by peer and transport
        self._warned: set[tuple[str, str]] = set()  # peers and their fallbacks
        self._aborts: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def acquire(
        self, target: prefill_pb2.HandoffTarget, deadline: Deadline, skip_backoff: bool = False
    ) -> OutgoingLink:
        """The link to `target`, opened if necessary; to be given back with `release`.

        `skip_backoff`: for a handoff whose link failed while the peer's control still answered.
        Raises Unavailable while the pair is quarantined, Overloaded if all links are in use,
        KvMismatch, Stale, TransferFailed, DeadlineExceeded.
        """
        peer = target.incarnation
        while (link := self._links.get(peer)) is None:
            if peer not in self._opening:
                if self._closed:
                    raise Unavailable("the prefill worker is closing its links")
                left_s = self._refused_until.get(peer, 0.0) - time.monotonic()
                if left_s > 0 and not skip_backoff:
                    pair = f"{self.record.incarnation} → {peer}"
                    raise Unavailable(f"the pair {pair} failed just now", left_s)
                self._begin_opening(peer)
            # Never cancelled: other handoffs may wait for it, and its time is bounded.
            opening = self._opening[peer]
            self._ahead.discard(peer)
            await asyncio.wait({opening}, timeout=deadline.left_s(3 * _CONNECT_S))
            if not opening.done():
                deadline.left_s(0)
                raise TransferFailed(f"no link to decode {peer} in time")
            opening.result()
        self._links[peer] = self._links.pop(peer)
        link.users += 1
        return link

    async def open_ahead(self, peer: str) -> None:
        """Opens the link to a decode worker before a handoff needs it, unless there is no room.

        A failure is logged and has no consequence: the first handoff tries again.
        """
        known = len(self._links) + len(self._opening)
        if self._closed or peer in self._links or peer in self._opening or known >= self.cap:
            return
        self._ahead.add(peer)
        await asyncio.wait({self._begin_opening(peer)})

    def release(self, link: OutgoingLink) -> None:
        link.users -= 1
        self._close_unused(link)

    def abort(self, link: OutgoingLink, request: handoff_pb2.AbortRequest) -> asyncio.Event:
        """Starts sending an Abort; the event is set after the first try, successful or not."""
        tried = asyncio.Event()
        give_up_s = self.give_up_s if len(self._aborts) < _MAX_PENDING else _ABORT_S
        link.aborts += 1
        in_background(self._aborts, self._abort(link, request, give_up_s, tried))
        return tried

    @contextlib.contextmanager
    def closing_on_failure(self, link: OutgoingLink, deadline: Deadline) -> Iterator[None]:
        """A context for uses of `link`, which takes it out of service if it fails.

        A missing answer and the peer's internal errors become TransferFailed. If the request's own
        deadline ended a call or a put, which raises DeadlineExceeded, the peer is not quarantined,
        but a two-sided link is replaced, because its ends may disagree about the next message. A
        put that goes on after its time is a failure of the link.
        """
        try:
            yield
        except _HANDOFF_ERRORS:
            raise
        except BatonError as error:
            cut_short = isinstance(error, TransferFailed) and not link.puts
            out_of_time = deadline.ended_wait and (cut_short or isinstance(error, DeadlineExceeded))
            if not (out_of_time and link.transport.one_sided):
                self.remove(link, quarantine=not out_of_time)
            if out_of_time and cut_short:
                raise DeadlineExceeded(f"the deadline passed: {error}") from error
            if isinstance(error, (Unavailable, DeadlineExceeded)) and not out_of_time:
                raise TransferFailed(f"decode {link.peer} did not answer: {error}") from error
            if isinstance(error, InternalError):  # its TransferFailed arrives as one, too
                raise TransferFailed(f"decode {link.peer}: {error}") from error
            raise

    def remove(self, link: OutgoingLink, quarantine: bool = True) -> None:
        """Takes `link` out of service; with `quarantine` its peer is refused for a while."""
        if self._links.get(link.peer) is link:
            if quarantine:
                self._quarantine(link.peer)
            self._drop(link)

    def status(self) -> list[worker_pb2.PairStatus]:
        """One entry for each open or quarantined pair. Closes abandoned links."""
        for link in [link for link in self._links.values() if link.abandoned]:
            self._drop(link)  # or the memory of a dead process stays mapped
        now = time.monotonic()
        self._refused_until = {p: end for p, end in self._refused_until.items() if end > now}
        pairs = [
            worker_pb2.PairStatus(
                prefill=self.record.incarnation,
                decode=link.peer,
                transport=link.transport.kind,
                state="OPEN",
                epoch=link.epoch,
                sent_bytes=link.sent_bytes,
                sent_ms=link.sent_s * 1e3,
                fallback=link.fallback,
            )
            for link in self._links.values()
        ]
        return pairs + [
            worker_pb2.PairStatus(prefill=self.record.incarnation, decode=peer, state="QUARANTINED")
            for peer in self._refused_until
            if peer not in self._links
        ]

    async def close(self) -> None:
        """Closes every link; running handoffs fail. Aborts get one last try; later ones are tried
        for the time of one call."""
        self._closed, self.give_up_s = True, _ABORT_S
        await cancelled(*self._opening.values())
        for link in list(self._links.values()):
            self._drop(link)
        if self._aborts:
            await asyncio.wait(set(self._aborts), timeout=_CLOSE_S)
        await cancelled(*self._aborts)
        while self._closing:
            await asyncio.gather(*self._closing)

    def _begin_opening(self, peer: str) -> asyncio.Task[OutgoingLink]:
        opening = self._opening[peer] = asyncio.create_task(self._open(peer))
        # Retrieves the error even if all waiting handoffs are cancelled.
        opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return opening

    async def _open(self, peer: str) -> OutgoingLink:
        try:
            decode = await self.find_decode(peer)
            try:
                self._make_room()
                link = await self._connect(decode)
            except BatonError as error:
                ahead = peer in self._ahead
                # A handoff reports these to its router; they do not concern the pair's network.
                refused = isinstance(error, (KvMismatch, Stale, Overloaded))
                if ahead or not refused:
                    us = self.record.incarnation
                    log.warning("no link from prefill %s to decode %s: %s", us, peer, error)
                if not (ahead or refused):
                    self._quarantine(peer)
                raise
        finally:
            del self._opening[peer]
            self._ahead.discard(peer)
        log.info("link to decode %s: %s, epoch %d", peer, link.transport.name, link.epoch)
        self._links[peer] = link
        return link

    async def _connect(self, decode: common_pb2.WorkerRecord) -> OutgoingLink:
        """Repeats the Offer until a transport that the decode worker chose works."""
        peer = decode.incarnation
        control = Control(decode.address)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-send-{peer}")
        usable = [one for one in self.transports if (peer, one.kind) not in self._unusable]
        try:
            while True:
                request = handoff_pb2.OfferRequest(
                    incarnation=self.record.incarnation,
                    target_incarnation=peer,
                    kv=self.record.kv,
                    transports=[one.kind for one in usable],
                    reachable_gpus=reachable_gpus(self.pool.device),
                )
                offer = await control.call(request, _CONNECT_S)
                transport = next((one for one in usable if one.kind == offer.transport), None)
                if transport is None:
                    raise KvMismatch(f"decode {peer} chose a transport we did not offer")
                ranks = self.pools, decode.kv_pools or 1, self.record.kv.num_kv_heads
                place = offer.endpoint, _CONNECT_S
                try:
                    connect = partial(rank_ends.connect, transport, *ranks, *place)
                    parts, ends = await run_on(
                        thread, connect, lambda made: rank_ends.close_all(made[1])
                    )
                    break
                except TransferFailed as error:
                    usable.remove(transport)
                    if transport.kind not in ONE_HOST or not usable:
                        raise
                    if len(self._unusable) == _MAX_REMEMBERED:
                        self._unusable.clear()  # living peers are tried again
                    self._unusable[peer, transport.kind] = str(error)
        except BaseException:
            thread.shutdown(wait=False)
            await control.close()
            raise
        fallback = self._fallback(transport, decode)
        return OutgoingLink(peer, offer.epoch, transport, parts, ends, thread, control, fallback)

    def _fallback(self, used: Transport, decode: common_pb2.WorkerRecord) -> str:
        """The faster transport that this pair should use, and why it does not; warns once."""
        peer = decode.incarnation
        failed = ((k, self._unusable[peer, k]) for k in ONE_HOST if (peer, k) in self._unusable)
        expected = next(failed, None) or pairing.missed_transport(used.kind, self.record, decode)
        if expected is None:
            return ""
        text = f"not {pairing.transport_name(expected[0])}: {expected[1]}"
        if (peer, text) not in self._warned:
            if len(self._warned) == _MAX_REMEMBERED:
                self._warned.clear()
            self._warned.add((peer, text))
            log.warning("link to decode %s uses %s, %s", peer, used.name, text)
        return text

    def _make_room(self) -> None:
        while len(self._links) + len(self._opening) > self.cap:
            idle = next((link for link in self._links.values() if link.users == 0), None)
            if idle is None:
                raise Overloaded(f"all {self.cap} links are in use", self.backoff_s)
            self._drop(idle)

    def _quarantine(self, peer: str) -> None:
        self._refused_until[peer] = time.monotonic() + self.backoff_s

    def _drop(self, link: OutgoingLink) -> None:
        del self._links[link.peer]
        in_background(self._closing, link.close_data())
        self._close_unused(link)

    def _close_unused(self, link: OutgoingLink) -> None:
        """Closes its control connection if it is out of service and nothing uses it."""
        if not link.users and not link.aborts and self._links.get(link.peer) is not link:
            in_background(self._closing, link.control.close())

    async def _abort(
        self,
        link: OutgoingLink,
        request: handoff_pb2.AbortRequest,
        give_up_s: float,
        tried: asyncio.Event,
    ) -> None:
        handoff_id, extra = request.handoff_id, about(handoff_id=request.handoff_id)
        backoff = Backoff(first_s=0.1, most_s=_MAX_INTERVAL_S)
        try:
            async with asyncio.timeout(give_up_s):
                while True:
                    try:
                        await link.control.call(request, _ABORT_S)
                        return
                    except _NO_ANSWER as error:
                        why = "abort of handoff %s is not answered yet: %s"
                        log.warning(why, handoff_id, error, extra=extra)
                    except BatonError as error:  # an answer, perhaps that the handoff is gone
                        log.info("abort of handoff %s: %s", handoff_id, error, extra=extra)
                        return
                    tried.set()
                    await backoff.wait()
        except TimeoutError:
            log.error("abort of handoff %s: no answer from %s", handoff_id, link.peer, extra=extra)
        finally:
            tried.set()
            link.aborts -= 1
            self._close_unused(link)
