"""A TCP proxy in front of a server: cuts, holds or slows the connections of one peer or of all.

It runs outside of the processes under test: a worker, say, advertises the proxy's address, so that
routers and prefill workers connect through it. Cut connections end with a reset; held ones stay
open and silent, as in a network partition, and so do new ones until `release`. A proxy that was
left refuses connections, and may be entered again at its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_PIECE_BYTES = 1 << 14
# 127.0.0.1 in the kernel's tables of IPv4 and, mapped, of IPv6.
_LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards what is unsent and resets


@dataclass
class Proxy:
    """Forwards a free loopback port to `port`; `name_of(port)` names a port's process."""

    port: int
    name_of: Callable[[int], str] = str
    address: str = ""
    _connections: list[tuple[str, list[asyncio.StreamWriter]]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _held: set[str] = field(default_factory=set)
    _released: asyncio.Event = field(default_factory=asyncio.Event)  # the next `release`
    _bytes_per_s: dict[str, float] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        own = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", own)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()  # those that no task has begun to serve
        await self._server.wait_closed()

    def cut(self, caller: str = "") -> None:
        """Resets the connections of `caller`, or all."""
        for name, writers in self._connections:
            if caller in ("", name):
                _reset(writers)

    def hold(self, caller: str = "") -> None:
        """From now on nothing passes, neither way, on old and new connections of `caller`."""
        self._held.add(caller)

    def release(self, caller: str = "") -> None:
        """What was held goes on, with every byte that waited."""
        self._held.discard(caller)
        self._released.set()
        self._released = asyncio.Event()

    def slow(self, bytes_per_s: float, caller: str = "") -> None:
        """Lets at most so many bytes a second pass on each connection; 0 is no limit."""
        self._bytes_per_s[caller] = bytes_per_s

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = (self.name_of(writer.get_extra_info("peername")[1]), [writer])
        self._connections.append(connection)
        # A task of ours, for asyncio complains of its own when they are cancelled.
        task = asyncio.create_task(self._serve(reader, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        connection: tuple[str, list[asyncio.StreamWriter]],
    ) -> None:
        """Forwards both ways until one of the ends closes; then both are closed."""
        caller, (writer,) = connection
        pumps = []
        try:
            await self._unheld(caller)
            with contextlib.suppress(OSError):  # nothing listens there now
                far_reader, far = await asyncio.open_connection("127.0.0.1", self.port)
                connection[1].append(far)
                ways = ((reader, far), (far_reader, writer))
                pumps = [asyncio.create_task(self._pump(caller, *way)) for way in ways]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            _reset(connection[1])  # before any wait, which may be cancelled
            self._connections.remove(connection)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, caller: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copies one direction; even its end is not seen while the connection is held."""
        with contextlib.suppress(OSError):
            while True:
                data = await reader.read(_PIECE_BYTES)
                await self._unheld(caller)
                if not data:
                    return
                writer.write(data)
                await writer.drain()
                if rate := self._bytes_per_s.get(caller) or self._bytes_per_s.get(""):
                    await asyncio.sleep(len(data) / rate)

    async def _unheld(self, caller: str) -> None:
        while self._held & {"", caller}:
            await self._released.wait()


def _reset(writers: list[asyncio.StreamWriter]) -> None:
    """Ends both halves of a connection at once."""
    for writer in writers:
        end = writer.get_extra_info("socket")
        if end is not None and end.fileno() >= 0:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()


def owner(port: int, pids: Mapping[str, int]) -> str:
    """The one of `pids`, by name, that has a connection from 127.0.0.1:`port`; "unknown" else."""
    wanted = f"socket:[{_inode_of(port)}]"
    for name, pid in pids.items():
        with contextlib.suppress(OSError):  # it has ended
            if any(_target(link) == wanted for link in Path(f"/proc/{pid}/fd").iterdir()):
                return name
    return "unknown"


def _inode_of(port: int) -> str:
    """Of the socket at 127.0.0.1:`port`, which may be one of IPv6, as gRPC's are."""
    ends = {f"{address}:{port:04X}" for address in _LOOPBACK}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] in ends:
                return fields[9]
    return ""


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):  # it was closed
        return str(link.readlink())
    return ""
