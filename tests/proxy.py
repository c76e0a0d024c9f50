"""A TCP proxy in front of a server: cuts, holds or slows the connections of one peer or of all.

It runs outside of the processes under test: a worker, say, advertises the proxy's address, so that
routers and prefill workers connect through it. Cut connections end with a reset; held ones stay
open and silent, as in a network partition, and so do new ones until `release`. A proxy that was
left refuses connections, and may be entered again at its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

_PIECE_BYTES = 1 << 14
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards what is unsent and resets


@dataclass(eq=False)
class _Connection:
    name_of: Callable[[int], str]
    writers: list[asyncio.StreamWriter]  # to the caller, and to the server once it is connected

    @cached_property
    def caller(self) -> str:
        """Its process; found when a fault first asks, as finding it takes a while."""
        return self.name_of(self.writers[0].get_extra_info("peername")[1])


@dataclass
class Proxy:
    """Forwards a free loopback port to `port`; `name_of(port)` names a port's process."""

    port: int
    name_of: Callable[[int], str] = str
    address: str = ""
    _connections: list[_Connection] = field(default_factory=list)
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

    def of(self, caller: str = "") -> Sequence[_Connection]:
        """The connections of `caller`, or all."""
        return [one for one in self._connections if not caller or one.caller == caller]

    def cut(self, caller: str = "") -> None:
        """Resets the connections of `caller`, or all."""
        for one in self.of(caller):
            _reset(one.writers)

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
        self._bytes_per_s.pop(caller, None)
        if bytes_per_s:
            self._bytes_per_s[caller] = bytes_per_s

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self.name_of, [writer])
        self._connections.append(connection)
        # A task of ours, for asyncio complains of its own when they are cancelled.
        task = asyncio.create_task(self._serve(reader, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        """Forwards both ways until one of the ends closes; then both are closed."""
        (writer,) = connection.writers
        pumps = []
        try:
            await self._unheld(connection)
            with contextlib.suppress(OSError):  # nothing listens there now
                far_reader, far = await asyncio.open_connection("127.0.0.1", self.port)
                connection.writers.append(far)
                ways = ((reader, far), (far_reader, writer))
                pumps = [asyncio.create_task(self._pump(connection, *way)) for way in ways]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            _reset(connection.writers)  # before any wait, which may be cancelled
            self._connections.remove(connection)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copies one direction; even its end is not seen while the connection is held."""
        with contextlib.suppress(OSError):
            while True:
                data = await reader.read(_PIECE_BYTES)
                await self._unheld(connection)
                if not data:
                    return
                writer.write(data)
                await writer.drain()
                rates = self._bytes_per_s
                if rate := rates and (rates.get(connection.caller) or rates.get("")):
                    await asyncio.sleep(len(data) / rate)

    async def _unheld(self, connection: _Connection) -> None:
        while self._held and ("" in self._held or connection.caller in self._held):
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
    """The one of `pids`, by name, that has a connection from 127.0.0.1:`port`; "unknown" else.

    In one pass over the kernel's tables: the loop that asks forwards all connections, and while it
    is late, callers connect again.
    """
    row = re.compile(rb": [0-9A-F]*0100007F:%04X (?:\S+ +){7}(\d+) " % port)
    tables = (Path("/proc/net", name).read_bytes() for name in ("tcp", "tcp6"))
    # A port may belong to several connections, to other ports.
    files = {f"socket:[{int(found[1])}]" for table in tables for found in row.finditer(table)}
    owners = (name for name, pid in pids.items() if not files.isdisjoint(_open_files(pid)))
    return next(owners, "unknown")


def _open_files(pid: int) -> Iterator[str]:
    """What the descriptors of a process refer to, of one that may end meanwhile."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(descriptor.readlink())
