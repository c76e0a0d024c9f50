"""Asks all routers of a cluster for their status."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from baton.config import join_address, split_address
from baton.errors import BatonError
from baton.log_format import RateLimit
from baton.net import rpc
from baton.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

_MAX_STATUS_BYTES = 64 << 20  # of thousands of workers
_ROUTER = "router"


class Routers:
    """The routers at some addresses; a name that has several stands for all of them."""

    def __init__(self, target: str, api_key: str | None, timeout_s: float) -> None:
        self._targets = [split_address(one.strip(), "--target") for one in target.split(",")]
        self._metadata, self._timeout_s = rpc.bearer(api_key), timeout_s
        self._channels: dict[str, Any] = {}
        self._log = RateLimit(log)

    async def statuses(self) -> dict[str, fleet_pb2.GetStatusResponse | None]:
        """Answers by address; None for a router that does not answer in time."""
        addresses = await self._addresses()
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close(None)
        for address in addresses - self._channels.keys():
            self._channels[address] = rpc.channel(
                address, role=_ROUTER, max_message_bytes=_MAX_STATUS_BYTES
            )
        answers = await asyncio.gather(*map(self._status, addresses))
        return dict(zip(addresses, answers, strict=True))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def _addresses(self) -> set[str]:
        """All that the names stand for now; those of a name that cannot be resolved stay."""
        found: set[str] = set()
        for host, port in self._targets:
            try:
                async with asyncio.timeout(self._timeout_s):
                    infos = await asyncio.get_running_loop().getaddrinfo(
                        host.strip("[]"), port, type=socket.SOCK_STREAM
                    )
                found |= {join_address(str(info[4][0]), port) for info in infos}
            except (OSError, TimeoutError) as error:
                self._log.line(logging.WARNING, "%s cannot be resolved: %s", host, error)
                found |= self._channels.keys() or {join_address(host, port)}
        return found

    async def _status(self, address: str) -> fleet_pb2.GetStatusResponse | None:
        stub = fleet_pb2_grpc.FleetServiceStub(self._channels[address])
        request = fleet_pb2.GetStatusRequest(without_pairs=True)
        try:
            with rpc.translated():
                answer: fleet_pb2.GetStatusResponse = await stub.GetStatus(
                    request, timeout=self._timeout_s, metadata=self._metadata
                )
                return answer
        except BatonError as error:
            self._log.line(logging.WARNING, "the router at %s does not answer: %s", address, error)
            return None
