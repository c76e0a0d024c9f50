"""A TCP proxy in front of one worker: cuts, holds or slows the connections of one peer or of all.

It runs outside of the processes under test: a worker advertises the proxy's address, so that
routers and prefill workers connect through it. Cut connections end with a reset; held ones stay
open and silent, as in a network partition, and so do new ones until `release`.
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
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards what is unsent and resets


@dataclass(eq=False)
class _Connection:
    """One caller's connection and ours to the worker; `open` is cleared while it is held."""

    caller: str
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None
    open: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_per_s: float = 0.0

    def reset(self) -> None:
        """Ends both halves at once."""
        for writer in (self.near, self.far):
            if writer is not None:
                _reset(writer)


class Proxy:
    """Forwards a free loopback port to `port`; `name_of(port)` names a port's process."""

    def __init__(self, port: int, name_of: Callable[[int], str]) -> None:
        self.port = port
        self.address = ""
        self._name_of = name_of
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[str] = set()
        self._slow: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def callers(self) -> list[str]:
        """The caller of each connection."""
        return sorted(connection.caller for connection in self._connections)

    def cut(self, caller: str = "") -> int:
        """Resets the connections of `caller`, or all; how many."""
        hit = self._of(caller)
        for connection in hit:
            connection.reset()
        return len(hit)

    def hold(self, caller: str = "") -> None:
        """From now on nothing passes, neither way, on old and new connections of `caller`."""
        self._held.add(caller)
        for connection in self._of(caller):
            connection.open.clear()

    def release(self, caller: str = "") -> None:
        """What was held goes on, with every byte that waited."""
        self._held.discard(caller)
        for connection in self._connections:
            if not self._held & {"", connection.caller}:
                connection.open.set()

    def slow(self, bytes_per_s: float, caller: str = "") -> None:
        """Lets at most so many bytes a second pass on each connection; 0 is no limit."""
        self._slow[caller] = bytes_per_s
        for connection in self._of(caller):
            connection.bytes_per_s = bytes_per_s

    def _of(self, caller: str) -> list[_Connection]:
        return [one for one in self._connections if caller in ("", one.caller)]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of ours, for asyncio complains of its own when they are cancelled.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self._name_of(writer.get_extra_info("peername")[1]), writer)
        connection.bytes_per_s = self._slow.get(connection.caller) or self._slow.get("", 0.0)
        if not self._held & {"", connection.caller}:
            connection.open.set()
        self._connections.add(connection)
        try:
            await self._forward(connection, reader)
        finally:
            connection.reset()
            self._connections.discard(connection)

    async def _forward(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        """Pumps both ways until one of the ends closes; then both are closed."""
        await connection.open.wait()
        try:
            far_reader, connection.far = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return  # nothing listens there now
        pumps = [
            asyncio.create_task(_pump(connection, reader, connection.far)),
            asyncio.create_task(_pump(connection, far_reader, connection.near)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Copies one direction; even its end is not seen while the connection is held."""
    with contextlib.suppress(OSError):
        while True:
            data = await reader.read(_PIECE_BYTES)
            await connection.open.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()
            if connection.bytes_per_s:
                await asyncio.sleep(len(data) / connection.bytes_per_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


_TABLE = Path("/proc/net/tcp")
_LOCAL, _INODE = 1, 9  # columns of the table


def owner(port: int, pids: Mapping[str, int]) -> str:
    """The one of `pids`, by name, that has a connection from 127.0.0.1:`port`; "unknown" else."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for name, pid in pids.items():
        if sockets & _open_files(pid):
            return name
    return "unknown"


def _inodes(port: int) -> set[str]:
    wanted = f"0100007F:{port:04X}"  # addresses are little-endian
    rows = (line.split() for line in _TABLE.read_text().splitlines() if wanted in line)
    return {row[_INODE] for row in rows if row[_LOCAL] == wanted}


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just been closed
                found.add(str(link.readlink()))
    return found
