"""Which process has a TCP connection, by its local port; reads no more of /proc than it must."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_LOCAL, _INODE = 1, 9  # columns of the table


def owner(port: int, pids: Mapping[str, int]) -> str:
    """The one of `pids`, by name, that has a connection from 127.0.0.1:`port`; "somebody" else."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for name, pid in pids.items():
        if sockets & _open_files(pid):
            return name
    return "somebody"


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
