"""Opens links: asks a decode worker for one, and connects by the transport that it chose."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from baton import rpc
from baton.errors import KvMismatch, TransferFailed
from baton.v1 import common_pb2, handoff_pb2, handoff_pb2_grpc
from kvtransfer import gpus
from kvtransfer.interface import Kind, Link, Transport
from kvtransfer.pair_link import PairLink
from kvtransfer.pairing import ONE_HOST
from kvtransfer.pool import KvPool

log = logging.getLogger(__name__)

_REMEMBERED = 256  # peers of which it is known what does not work; more than ever live at a time


class Connector:
    """A prefill worker's: `timeout_s` bounds Offer, and connecting, each.

    Memory that a worker should be able to map, but cannot, is a matter of how its container was
    started, which no second try changes: the pair takes the next transport, until the peer's end.
    """

    def __init__(
        self,
        pool: KvPool,
        transports: Sequence[Transport],
        descriptor: common_pb2.KvDescriptor,
        incarnation: str,
        *,
        timeout_s: float,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        self._pool, self._descriptor, self._incarnation = pool, descriptor, incarnation
        self._transports = {transport.kind: transport for transport in transports}
        self._timeout_s, self._credentials = timeout_s, credentials
        self._unusable: dict[str, set[Kind]] = {}  # by peer, the oldest first

    async def connect(self, decode: common_pb2.WorkerRecord) -> PairLink:
        """A new link. Raises KvMismatch, Stale, Overloaded, Unavailable, TransferFailed."""
        peer = decode.incarnation
        channel = rpc.channel(decode.address, self._credentials)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-send-{peer}")
        try:
            stub = handoff_pb2_grpc.HandoffServiceStub(channel)
            while True:
                with rpc.translated():
                    offer = await stub.Offer(self._offer(peer), timeout=self._timeout_s)
                transport = self._transports.get(offer.transport)
                if transport is None:
                    raise KvMismatch(f"decode {peer} chose a transport we did not offer")
                try:
                    link = await self._connected(thread, transport, offer.endpoint, decode.pid)
                    break
                except TransferFailed as error:
                    if not self._leave_out(peer, transport, error):
                        raise
        except BaseException:
            thread.shutdown(wait=False)
            await channel.close(None)
            raise
        return PairLink(peer, decode.address, offer.epoch, transport, link, thread, channel)

    async def _connected(
        self, thread: ThreadPoolExecutor, transport: Transport, endpoint: bytes, pid: int
    ) -> Link:
        run = asyncio.get_running_loop().run_in_executor
        return await run(thread, transport.connect, self._pool, endpoint, pid, self._timeout_s)

    def _offer(self, peer: str) -> handoff_pb2.OfferRequest:
        return handoff_pb2.OfferRequest(
            incarnation=self._incarnation,
            target_incarnation=peer,
            kv=self._descriptor,
            transports=self._left(peer),
            reachable_gpus=gpus.reachable(self._pool.device),
        )

    def _left(self, peer: str) -> list[Kind]:
        """What is offered to a peer, fastest first."""
        unusable = self._unusable.get(peer, set())
        return [kind for kind in self._transports if kind not in unusable]

    def _leave_out(self, peer: str, transport: Transport, why: TransferFailed) -> bool:
        """Notes that `transport` does not work with `peer`; False when it was the last hope."""
        left = [kind for kind in self._left(peer) if kind != transport.kind]
        if transport.kind not in ONE_HOST or not left:
            return False
        self._unusable.setdefault(peer, set()).add(transport.kind)
        while len(self._unusable) > _REMEMBERED:
            del self._unusable[next(iter(self._unusable))]
        names = ", ".join(self._transports[kind].name for kind in left)
        log.warning(
            "link to decode %s falls from %s to %s, because %s", peer, transport.name, names, why
        )
        return True
