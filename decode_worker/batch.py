"""The role of a decode worker: joins reservations, event streams and the handoff's receiver."""

from __future__ import annotations

import grpc

from baton.config import host_id, split_address
from baton.engine.build import Loaded
from baton.engine.loop import StepReport
from baton.v1 import decode_pb2_grpc, handoff_pb2_grpc, worker_pb2
from baton.worker.messages import Limits
from baton.worker.node import Node
from decode_worker.events import EventStreams
from decode_worker.reservations import Reservations
from decode_worker.service import DecodeServicer
from kvtransfer import negotiation
from kvtransfer.pool import KvPool
from kvtransfer.receiver import HandoffReceiver
from kvtransfer.service import HandoffServicer


class Batch:
    """Everything a decode worker serves."""

    def __init__(self, node: Node, loaded: Loaded, pool: KvPool) -> None:
        config = node.config
        host, _ = split_address(node.record.address)
        usable = negotiation.usable(pool, host, config.transport)
        self.transports = tuple(transport.kind for transport in usable)
        self._node = node
        self._streams = EventStreams()
        self._reservations = Reservations(
            node.engine,
            self._streams,
            Limits.of(loaded),
            loaded.layout.block_size,
            config.lease_s,
        )
        self._receiver = HandoffReceiver(
            pool,
            loaded.descriptor,
            config.incarnation,
            host_id(),
            usable,
            self._reservations,
            node.find_prefill,
            timeout_s=config.transfer_timeout_s,
        )
        self._reservations.receiver = self._receiver

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        """Adds DecodeService and HandoffService."""
        decode = DecodeServicer(self._node, self._reservations, self._streams)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
        handoff = HandoffServicer(self._receiver)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(handoff, server)
        return ["baton.v1.DecodeService", "baton.v1.HandoffService"]

    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Links are reported by their prefill ends."""
        return []

    def on_step(self, report: StepReport) -> None:
        """Takes in a step."""
        self._reservations.on_step(report)

    async def idle(self) -> None:
        """Returns when nothing is reserved and nothing decodes."""
        await self._reservations.idle()

    async def close(self) -> None:
        """Gives what still runs back to its routers, then ends streams and links."""
        await self._reservations.close()
        self._streams.close()
        await self._receiver.close()
