"""One open link of a prefill worker: its data end, its thread and its channel for control."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc

from baton.errors import TransferFailed
from baton.v1 import handoff_pb2_grpc
from kvtransfer.digest import Digest
from kvtransfer.interface import Link, PutStats, Transport
from kvtransfer.pool import Slots

_CONNECTION_LOST = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


class PairLink:
    """One open link: its data end, the thread its puts run on, the channel for its control."""

    def __init__(
        self,
        peer: str,
        address: str,
        epoch: int,
        transport: Transport,
        link: Link,
        thread: ThreadPoolExecutor,
        channel: grpc.aio.Channel,
    ) -> None:
        self.peer, self.address, self.epoch, self.transport = peer, address, epoch, transport
        self.stub = handoff_pb2_grpc.HandoffServiceStub(channel)
        # Held from Ready to the end of the put: a two-sided receiver takes bytes in Ready's order.
        self.turn = asyncio.Lock()
        self.users = 0
        self.sent_bytes, self.sent_s = 0, 0.0
        self._link, self._thread, self._channel = link, thread, channel
        self._closing = False

    @property
    def abandoned(self) -> bool:
        """Whether nobody uses it and its connection of control has ended."""
        return not self.users and self._channel.get_state() in _CONNECTION_LOST

    async def put(self, local: Slots, remote: Slots, digest: Digest, timeout_s: float) -> PutStats:
        """`Link.put` on the link's thread. Must not be abandoned: the thread would go on."""
        if self._closing:
            raise TransferFailed(f"the link to decode {self.peer} was closed")
        run = asyncio.get_running_loop().run_in_executor
        stats = await run(self._thread, self._link.put, local, remote, digest, timeout_s)
        self.sent_bytes += stats.num_bytes
        self.sent_s += stats.wire_s
        return stats

    async def close_data(self) -> None:
        """Ends a running put, then frees the data end; control still works."""
        if self._closing:
            return
        self._closing = True
        run = asyncio.get_running_loop().run_in_executor
        await run(None, self._link.abort)  # NCCL takes its time for it
        await run(self._thread, self._link.close)
        self._thread.shutdown()

    async def close_control(self) -> None:
        await self._channel.close(None)
