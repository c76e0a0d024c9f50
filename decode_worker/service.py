"""HandoffService: what prefill workers ask of this decode worker."""

from __future__ import annotations

from baton.net.tasks import uninterrupted
from baton.v1 import handoff_pb2 as pb
from decode_worker.reservations import Reservations
from kvtransfer.control import ControlServicer
from kvtransfer.incoming import IncomingLinks


class HandoffService(ControlServicer):
    """Joins the links, which move bytes, and the handoffs that they are for."""

    def __init__(self, handoffs: Reservations, links: IncomingLinks) -> None:
        super().__init__(
            {"offer": self.offer, "ready": self.ready, "commit": self.commit, "abort": self.abort}
        )
        self.handoffs, self.links = handoffs, links

    async def offer(self, request: pb.OfferRequest) -> pb.OfferResponse:
        """Raises Stale, KvMismatch, Overloaded, TransferFailed."""
        return await self.links.offer(request)

    async def ready(self, request: pb.ReadyRequest) -> pb.ReadyResponse:
        """Raises Unavailable for a link that is gone, Stale, InvalidRequest, TransferFailed."""
        link = await self.links.opened(request.incarnation, request.epoch)
        slots = await self.handoffs.ready(request, link)
        return pb.ReadyResponse(block_ids=slots.block_ids)

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Raises Unavailable for a link that is gone, and what `Reservations.commit` does."""
        link = self.links.find(request.incarnation, request.epoch)
        # To the end even if the caller hangs up: a commit must not stop half-way.
        await uninterrupted(self.handoffs.commit(request, link))
        return pb.CommitResponse()

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """Raises Stale."""
        await self.handoffs.abort(request)
        return pb.AbortResponse()
