"""The prefill side of one handoff: queue finished chunks, send them in order, commit or abort.

Where only the transfer failed, it alone is done again: the KV is still here, and the decode worker
still holds its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from baton import telemetry
from baton.errors import BatonError, Cancelled, DeadlineExceeded, InvalidRequest, TransferFailed
from baton.log_format import about
from baton.v1 import handoff_pb2, prefill_pb2
from kvtransfer.delivery import Chunk, Commit, Delivery, Order, Outbox
from kvtransfer.links import LinkPool
from kvtransfer.pair_link import PairLink
from kvtransfer.pool import Slots
from kvtransfer.waiting import Deadline, uninterrupted

log = logging.getLogger(__name__)

MAX_RESENDS = 2


@dataclass(frozen=True)
class TransferStats:
    """What a handoff took. `transfer_s` runs from the first put to the acknowledged Commit.

    Of the attempt that arrived: `wait_s` was spent waiting for the link's turn and the receiver,
    `wire_s` moving bytes, `hidden_s` of it while the prompt was still being computed. `resends`
    attempts failed before.
    """

    num_bytes: int
    transfer_s: float
    wait_s: float
    wire_s: float
    hidden_s: float
    chunks: int
    transport: str
    transport_kind: int
    resends: int = 0


class HandoffSender:
    """Opens handoffs over a worker's links. `step_timeout_s` caps every single wait.

    An abort waits for one try to be heard, at most `abort_wait_s`; others follow in the background.
    """

    def __init__(
        self,
        links: LinkPool,
        tracer: Tracer,
        *,
        step_timeout_s: float = 10.0,
        abort_wait_s: float = 0.5,
    ) -> None:
        self.links, self.tracer = links, tracer
        self.step_timeout_s, self.abort_wait_s = step_timeout_s, abort_wait_s

    def open(
        self,
        target: prefill_pb2.HandoffTarget,
        handoff_id: str,
        num_tokens: int,
        timeout_s: float,
        parent: Context | None = None,
        token_digest: bytes = b"",
    ) -> Handoff:
        """One handoff, as an async context manager that aborts what was not committed.

        `num_tokens` is the length of the whole sequence, cached tokens included; `timeout_s` is the
        request's time left; `parent` is the span that `kv.transfer` belongs to; `token_digest` is
        that of the tokens whose KV is sent, and Commit fails where other ones were reserved.
        """
        order = Order(
            handoff_id,
            target,
            num_tokens,
            token_digest,
            Deadline(timeout_s),
            self.step_timeout_s,
            self.links.incarnation,
            telemetry.inject(parent),
        )
        return Handoff(self, order, parent)


class Handoff:
    """One sequence's KV on its way. Its blocks must be held until commit or abort returned."""

    def __init__(self, sender: HandoffSender, order: Order, parent: Context | None) -> None:
        self._links, self._tracer = sender.links, sender.tracer
        self._abort_wait_s = sender.abort_wait_s
        self._order, self._parent = order, parent
        trace_id = telemetry.trace_id_in(parent)
        self._about = about(trace_id=trace_id, handoff_id=order.handoff_id)
        self._outbox = Outbox()
        self._resends = 0
        self._start_ns = 0
        self._link: PairLink | None = None
        self._address = ""  # of the decode worker, once it may have taken a message of ours in
        self._delivery: Delivery | None = None
        self._task: asyncio.Task[TransferStats]
        self._ended = False

    async def __aenter__(self) -> Handoff:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        reason = f"{kind.__name__}: {error}" if kind else "not committed"
        try:
            await self.abort(reason)
        finally:
            self._release()

    def send(self, first_token: int, local: Slots) -> None:
        """Queues blocks that are complete, starting at position `first_token`; returns at once.

        Every call continues where the last one ended, at first the target's cached tokens; all but
        the last end at a block's end. Raises InvalidRequest, and once the transfer has failed, why.
        """
        local.check(self._links.pool.block_size, self._links.pool.num_blocks)
        if self._task.done():
            self._raise_failure()
        self._outbox.put(Chunk(first_token, local))

    def conclude(self, num_tokens: int, first_token_id: int) -> None:
        """Queues the Commit behind what is to be sent; returns at once."""
        self._outbox.put(Commit(num_tokens, first_token_id))

    async def commit(self, num_tokens: int, first_token_id: int) -> TransferStats:
        """`conclude`, and then `committed`."""
        self.conclude(num_tokens, first_token_id)
        return await self.committed()

    async def committed(self) -> TransferStats:
        """Returns when all is sent and the decode worker has verified it.

        Raises TransferFailed, KvCorrupted, Stale, KvMismatch, Unavailable, Overloaded,
        DeadlineExceeded.
        """
        stats = await asyncio.shield(self._task)
        self._ended = True
        return stats

    async def abort(self, reason: str) -> None:
        """Gives up, unless committed. When it returns nothing more is written; the decode worker
        has been told, or is told in the background. A put that does not end in time is left to
        itself: its bytes are not used, and the decode worker is told when it has ended."""
        if not self._ended:
            self._ended = True
            await uninterrupted(self._abort(reason))

    def _raise_failure(self) -> NoReturn:
        if self._task.cancelled():
            raise Cancelled("the handoff was aborted")
        self._task.result()
        raise InvalidRequest("the handoff was committed already")

    async def _abort(self, reason: str) -> None:
        self._task.cancel()  # a put that runs is finished first, if it ends in time
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            if (failure := self._task.exception()) is None:
                return  # committed after all, though nobody waited for it
            reason = f"{type(failure).__name__}: {failure}"
        if not self._address:
            # Nothing was granted, and the router that reserved the blocks cancels them; if it is
            # gone itself, its broken event stream does.
            return
        request = self._order.abort_request(reason)
        if self._delivery is not None and self._delivery.writing:
            self._delivery.when_written(lambda: self._send_abort(request))
        else:
            await asyncio.wait({self._send_abort(request)}, timeout=self._abort_wait_s)

    def _send_abort(self, request: handoff_pb2.AbortRequest) -> asyncio.Future[None]:
        return self._links.aborts.send(self._address, request, self._order.metadata)

    async def _run(self) -> TransferStats:
        order = self._order
        try:
            async with asyncio.timeout(order.deadline.left_s(float("inf"))):
                self._link = await self._links.acquire(order.target, order.deadline)
                self._address = self._link.address
                while True:
                    self._delivery = delivery = Delivery(order, self._links, self._link)
                    try:
                        await delivery.run(self._outbox)
                        return self._finished(delivery)
                    except TransferFailed as failure:
                        await self._prepare_resend(delivery, failure)
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed during the KV transfer") from error

    async def _prepare_resend(self, delivery: Delivery, failure: TransferFailed) -> None:
        """When it returns all can be sent again. Raises `failure` when it cannot.

        The decode worker has to agree first: that ends what this attempt was granted, and proves
        that the reservation is still there.
        """
        self._start_ns = self._start_ns or delivery.start_ns
        if self._resends == MAX_RESENDS or delivery.writing:
            raise failure
        self._resends += 1
        order = self._order
        log.warning(
            "handoff %s is to be sent again: %s", order.handoff_id, failure, extra=self._about
        )
        try:
            await delivery.withdraw(str(failure))
            self._release()
            self._link = await self._links.acquire(order.target, order.deadline, again=True)
        except BatonError as error:
            log.warning(
                "handoff %s cannot be sent again: %s", order.handoff_id, error, extra=self._about
            )
            raise failure from error

    def _release(self) -> None:
        if self._link is not None:
            self._links.release(self._link)
            self._link = None

    def _finished(self, delivery: Delivery) -> TransferStats:
        end_ns = time.time_ns()
        start_ns = self._start_ns or delivery.start_ns or end_ns
        stats = TransferStats(
            num_bytes=delivery.digest.num_bytes,
            transfer_s=(end_ns - start_ns) / 1e9,
            wait_s=delivery.wait_s,
            wire_s=delivery.wire_s,
            hidden_s=delivery.hidden_s,
            chunks=delivery.chunks,
            transport=delivery.link.transport.name,
            transport_kind=delivery.link.transport.kind,
            resends=self._resends,
        )
        self._record(stats, start_ns, end_ns)
        return stats

    def _record(self, stats: TransferStats, start_ns: int, end_ns: int) -> None:
        attributes: dict[str, str | int | float | bool] = {
            "baton.handoff_id": self._order.handoff_id,
            "baton.resends": stats.resends,
            "bytes": stats.num_bytes,
            "tokens": stats.num_bytes // self._links.pool.token_bytes,
            "transport": stats.transport,
            "wait_ms": stats.wait_s * 1e3,
            "wire_ms": stats.wire_s * 1e3,
            "hidden_ms": stats.hidden_s * 1e3,
            "gb_per_s": stats.num_bytes / 1e9 / stats.wire_s if stats.wire_s else 0.0,
            "chunks": stats.chunks,
        }
        parent = self._parent if self._parent is not None else Context()
        telemetry.record(self._tracer, "kv.transfer", parent, start_ns, end_ns, attributes)
